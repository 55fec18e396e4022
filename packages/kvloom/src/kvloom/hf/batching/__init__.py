"""transformers' continuous batching with packed pages."""
