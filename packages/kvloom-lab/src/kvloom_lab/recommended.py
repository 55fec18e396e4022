"""The recommended recipes, which commands take by default; importing this imports nothing else."""

RECOMMENDED = ("near-lossless", "balanced", "small", "tiny", "micro")
"""From the smallest difference from the full cache to the fewest bytes."""
DEFAULT_RECIPE = RECOMMENDED[0]
"""What a command takes that measures one recipe; that of `kvloom.Cache` and `kvloom.attach`."""
