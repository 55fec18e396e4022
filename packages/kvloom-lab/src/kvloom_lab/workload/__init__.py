"""The inputs of measurements: texts, shared forward passes, filled caches, files and the clock."""
