"""Cosines and sines for keys packed before RoPE, few enough to stay in the core's cache.

A query rotated back by p has the same product with a key rotated by j as with that key rotated by
p + j. So a kernel rotates the query once per tile, to the tile's first token, in two table
look-ups: a multiple of `FAR`, then the remainder. It rotates keys by their distance from that
token. Decides only the form of the tables.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from ....positions.rope import Rope
from ...constants import on_cpu

FAR = 128
BEFORE = 8  # multiples of FAR below position 0, for padding
_NEAR = FAR + 640  # rows for any step within the longest tile


def tables(rope: Rope, d: int, tokens: int) -> tuple[Tensor, ...]:
    """Return rows for 0, 1, 2 … and for FAR times -BEFORE … tokens / FAR: fp32 [rows, 2, d].

    A row holds the cosines of all channels, 1 for a channel that does not rotate, and then the
    sines, negated for the first of a pair: x rotates to x * cosine + its partner * sine.
    """
    far = BEFORE + 2 + tokens // FAR
    return _tables(tuple(rope.inv_freq.tolist()), rope.interleaved, d, 1 << (far - 1).bit_length())


@lru_cache(maxsize=8)
@on_cpu
def _tables(inv_freq: tuple[float, ...], interleaved: bool, d: int, far: int) -> tuple[Tensor, ...]:
    steps = FAR * torch.arange(-BEFORE, far - BEFORE)
    return tuple(_rows(inv_freq, interleaved, d, n) for n in (torch.arange(_NEAR), steps))


def _rows(inv_freq: tuple[float, ...], interleaved: bool, d: int, steps: Tensor) -> Tensor:
    angle = steps.double()[:, None] * torch.tensor(inv_freq, dtype=torch.float64)
    half, table = len(inv_freq), torch.zeros(len(steps), 2, d)
    table[:, 0] = 1.0
    if interleaved:
        first, second = slice(0, 2 * half, 2), slice(1, 2 * half, 2)
    else:
        first, second = slice(0, half), slice(half, 2 * half)
    for place, sign in ((first, -1.0), (second, 1.0)):
        table[:, 0, place] = angle.cos().float()
        table[:, 1, place] = (sign * angle.sin()).float()
    return table
