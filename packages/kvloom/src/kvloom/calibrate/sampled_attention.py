"""The exact attention of sampled queries, and its error when keys or values are quantized.

Defines the error. Knows nothing of formats.
"""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from .recorder import AttentionInputs


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
        rows = torch.linspace(t // 2, t - 1, min(queries, t - t // 2)).long()
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
        at, row = torch.arange(n), sample.rows.repeat(shared)[:, None]
        sinks, recent = sample.exact
        self.masked = at > row  # [R * S, N]
        self.packed = ((at >= sinks) & (at <= row - recent)).float()
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
        each = [
            (self._weights_of(b, delta[b]) @ self.v[b]).sub_(self.out[b]).square_().sum()
            for b in range(len(delta))
        ]
        return torch.stack(each).sum()

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
