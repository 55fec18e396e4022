"""Packing tokens into codes, scales and zeros, and unpacking them."""
