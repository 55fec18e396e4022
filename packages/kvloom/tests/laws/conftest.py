"""Every law holds for the kernels that a user gets, and for the reference."""

from backends import kernels
from floor import short_prompts_evict

__all__ = ["kernels", "short_prompts_evict"]
