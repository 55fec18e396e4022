"""Noise for attention scores, from counters instead of a generator's state.

The noise of (query head, query, key) depends on their numbers and a seed alone: not on how work is
split into blocks, on the rows of a batch or on the backend, and it follows a token wherever it is
stored and whichever beam it belongs to.

u = (h(h(h(seed + head * A) + query * B) + key * C) mod 2^24 + 0.5) / 2^24 with h the 32-bit
finalizer of MurmurHash3 and all sums mod 2^32; then noise = F^-1(u). fp32 rounds the largest u to
1, whose noise would be infinite: u is 1 - 2^-24 at most.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

_EULER = 0.5772156649015329  # mean of the Gumbel distribution
A, B, C = 0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D
M1, M2 = 0x85EBCA6B, 0xC2B2AE35
TOP = 1.0 - 2.0**-24


class Noise(NamedTuple):
    """What noise to add to the logits of some queries and keys.

    kind: one of `KINDS`. keys: int32 or int64 [B or 1, Hk or 1, N], logical index of each key.
    first: that of the first query, the others follow. fixed: every key has one noise for all
    queries. head: number of the first key/value head, where a process holds a part of them.
    """

    kind: str
    seed: int
    keys: Tensor
    first: int
    fixed: bool = False
    head: int = 0

    def first_seed(self, r: int) -> int:
        """Return the seed of the first query head, given R: seed + number * A, mod 2^32.

        The seed of the i-th head after it is i * A more.
        """
        return (self.seed + self.head * r * A) & 0xFFFFFFFF

    def block(self, hk: int, r: int, lo: int, hi: int, end: int) -> Tensor:
        """Return noise of queries lo to hi and keys below `end`: fp32 [B or 1, Hk, R, rows, end].

        rows is 1 if the noise is fixed.
        """
        device = self.keys.device
        heads = torch.arange(hk * r, device=device).view(1, hk, r, 1, 1)
        state = _hash(_int32(self.first_seed(r) + heads * A))
        if not self.fixed:
            queries = torch.arange(self.first + lo, self.first + hi, device=device).view(-1, 1)
            state = _hash(state + _int32(queries * B))
        keys = _int32(self.keys[..., :end].long() * C)[:, :, None, None, :]
        bits = _hash(state + keys).bitwise_and_(0xFFFFFF)
        u = bits.float().add_(0.5).mul_(2.0**-24).clamp_(max=TOP)
        return KINDS[self.kind](u)


def _int32(x: Tensor) -> Tensor:
    """Return integers x mod 2^32, as the int32 with the same bits."""
    low = x & 0xFFFFFFFF
    return torch.where(low >= 1 << 31, low - (1 << 32), low).int()


def _hash(x: Tensor) -> Tensor:
    """Apply the finalizer of MurmurHash3 to int32 [...]: every input bit moves every output bit."""
    m1, m2 = M1 - (1 << 32), M2 - (1 << 32)
    x = x ^ (x >> 16).bitwise_and_(0xFFFF)
    x.mul_(m1)
    x ^= (x >> 13).bitwise_and_(0x7FFFF)
    x.mul_(m2)
    x ^= (x >> 16).bitwise_and_(0xFFFF)
    return x


def _gumbel(u: Tensor) -> Tensor:
    return u.log_().neg_().log_().neg_()


def _gaussian(u: Tensor) -> Tensor:
    """Return numbers with the mean and the deviation of the Gumbel distribution."""
    return torch.special.ndtri(u).mul_(math.pi / math.sqrt(6)).add_(_EULER)


def _constant(u: Tensor) -> Tensor:
    return torch.full_like(u, _EULER)


KINDS: dict[str, Callable[[Tensor], Tensor]] = {
    "gumbel": _gumbel,
    "gaussian": _gaussian,
    "constant": _constant,
}
"""Inverse distribution functions by name; they may overwrite their argument."""
