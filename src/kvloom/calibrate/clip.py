"""How far to clip each group of channels (SKVQ, arXiv:2405.06219, section 3.1, equation 3).

Factors come from a grid and make the squared error of attention's output on sampled queries small.
Keys and values are searched apart, and as they will be used: a query sees the first and the newest
tokens unpacked. That matters for keys: clipped keys are shorter, and lose against exact ones.

The factor of a layer is the same for all its groups. Values: a group's error depends on its own
factor alone. Keys: every group starts at the layer's factor, and one group after the other moves to
its best, with the others where they are by then; so no step makes the error larger.

Every search goes from coarse to fine: every third factor of the grid, then both neighbours of the
best one.

Departures: the output is taken before the projection W_o, where values' groups do not interact; the
official code has no search, but one constant.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from ..kernels.quantize import reference as ref
from ..positions.rope import Rope
from ..store import Packed
from ..store.codec import Channels
from .attention import Attention

GRID = (0.005, 0.01, *(round(0.02 * i, 2) for i in range(1, 51)))
_COARSE = 3

Missed = Callable[[Tensor], Tensor]
"""Squared errors fp32 [n] of n factors, given by their places int64 [n] on the grid."""


class Groups:
    """Tokens x [B, Hk, N, D] cut into groups of channels, and what packing changes in each.

    Rows are channels and columns tokens, so that a group is a contiguous block. Metadata stay fp32.
    """

    def __init__(self, x: Tensor, fmt: Packed, channels: Channels) -> None:
        assert channels.group_of is not None
        b, h, n, d = x.shape
        self.bits, self._shape = fmt.bits, (h, d, b, n)
        if channels.divisor is not None:
            x = x / channels.divisor[:, None, :]
        rows = x.permute(1, 3, 0, 2).reshape(h * d, b * n)
        self.of = channels.group_of.reshape(-1)
        self.members = [(self.of == g).nonzero().flatten() for g in range(int(self.of.max()) + 1)]
        self._rows = [rows[some] for some in self.members]
        self._ends = [some.aminmax(dim=0) for some in self._rows]
        unit = rows.new_ones(h, d) if channels.divisor is None else channels.divisor
        self._unit = [unit.reshape(-1, 1)[some] for some in self.members]

    def __len__(self) -> int:
        return len(self.members)

    def off(self, group: int, alpha: float) -> Tensor:
        """What comes back of a group, minus what went in: fp32 [channels of the group, B * N]."""
        x, (low, high) = self._rows[group], self._ends[group]
        scale, zero = ref.metadata(low * alpha, high * alpha, self.bits, torch.float32)
        back = torch.addcmul(zero, ref.encode(x, scale, zero, self.bits).float(), scale)
        return back.sub_(x).mul_(self._unit[group])

    def all_off(self, at: Tensor) -> Tensor:
        """The same of all groups, fp32 [Hk * D, B * N]; at: each group's place on the grid."""
        h, d, b, n = self._shape
        off = torch.empty(h * d, b * n)
        for group, place in enumerate(at.tolist()):
            off[self.members[group]] = self.off(group, GRID[place])
        return off

    def tokens(self, off: Tensor) -> Tensor:
        """Rows [Hk * D, B * N] as tokens [B, Hk, N, D]."""
        return off.view(self._shape).permute(2, 0, 3, 1)


def search(
    exact: Attention, side: str, fmt: Packed, channels: Channels, rope: Rope | None
) -> tuple[Tensor, Tensor]:
    """Clip factors of a format for "keys" or "values": fp32 [groups], and [1] for the layer.

    channels: the layer's, without clip factors. rope: for keys that are packed before RoPE.
    """
    grid = torch.tensor(GRID)
    if side == "values":
        alone, together = _values(exact, Groups(exact.v, fmt, channels))
    else:
        at = torch.arange(exact.k.shape[2]).view(1, 1, -1)
        raw = exact.k if rope is None else rope.rotate(exact.k, -at)
        alone, together = _keys(exact, Groups(raw, fmt, channels), rope, at)
    return grid[alone], grid[together]


def _values(exact: Attention, groups: Groups) -> tuple[Tensor, Tensor]:
    @cache
    def missed(places: tuple[int, ...]) -> Tensor:
        off = groups.tokens(groups.all_off(torch.tensor(places)))
        each = exact.missed_by_values(off).reshape(-1)
        return torch.zeros(len(groups)).index_add_(0, groups.of, each)

    count = len(groups)
    together, _ = _least(lambda at: missed((int(at),) * count).sum().view(1), 1)
    start = together.repeat(count), missed((int(together),) * count)
    alone, _ = _least(lambda at: missed(tuple(at.tolist())), count, start)
    return alone, together


def _keys(exact: Attention, groups: Groups, rope: Rope | None, at: Tensor) -> tuple[Tensor, Tensor]:
    def missed(off: Tensor) -> Tensor:
        tokens = groups.tokens(off)
        return exact.missed_by_keys(tokens if rope is None else rope.rotate(tokens, at)).view(1)

    count = len(groups)
    together, least = _least(lambda place: missed(groups.all_off(place.expand(count))), 1)
    alone = together.repeat(count)
    if count == 1:
        return alone, together
    off = groups.all_off(alone)
    for group, members in enumerate(groups.members):

        def moved(place: Tensor, group: int = group, members: Tensor = members) -> Tensor:
            off[members] = groups.off(group, GRID[int(place)])
            return missed(off)

        alone[group], least = _least(moved, 1, (alone[group].view(1), least))
        off[members] = groups.off(group, GRID[int(alone[group])])
    return alone, together


def _least(
    missed: Missed, count: int, start: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """Places on the grid with the least errors found, and these errors, [count] each.

    start: the places and errors to improve on.
    """
    at, least = start or (torch.zeros(count).long(), torch.full((count,), torch.inf))
    for place in range(0, len(GRID), _COARSE):
        at, least = _better(missed, torch.full_like(at, place), at, least)
    center = at
    for side in (-1, 1):
        there = (center + side).clamp(0, len(GRID) - 1)
        at, least = _better(missed, there, at, least)
    return at, least


def _better(missed: Missed, there: Tensor, at: Tensor, least: Tensor) -> tuple[Tensor, Tensor]:
    error = missed(there)
    better = error < least
    return torch.where(better, there, at), torch.where(better, error, least)
