"""Triton kernels of the `quantize` family."""
