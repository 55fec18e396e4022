"""Rotary position embedding of keys that are already rotated: rotate them to other positions.

A key at position p is its raw key rotated by p; rotations compose, so a stored key moves from p to
p + shift in one rotation, and shift = -p gives the raw key. `renumber` gives kept tokens positions
as if the evicted ones had never existed. Decides nothing about models: `hf.rotary` finds how a
model rotates.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor


class Rope(NamedTuple):
    """How a model rotates: angle of pair i at position p is p * inv_freq[i].

    inv_freq: fp32 [dims / 2]; only the first `dims` of a key's D channels rotate (partial rotary).
    interleaved: pairs are channels (2i, 2i + 1), else (i, i + dims / 2). positions: how many the
    model has; None: unknown.
    """

    inv_freq: Tensor
    interleaved: bool = False
    positions: int | None = None

    def angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosine and sine of each pair's angle: fp32 [*positions.shape, dims / 2] each."""
        if positions.is_cpu and positions.numel() == 1:  # all layers of a step need the same one
            return _angles_at(self.inv_freq, int(positions), positions.shape)
        return _angles(self.inv_freq, positions)

    def rotate(self, x: Tensor, shift: Tensor | int) -> Tensor:
        """Rotate x [B, Hk, N, D] by whole positions, in x's dtype.

        shift: [B or 1, Hk or 1, N], or one number for all. Angles and products are computed in fp32
        (angles in fp64: positions grow large).
        """
        if isinstance(shift, int):
            angles = _angles_at(self.inv_freq, shift, torch.Size((1, 1, 1)))
            cos, sin = (angle.to(x.device, non_blocking=True) for angle in angles)
        else:
            cos, sin = self.angles(shift.to(x.device))
        return self.apply(x, cos, sin)

    def rotate_mean(self, x: Tensor, positions: Tensor) -> Tensor:
        """Return the mean of x [..., D] rotated by each of the positions [P], in x's dtype."""
        return self.apply(x, *(angle.mean(dim=0) for angle in self.angles(positions.to(x.device))))

    def apply(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Return x [..., D] with pairs rotated by cos and sin, fp32 [..., dims / 2]."""
        return rotate_pairs(x.float(), cos, sin, self.interleaved).to(x.dtype)


def rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Rotate pairs of the first channels of x fp32 [..., D]; (a, b) becomes (a c - b s, b c + a s).

    cos, sin: fp32 [..., dims / 2]. Products and sums are rounded apart, as kernels do.
    """
    dims = 2 * cos.shape[-1]
    part = x[..., :dims]
    a, b = part.unflatten(-1, (-1, 2)).unbind(-1) if interleaved else part.chunk(2, dim=-1)
    pair = (a * cos).sub_(b * sin), (b * cos).add_(a * sin)
    part = torch.stack(pair, dim=-1).flatten(-2) if interleaved else torch.cat(pair, dim=-1)
    return part if dims == x.shape[-1] else torch.cat([part, x[..., dims:]], dim=-1)


def renumber(rope: Rope, k: Tensor, index: Tensor, newest: int) -> Tensor:
    """Rotate keys k [B, Hk, N, D] to consecutive positions that end at `newest`.

    index: the tokens' logical indices, and positions so far, [B or 1, Hk or 1, N].
    """
    rank = index.argsort(dim=-1).argsort(dim=-1)
    return rope.rotate(k, newest + 1 - index.shape[-1] + rank - index)


def _angles(inv_freq: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    angle = positions.double().unsqueeze(-1) * inv_freq.to(positions.device, torch.float64)
    return angle.cos().float(), angle.sin().float()


@lru_cache(maxsize=16)
def _angles_at(inv_freq: Tensor, position: int, shape: torch.Size) -> tuple[Tensor, Tensor]:
    """Return the angles at one position, in a shape; tensors are cache keys by identity."""
    with torch.inference_mode(False):  # so that later calls can differentiate
        return _angles(inv_freq, torch.full(shape, position, device="cpu"))
