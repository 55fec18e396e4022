"""How far to clip each group of channels (SKVQ, arXiv:2405.06219, section 3.2).

The factor alpha of a layer is the one on a grid with the least squared error of attention's output
on sampled queries, all groups at one alpha; that of a group, with all others at the layer's.
Keys and values are searched apart, and as they will be used: a query sees the first and the newest
tokens exactly. That matters for keys: clipping makes them shorter, and beside exact ones they lose.
Departures: the output is taken before the projection W_o,
where values' groups do not meet; the official code has no search, but one constant.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor

from ..rope import Rope
from ..store import Packed
from ..store.codec import Channels, Mapped
from .record import Seen

GRID = tuple(round(0.6 + 0.02 * i, 2) for i in range(21))


class Sample(NamedTuple):
    """Some queries of a layer, q [B, Hq, S, D], and all that they attend to, k, v [B, Hk, N, D].

    rows: int64 [S], which of the N tokens ask; keys are after RoPE. exact: so many first and newest
    tokens that a query sees exactly. bias: fp32 [B, Hq, N].
    """

    q: Tensor
    k: Tensor
    v: Tensor
    rows: Tensor
    scale: float
    softcap: float | None
    exact: tuple[int, int] = (0, 0)
    bias: Tensor | None = None

    @classmethod
    def of(cls, seen: Seen, queries: int, exact: tuple[int, int] = (0, 0)) -> Sample:
        """Take about `queries` query rows, evenly from the second half."""
        t = seen.q.shape[2]
        rows = torch.linspace(t // 2, t - 1, min(queries, t - t // 2)).long()
        q = seen.q[:, :, rows.to(seen.q.device)]
        bias = None if seen.bias is None else seen.bias.cpu()
        kv = seen.k.cpu(), seen.v.cpu()
        return cls(q.cpu(), *kv, rows, seen.scale, seen.softcap, exact, bias)


class Attention:
    """The exact attention of a sample, and what a change of its logits makes of it."""

    def __init__(self, sample: Sample) -> None:
        b, hq, s, d = sample.q.shape
        self.k, self.v = sample.k.float(), sample.v.float()
        hk, n = self.k.shape[1:3]
        self.q = sample.q.float().reshape(b, hk, hq // hk, s, d)
        self.scale, self.softcap = sample.scale, sample.softcap
        self.logits = self.q @ self.k.transpose(-1, -2).unsqueeze(2) * self.scale
        if sample.bias is not None:
            self.logits += sample.bias.view(-1, hk, hq // hk, 1, n)
        self.hidden = torch.arange(n) > sample.rows[:, None]
        self.weights = self.shifted(0.0)  # [B, Hk, R, S, N]
        sinks, recent = sample.exact
        at = torch.arange(n)
        self.packed = (at >= sinks) & (at <= sample.rows[:, None] - recent)  # [S, N]

    def shifted(self, change: Tensor | float) -> Tensor:
        """Attention when the logits are changed by so much."""
        logits = self.logits + change
        if self.softcap is not None:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        return logits.masked_fill_(self.hidden, -torch.inf).softmax(dim=-1)

    def shifted_by_keys(self, off: Tensor) -> Tensor:
        """Attention when the keys are off by `off` [B, Hk, N, D]."""
        change = self.q @ off.transpose(-1, -2).unsqueeze(2) * self.scale
        return self.shifted(change * self.packed)

    def missed_by_keys(self, off: Tensor) -> float:
        """Squared error of the output when the keys are off by `off` [B, Hk, N, D]."""
        shift = self.shifted_by_keys(off) - self.weights
        return (shift @ self.v.unsqueeze(2)).square().sum().item()

    def missed_by_values(self, off: Tensor) -> Tensor:
        """Squared error of each channel [Hk, D] of the output when the values are off by `off`."""
        return (self.weights * self.packed @ off.unsqueeze(2)).square().sum(dim=(0, 2, 3))


def search(
    sample: Sample, side: str, fmt: Packed, channels: Channels, rope: Rope | None
) -> tuple[Tensor, Tensor]:
    """Clip factors of a format for "keys" or "values": fp32 [groups], and [1] for the layer.

    channels: what the format is told of the layer, but for the factors. rope: for keys that are
    packed as before RoPE.
    """
    assert channels.group_of is not None
    exact, grid = Attention(sample), torch.tensor(GRID)
    if side == "values":
        missed = [exact.missed_by_values(off) for off in _errors(exact.v, fmt, channels)]
        alone = torch.zeros(len(GRID), int(channels.group_of.max()) + 1)  # [grid, groups]
        alone.index_add_(1, channels.group_of.reshape(-1), torch.stack(missed).flatten(1))
        return grid[alone.argmin(dim=0)], grid[alone.sum(dim=1).argmin()].view(1)
    return _keys(exact, fmt, channels, rope)


def _keys(
    exact: Attention, fmt: Packed, channels: Channels, rope: Rope | None
) -> tuple[Tensor, Tensor]:
    """The layer's factor, and then each group's with all others at the layer's."""
    assert channels.group_of is not None
    at = torch.arange(exact.k.shape[2]).view(1, 1, -1)
    keys = exact.k if rope is None else rope.turn(exact.k, -at)

    def missed(off: Tensor) -> float:
        return exact.missed_by_keys(off if rope is None else rope.turn(off, at))

    together = [missed(off) for off in _errors(keys, fmt, channels)]
    best = min(range(len(GRID)), key=together.__getitem__)
    base = next(islice(_errors(keys, fmt, channels), best, None))
    inside = [(channels.group_of == g)[:, None, :] for g in range(int(channels.group_of.max()) + 1)]
    found = torch.full((len(inside),), GRID[best])
    least = [together[best]] * len(inside)
    for alpha, off in zip(GRID, _errors(keys, fmt, channels), strict=True):
        for g, here in enumerate(inside):
            error = missed(torch.where(here, off, base))
            if error < least[g]:
                least[g], found[g] = error, alpha
    return found, torch.tensor([GRID[best]])


def _errors(x: Tensor, fmt: Packed, channels: Channels) -> Iterator[Tensor]:
    """What comes back of x, minus x, for every alpha of the grid; metadata not rounded."""
    assert fmt.transform is not None
    assert channels.group_of is not None
    for alpha in GRID:
        clipped = replace(fmt, meta="fp32", transform=replace(fmt.transform, clip=alpha))
        by = Mapped(clipped, channels.group_of, channels)
        yield by.dequantize(*by.quantize(x, None), torch.float32) - x
