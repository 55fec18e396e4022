"""A folder of the caches of prompts, which later prompts that begin alike load."""
