"""Prompts of the papers' examples are short."""

from floor import short_prompts_evict

__all__ = ["short_prompts_evict"]
