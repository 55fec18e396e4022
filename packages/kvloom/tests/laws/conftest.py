"""Every law holds for the kernels that a user gets, and for the reference."""

from backends import kernels

__all__ = ["kernels"]
