"""Positional encodings of keys: rotary embedding and ALiBi."""

from .rope import Rope

__all__ = ["Rope"]
