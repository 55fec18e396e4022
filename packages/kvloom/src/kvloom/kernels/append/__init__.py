"""Writing a step's exact keys and values to storage."""
