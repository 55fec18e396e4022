"""Run models by kernels and by the reference."""

from backends import kernels
from floor import short_prompts_evict

__all__ = ["kernels", "short_prompts_evict"]
