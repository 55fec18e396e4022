"""Tiles of rotated tokens whose tokens and channels are normalized in turns, in plain torch.

KVarN (arXiv:2606.03458), variance normalization: a tile of T tokens of a head is divided by the
standard deviations of its tokens, those of its channels, and so on, `TURNS` times. Of all turns,
that one is kept after which the standard deviations of tokens, and of channels, differ least
(largest over smallest, tokens and channels added).

Ranges of a channel's tokens need no deviation of the channel, which only scales them: per channel
a tile stores the factors of its tokens, x' = (code * scale + zero) * factor of the token, and per
token those of its channels. So a row of a tile's scales has n scales, n zeros and m factors: n
channels and m tokens, or n tokens and m channels.

Every sum is taken in an order that is written down here, so that compiled kernels find the same
factors to the last bit.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .byte_layout import stored_scale
from .rotated import root, summed

TURNS = 16
LEAST, MOST = 0.75, 2.0**14
"""Limits of what channels are divided by, and tokens in units of the tile's root mean square."""


def numbers(axis: str, tile: int, d: int) -> int:
    """Numbers of a row of scales, of a tile of one head of d channels."""
    return tile + d + (d if axis == "channel" else tile)


def deviations(x: Tensor, live: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return what tokens [..., T, 1] and channels [..., 1, D] of tiles x are divided by.

    x: fp32 [..., T, D], 0 where live, bool [..., T, 1], is False: padding, which is not counted.
    """
    t, d = x.shape[-2:]
    count = torch.full_like(x[..., :1, :1], t)
    if live is not None:
        count = live.sum(-2, keepdim=True).float().expand_as(count)
    size = root(summed(summed(x * x).mT) / (count * d).clamp_min(1.0))
    size = torch.where(size > 0, size, 1.0)
    by_token, best = _deviation(x, torch.full_like(count, d)), torch.full_like(size, torch.inf)
    tokens, channels = torch.ones_like(x[..., :1]), torch.ones_like(x[..., :1, :])
    for _ in range(TURNS):
        its_tokens = by_token.maximum(size * LEAST).minimum(size * MOST)
        by_channel = _deviation((x * its_tokens.reciprocal()).mT, count).mT
        its_channels = by_channel.clamp(LEAST, MOST)
        by_token = _deviation(x * its_channels.reciprocal(), torch.full_like(count, d))
        spread = _spread(by_token * its_tokens.reciprocal(), -2)
        spread = spread + _spread(by_channel * its_channels.reciprocal(), -1)
        better = spread < best
        best = torch.where(better, spread, best)
        tokens = torch.where(better, its_tokens, tokens)
        channels = torch.where(better, its_channels, channels)
    return tokens, channels


def stored_factor(factor: Tensor, meta: torch.dtype) -> Tensor:
    """Return a factor as stored; one that its dtype cannot hold becomes the largest."""
    return stored_scale(factor.clamp_max(torch.finfo(meta).max), meta)


def _deviation(x: Tensor, count: Tensor) -> Tensor:
    """The standard deviation of `count` numbers in the last dimension, the others 0: [..., 1]."""
    total = summed(x)
    squares = summed(x * x) - total * (total / count.clamp_min(1.0))
    return root(squares.clamp_min(0.0) / (count - 1).clamp_min(1.0))


def _spread(deviation: Tensor, dim: int) -> Tensor:
    """The largest over the smallest that is not 0."""
    some = torch.where(deviation > 0, deviation, torch.inf)
    return deviation.amax(dim, keepdim=True) / some.amin(dim, keepdim=True)
