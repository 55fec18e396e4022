"""What measurements need: texts, shared forward passes, filled caches, files, the machine."""
