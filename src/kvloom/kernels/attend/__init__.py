"""Attention of a few queries over one stretch of tokens, and the exact merge of such stretches."""
