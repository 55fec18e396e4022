"""Triton kernels of the `score` family."""
