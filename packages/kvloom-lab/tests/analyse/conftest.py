"""Run models by kernels and by the reference."""

from backends import kernels

__all__ = ["kernels"]
