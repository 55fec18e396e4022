"""Search how far to clip each group of channels (SKVQ, arXiv:2405.06219, section 3.1, equation 3).

The search minimizes the squared error of attention's output on sampled queries, over a grid of
factors. Keys and values are searched separately and as a cache uses them: queries attend to the
first and the newest tokens unquantized. This matters for keys, because clipping makes keys shorter
and so lowers their weight relative to exact keys.

The layer's factor is the same for all its groups. For values, the error of a group depends on its
own factor only. For keys, every group starts at the layer's factor; then each group in turn changes
to its best factor while the others stay fixed. So no step increases the error.

Every search is coarse to fine: every third factor of the grid, then both neighbours of the best.

Departures: the output is taken before the projection W_o, where the groups of values do not
interact; the official code uses one constant instead of a search.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from ..encoding import LayerEncoding
from ..hf.recording import AttentionInputs
from ..kernels.quantize import reference as ref
from ..positions.rope import Rope

GRID = (0.005, 0.01, *(round(0.02 * i, 2) for i in range(1, 51)))
_COARSE = 3

Errors = Callable[[Tensor], Tensor]
"""Returns the squared errors, fp32 [n], of factors given by their indices in `GRID`, int64 [n]."""


class AttentionSample(NamedTuple):
    """Sampled queries q [B, Hq, S, D] of a layer, and the tokens k, v [B, Hk, N, D] they attend to.

    rows: int64 [S], the position of each query among the N tokens. Keys are after RoPE. exact: the
    number of first tokens and of newest tokens that a query attends to unquantized. bias: fp32
    [B or 1, Hq, N].
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
    def of(
        cls, inputs: AttentionInputs, queries: int, exact: tuple[int, int] = (0, 0)
    ) -> AttentionSample:
        """Sample about `queries` query rows, evenly spaced in the second half."""
        t = inputs.q.shape[2]
        rows = torch.linspace(t // 2, t - 1, min(queries, t - t // 2), dtype=torch.float32).long()
        q = inputs.q[:, :, rows.to(inputs.q.device)]
        bias = None if inputs.bias is None else inputs.bias.cpu()
        kv = inputs.k.cpu(), inputs.v.cpu()
        return cls(q.cpu(), *kv, rows, inputs.scale, inputs.softcap, exact, bias)


class ExactAttention:
    """The exact attention of a sample, and its errors when keys or values change.

    The R query heads that share a key/value head are rows of one matrix: q fp32 [B, Hk, R * S, D],
    scaled; logits and weights fp32 [B, Hk, R * S, N]. A difference (`delta`) is the quantized
    tensor minus the exact one.
    """

    def __init__(self, sample: AttentionSample) -> None:
        b, hq, s, d = sample.q.shape
        self.k, self.v = sample.k.float(), sample.v.float()
        hk, n = self.k.shape[1:3]
        shared = hq // hk
        self.q = (sample.q.float() * sample.scale).reshape(b, hk, shared * s, d)
        self.softcap = sample.softcap
        token, row = torch.arange(n), sample.rows.repeat(shared)[:, None]
        sinks, recent = sample.exact
        self.masked = token > row  # [R * S, N]
        self.packed = ((token >= sinks) & (token <= row - recent)).float()
        logits = self.q @ self.k.transpose(-1, -2)
        if sample.bias is not None:
            logits += sample.bias.view(-1, hk, shared, 1, n).expand(-1, -1, -1, s, -1).flatten(2, 3)
        self.logits = logits.masked_fill_(self.masked, -torch.inf)
        # Every evaluation reuses these buffers: allocating costs more than the arithmetic.
        self._workspace = torch.empty_like(logits[0]), torch.empty_like(logits[0])

    @cached_property
    def weights(self) -> Tensor:
        """Exact attention weights."""
        return self.weights_with_keys(torch.zeros_like(self.k))

    @cached_property
    def out(self) -> Tensor:
        """Exact output, fp32 [B, Hk, R * S, D]."""
        return self.weights @ self.v

    @cached_property
    def packed_weights(self) -> Tensor:
        """Exact attention weights of the quantized tokens, 0 for the others."""
        return self.weights * self.packed

    def weights_with_keys(self, delta: Tensor) -> Tensor:
        """Return the attention weights when the quantized keys change by `delta` [B, Hk, N, D]."""
        return torch.stack([self._weights_of(b, delta[b]).clone() for b in range(len(delta))])

    def error_of_keys(self, delta: Tensor) -> Tensor:
        """Return the squared error of the output, a scalar, when keys change by `delta`."""
        errors = [
            (self._weights_of(b, delta[b]) @ self.v[b]).sub_(self.out[b]).square_().sum()
            for b in range(len(delta))
        ]
        return torch.stack(errors).sum()

    def error_of_values(self, delta: Tensor) -> Tensor:
        """Return the squared error of each output channel [Hk, D] when values change by `delta`."""
        return (self.packed_weights @ delta).square_().sum(dim=(0, 2))

    def _weights_of(self, b: int, delta: Tensor) -> Tensor:
        """Return the weights [Hk, R * S, N] of context b; the next call overwrites them."""
        first, second = self._workspace
        change = torch.matmul(self.q[b], delta.transpose(-1, -2), out=first)
        logits = torch.addcmul(self.logits[b], change, self.packed, out=second)
        if self.softcap is not None:
            logits.div_(self.softcap).tanh_().mul_(self.softcap)
            logits.masked_fill_(self.masked, -torch.inf)
        return torch.softmax(logits, dim=-1, out=first)


class QuantizedGroups:
    """Tokens x [B, Hk, N, D] in groups of channels, and how quantization changes each group.

    Rows are channels and columns are tokens, so that a group is a contiguous block. Metadata are
    fp32. A difference (`delta`) is the quantized tensor minus the exact one.
    """

    def __init__(self, x: Tensor, encoding: LayerEncoding) -> None:
        assert encoding.group_of is not None
        b, h, n, d = x.shape
        self.bits, self._shape = encoding.encoding.bits, (h, d, b, n)
        if encoding.divisor is not None:
            x = x / encoding.divisor[:, None, :]
        rows = x.permute(1, 3, 0, 2).reshape(h * d, b * n)
        self.of = encoding.group_of.reshape(-1)
        self.members = [(self.of == g).nonzero().flatten() for g in range(int(self.of.max()) + 1)]
        self._rows = [rows[members] for members in self.members]
        self._ends = [group.aminmax(dim=0) for group in self._rows]
        unit = rows.new_ones(h, d) if encoding.divisor is None else encoding.divisor
        self._unit = [unit.reshape(-1, 1)[members] for members in self.members]

    def __len__(self) -> int:
        return len(self.members)

    def delta(self, group: int, alpha: float) -> Tensor:
        """Return the difference of a group at clip factor alpha, fp32 [its channels, B * N]."""
        x, (low, high) = self._rows[group], self._ends[group]
        scale, zero = ref.metadata(low * alpha, high * alpha, self.bits, torch.float32)
        back = torch.addcmul(zero, ref.encode(x, scale, zero, self.bits).float(), scale)
        return back.sub_(x).mul_(self._unit[group])

    def all_deltas(self, factors: Tensor) -> Tensor:
        """Return the difference of all groups, fp32 [Hk * D, B * N].

        factors: int64 [groups], the index of each group's factor in `GRID`.
        """
        h, d, b, n = self._shape
        delta = torch.empty(h * d, b * n, dtype=torch.float32)
        for group, i in enumerate(factors.tolist()):
            delta[self.members[group]] = self.delta(group, GRID[i])
        return delta

    def tokens(self, delta: Tensor) -> Tensor:
        """Return rows [Hk * D, B * N] as tokens [B, Hk, N, D]."""
        return delta.view(self._shape).permute(2, 0, 3, 1)


def search_clip(
    exact: ExactAttention, side: str, encoding: LayerEncoding, rope: Rope | None
) -> tuple[Tensor, Tensor]:
    """Return the clip factors of an encoding: fp32 [groups], and fp32 [1] for the whole layer.

    side: "keys" or "values". encoding: of the layer, without clip factors. rope: for keys that are
    quantized before RoPE, else None.
    """
    grid = torch.tensor(GRID, dtype=torch.float32)
    if side == "values":
        by_group, by_layer = _search_values(exact, QuantizedGroups(exact.v, encoding))
    else:
        positions = torch.arange(exact.k.shape[2]).view(1, 1, -1)
        raw = exact.k if rope is None else rope.rotate(exact.k, -positions)
        by_group, by_layer = _search_keys(exact, QuantizedGroups(raw, encoding), rope, positions)
    return grid[by_group], grid[by_layer]


def _search_values(exact: ExactAttention, groups: QuantizedGroups) -> tuple[Tensor, Tensor]:
    """Return indices of the best factors in the grid: [groups], and [1] for the layer."""

    @cache
    def errors(indices: tuple[int, ...]) -> Tensor:
        delta = groups.tokens(groups.all_deltas(torch.tensor(indices)))
        by_channel = exact.error_of_values(delta).reshape(-1)
        return torch.zeros(len(groups), dtype=torch.float32).index_add_(0, groups.of, by_channel)

    count = len(groups)
    by_layer, _ = _minimize(lambda factor: errors((int(factor),) * count).sum().view(1), 1)
    start = by_layer.repeat(count), errors((int(by_layer),) * count)
    by_group, _ = _minimize(lambda factors: errors(tuple(factors.tolist())), count, start)
    return by_group, by_layer


def _search_keys(
    exact: ExactAttention, groups: QuantizedGroups, rope: Rope | None, positions: Tensor
) -> tuple[Tensor, Tensor]:
    """Return indices of the best factors in the grid: [groups], and [1] for the layer."""

    def error(delta: Tensor) -> Tensor:
        change = groups.tokens(delta)
        change = change if rope is None else rope.rotate(change, positions)
        return exact.error_of_keys(change).view(1)

    count = len(groups)
    by_layer, least = _minimize(lambda factor: error(groups.all_deltas(factor.expand(count))), 1)
    by_group = by_layer.repeat(count)
    if count == 1:
        return by_group, by_layer
    delta = groups.all_deltas(by_group)
    for group, members in enumerate(groups.members):

        def error_with(factor: Tensor, group: int = group, members: Tensor = members) -> Tensor:
            delta[members] = groups.delta(group, GRID[int(factor)])
            return error(delta)

        by_group[group], least = _minimize(error_with, 1, (by_group[group].view(1), least))
        delta[members] = groups.delta(group, GRID[int(by_group[group])])
    return by_group, by_layer


def _minimize(
    errors: Errors, count: int, start: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """Return the indices in the grid with the least errors found, and these errors, [count] each.

    start: indices and errors to improve on.
    """
    best, least = start or (
        torch.zeros(count, dtype=torch.long),
        torch.full((count,), torch.inf, dtype=torch.float32),
    )
    for i in range(0, len(GRID), _COARSE):
        best, least = _better(errors, torch.full_like(best, i), best, least)
    center = best
    for side in (-1, 1):
        neighbour = (center + side).clamp(0, len(GRID) - 1)
        best, least = _better(errors, neighbour, best, least)
    return best, least


def _better(errors: Errors, tried: Tensor, best: Tensor, least: Tensor) -> tuple[Tensor, Tensor]:
    error = errors(tried)
    better = error < least
    return torch.where(better, tried, best), torch.where(better, error, least)
