"""Inverse questions: the longest context, or the largest batch, that a condition allows.

A packed cache shrinks a little where a block of tokens is packed, so what fits need not be a single
range.
"""

from __future__ import annotations

from collections.abc import Callable

UNLIMITED = 1 << 40
"""The largest number that is tried: of tokens, or of rows."""


def largest(fits: Callable[[int], bool], beyond: int = 0) -> int:
    """Return the largest number up to `UNLIMITED` that fits; 0 if none does.

    beyond: how far to search after a number that does not fit, where a larger one may fit again.
    """
    most = UNLIMITED
    if fits(most):
        return most
    power = 1 << (most.bit_length() - 1)
    while power and not fits(power):
        power >>= 1
    if not power:
        return 0
    low, high = power, min(2 * power, most)  # low fits; high does not, or is `most`
    while high - low > 1:
        middle = (low + high) // 2
        if fits(middle):
            low = middle
        else:
            high = middle
    result, tried = low, low
    while tried < min(result + beyond, most):
        tried += 1
        if fits(tried):
            result = tried
    return result
