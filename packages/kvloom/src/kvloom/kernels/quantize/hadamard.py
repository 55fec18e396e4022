"""Rotated vectors rounded to the levels of a normal distribution, in plain torch.

TurboQuant (arXiv:2504.19874), its mean-squared-error form: a group x of G channels is rotated,
y = R x, so that its coordinates look like draws from a normal distribution whatever x was;
u = y sqrt(G) / |y| is rounded to the nearest of Lloyd and Max's levels c for N(0, 1); the stored
scale is |y| / |c(u)|, so that x' = R^T (scale c) has the norm of x (one that its dtype cannot hold
becomes the largest). R is a Hadamard matrix with random signs, times a small cosine transform where
G is not a power of 2; the same for all heads and layers.

Every sum is taken in an order that is written down here, so that compiled kernels, and other
machines, find the same codes and scales to the last bit.
"""

from __future__ import annotations

import math
from functools import lru_cache
from itertools import pairwise
from statistics import NormalDist

import torch
import torch.nn.functional as F
from torch import Tensor

from ...encoding import stored_scale, top
from ..arguments import on_cpu


def quantize_rotated(
    x: Tensor, bits: float, group: int, meta: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Quantize x [B, Hk, N, D] to (codes uint8 [B, Hk, N, D], scale [B, Hk, N, D/G])."""
    grouped = x.float().unflatten(-1, (-1, group))
    rotated = rotate(grouped)
    norm = _length(rotated)
    inverse = torch.where(norm > 0, norm.reciprocal(), 0.0)
    codebook = levels(bits).to(x.device)
    unit = rotated * (inverse * math.sqrt(group))
    codes = torch.bucketize(unit.contiguous(), ends(codebook))
    rounded = _length(codebook[codes])  # may be 0 where all u are, and norm is
    scale = norm / rounded.clamp_min(1e-6)
    scale = stored_scale(scale.clamp_max(torch.finfo(meta).max), meta)
    return codes.to(torch.uint8).view(x.shape), scale.squeeze(-1)


def dequantize_rotated(codes: Tensor, scale: Tensor, bits: float, group: int) -> Tensor:
    """Invert `quantize_rotated`: levels times scale, rotated back, in fp32."""
    rounded = levels(bits).to(codes.device)[codes.long()].unflatten(-1, (-1, group))
    rotated = rounded * scale.float().unsqueeze(-1)
    return unrotate(rotated).flatten(-2)


@lru_cache
@on_cpu
def levels(bits: float) -> Tensor:
    """Return the levels with the least squared error for N(0, 1), ascending, fp32 [codes]."""
    normal, count = NormalDist(), top(bits) + 1
    levels = [normal.inv_cdf((i + 0.5) / count) for i in range(count)]
    for _ in range(20_000):  # each level to the mean of what is rounded to it
        between = [(low + high) / 2 for low, high in pairwise(levels)]
        ends = [(normal.pdf(x), normal.cdf(x)) for x in (-math.inf, *between, math.inf)]
        better = [(p - q) / (b - a) for (p, a), (q, b) in pairwise(ends)]
        done = all(abs(a - b) < 1e-12 for a, b in zip(levels, better, strict=True))
        levels = better
        if done:
            break
    found = torch.tensor(levels, dtype=torch.float64)
    return ((found - found.flip(0)) / 2).float()  # symmetric to the last bit


def ends(levels: Tensor) -> Tensor:
    """Return up to where each level but the last is the nearest."""
    return (levels[1:] + levels[:-1]) / 2


def rotate(x: Tensor) -> Tensor:
    """Return R x along the last dimension, fp32; the same for a vector whatever is beside it."""
    signs, mix = parts(x.shape[-1])
    blocks = (x * signs.to(x.device)).unflatten(-1, (len(mix), -1))
    return _mix_rows(_hadamard(blocks), mix).flatten(-2)


def unrotate(x: Tensor) -> Tensor:
    """Return R^T x along the last dimension, fp32."""
    signs, mix = parts(x.shape[-1])
    back = _hadamard(_mix_rows(x.unflatten(-1, (len(mix), -1)), mix.T)).flatten(-2)
    return back * signs.to(x.device)


@lru_cache
@on_cpu
def matrix(group: int) -> Tensor:
    """Return M fp32 [group, group] with x M = R x: faster than butterflies for few vectors."""
    return rotate(torch.eye(group, dtype=torch.float32))


def _hadamard(x: Tensor) -> Tensor:
    """Multiply x by the symmetric orthogonal Hadamard matrix, by butterflies."""
    size, half = x.shape[-1], 1
    while half < size:
        a, b = x.unflatten(-1, (-1, 2, half)).unbind(-2)
        x = torch.stack([a + b, a - b], dim=-2).flatten(-3)
        half *= 2
    return x * (1 / math.sqrt(size))


def _mix_rows(x: Tensor, mix: Tensor) -> Tensor:
    """Combine the rows of x [..., m, 2^k] by mix [m, m], one row of x after the other."""
    if len(mix) == 1:
        return x
    mixed = torch.zeros_like(x)
    for column, row in zip(mix.to(x.device).T, x.unbind(-2), strict=True):
        mixed = mixed + column.unsqueeze(-1) * row.unsqueeze(-2)
    return mixed


def _length(x: Tensor) -> Tensor:
    """Return |x| along the last dimension, [..., 1]."""
    return root(summed(x.square()))


def summed(x: Tensor) -> Tensor:
    """Sum along the last dimension to [..., 1]: sixteen numbers are added to the next sixteen,
    and so on, then the upper half of the sixteen sums to the lower, and so on.
    """
    total, *others = F.pad(x, (0, -x.shape[-1] % 16)).split(16, dim=-1)
    for part in others:
        total = total + part
    while total.shape[-1] > 1:
        low, high = total.chunk(2, dim=-1)
        total = low + high
    return total


def root(x: Tensor) -> Tensor:
    """Return the square root; torch's of fp32 is not always the nearest."""
    return x.double().sqrt().float()


@lru_cache
@on_cpu
def parts(dim: int) -> tuple[Tensor, Tensor]:
    """Return random signs [dim], and the cosine transform of the odd part of dim, [m, m]."""
    signs = torch.randint(0, 2, (dim,), generator=torch.Generator().manual_seed(dim)) * 2.0 - 1
    m = dim // (dim & -dim)
    i = torch.arange(m, dtype=torch.float64)
    mix = torch.cos(math.pi / m * i[:, None] * (i + 0.5)) * math.sqrt(2 / m)
    mix[0] /= math.sqrt(2)
    return signs, mix.float()
