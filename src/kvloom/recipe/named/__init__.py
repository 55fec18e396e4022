"""The named recipes, one file a paper or family."""
