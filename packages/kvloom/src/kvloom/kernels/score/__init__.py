"""Attention mass per key, and the token to evict."""
