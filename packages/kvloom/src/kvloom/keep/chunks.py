"""Chunks of a prompt, which `Rotated` scores and `Fit` fits one by one."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from ..positions.rope import Rope


def chunks(tokens: int, most: int) -> Iterator[tuple[int, int]]:
    """Yield (first, end) of each chunk: as few as have `most` tokens at most, equally long.

    A last chunk of what is left would have few queries, and a fit by few queries does harm.
    """
    count = -(-tokens // most)
    return pairwise(tokens * i // max(1, count) for i in range(count + 1))


def longest(tokens: int, most: int) -> int:
    """Return the tokens of the longest chunk."""
    return -(-tokens // max(1, -(-tokens // most)))


def query_shift(first: int, end: int, tokens: int, rope: Rope) -> int:
    """Return by how many positions the queries of a chunk are rotated.

    They get positions after the prompt of `tokens` tokens, as in a repetition; nearer ones, but
    after the chunk, where the model lacks positions.
    """
    after = tokens - first
    if rope.positions is not None:
        after = min(after, rope.positions - (end - first))
    return max(end - first, after)
