"""Triton kernels of the `attend` family."""
