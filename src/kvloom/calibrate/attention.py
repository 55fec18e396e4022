"""The exact attention of sampled queries, and the error that packed keys or values cause in it.

Decides what an error is; nothing about formats.
"""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from .record import Seen


class Sample(NamedTuple):
    """Some queries q [B, Hq, S, D] of a layer, and the tokens k, v [B, Hk, N, D] they attend to.

    rows: int64 [S], the position of each query among the N tokens; keys are after RoPE. exact: how
    many first and newest tokens a query sees unpacked. bias: fp32 [B or 1, Hq, N].
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
    """The exact attention of a sample, and its errors when keys or values are off.

    The R query heads that share a key/value head are rows beside each other: q fp32 [B, Hk, R * S,
    D], scaled; logits and weights fp32 [B, Hk, R * S, N].
    """

    def __init__(self, sample: Sample) -> None:
        b, hq, s, d = sample.q.shape
        self.k, self.v = sample.k.float(), sample.v.float()
        hk, n = self.k.shape[1:3]
        shared = hq // hk
        self.q = (sample.q.float() * sample.scale).reshape(b, hk, shared * s, d)
        self.softcap = sample.softcap
        at, row = torch.arange(n), sample.rows.repeat(shared)[:, None]
        sinks, recent = sample.exact
        self.hidden = at > row  # [R * S, N]
        self.packed = ((at >= sinks) & (at <= row - recent)).float()
        logits = self.q @ self.k.transpose(-1, -2)
        if sample.bias is not None:
            logits += sample.bias.view(-1, hk, shared, 1, n).expand(-1, -1, -1, s, -1).flatten(2, 3)
        self.logits = logits.masked_fill_(self.hidden, -torch.inf)
        # memory that every evaluation uses again: fresh memory costs more than the arithmetic
        self._room = torch.empty_like(logits[0]), torch.empty_like(logits[0])

    @cached_property
    def weights(self) -> Tensor:
        """Exact attention weights."""
        return self.shifted_by_keys(torch.zeros_like(self.k))

    @cached_property
    def out(self) -> Tensor:
        """Exact output, fp32 [B, Hk, R * S, D]."""
        return self.weights @ self.v

    @cached_property
    def packed_weights(self) -> Tensor:
        """Exact attention weights of packed tokens, 0 for the others."""
        return self.weights * self.packed

    def shifted_by_keys(self, off: Tensor) -> Tensor:
        """Attention weights when the packed keys are off by `off` [B, Hk, N, D]."""
        return torch.stack([self._shifted(b, off[b]).clone() for b in range(len(off))])

    def missed_by_keys(self, off: Tensor) -> Tensor:
        """Squared error of the output, a scalar, when the packed keys are off by `off`."""
        each = [
            (self._shifted(b, off[b]) @ self.v[b]).sub_(self.out[b]).square_().sum()
            for b in range(len(off))
        ]
        return torch.stack(each).sum()

    def missed_by_values(self, off: Tensor) -> Tensor:
        """Squared error of each output channel [Hk, D] when the packed values are off by `off`."""
        return (self.packed_weights @ off).square_().sum(dim=(0, 2))

    def _shifted(self, b: int, off: Tensor) -> Tensor:
        """Weights [Hk, R * S, N] of context b; the next call overwrites them."""
        first, second = self._room
        change = torch.matmul(self.q[b], off.transpose(-1, -2), out=first)
        logits = torch.addcmul(self.logits[b], change, self.packed, out=second)
        if self.softcap is not None:
            logits.div_(self.softcap).tanh_().mul_(self.softcap)
            logits.masked_fill_(self.hidden, -torch.inf)
        return torch.softmax(logits, dim=-1, out=first)
