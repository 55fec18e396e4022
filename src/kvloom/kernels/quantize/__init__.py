"""Packing and unpacking of groups of n-bit codes."""
