"""The reliability campaign: `make soak` and `make soak-quick`."""
