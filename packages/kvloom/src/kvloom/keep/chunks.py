"""Chunks of a prompt, which `Rotated` scores and `Fit` fits one by one."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise


def chunks(tokens: int, most: int) -> Iterator[tuple[int, int]]:
    """Yield (first, end) of each chunk: as few as have `most` tokens at most, equally long.

    A last chunk of what is left would have few queries, and a fit by few queries does harm.
    """
    count = -(-tokens // most)
    return pairwise(tokens * i // max(1, count) for i in range(count + 1))


def longest(tokens: int, most: int) -> int:
    """Return the tokens of the longest chunk."""
    return -(-tokens // max(1, -(-tokens // most)))
