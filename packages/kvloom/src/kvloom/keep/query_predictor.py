"""The queries that tokens would have while the model repeats them, predicted from examples.

Decides the prediction alone. `hf.examples` runs the model on the examples.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..positions.rope import Rope
from .ridge import solve

_UNSURE = 8  # first examples: the model does not know yet that it repeats
_AT_ONCE = 512  # tokens whose queries are predicted together, so that they stay in the caches
_ON_GPU = 1 << 14  # the same on a GPU, of all rows, where launches take longer


class Examples(NamedTuple):
    """The first E tokens of each row of a text, which the model has read several times.

    Attributes:
        q: [B, Hq, E, D], their queries, rotated to the positions from `begin` on.
        k: [B, Hk, E, D], their keys.
        repeated: [B, Hq, E, D] for each repetition, the queries in it.
        distances: int64 [B, 1] for each repetition, from an example to its repetition.
        begin: int64 [B, 1], the position of the first.
        real: bool [B, E]; False after the tokens of a row that has fewer.
    """

    q: Tensor
    k: Tensor
    repeated: Sequence[Tensor]
    distances: Sequence[Tensor]
    begin: Tensor
    real: Tensor


class QueryPredictor(NamedTuple):
    """Predicts how queries change while the model repeats a text.

    Heads that copy then become sharp: a query also depends on the token that comes next. In each
    query head, ridge regression over examples predicts the change, before RoPE:

        q' = q + b + (x - m) W,  W = (X'X + d 1)^-1 X'Y

    x: a token's query q, and the key of the next token. The examples are the rows of X, less their
    mean m, and of Y, their changes less the mean b. A change is averaged over the repetitions. d is
    the mean of the diagonal of X'X.

    Attributes:
        own: [B, Hq, D, D], the rows of W for the query.
        following: [B, Hq, D, D], the rows of W for the next token's key.
        bias: [B, Hq, 1, D], b - m W.
        begin: int64 [B, 1], the position of each row's first token.
    """

    own: Tensor
    following: Tensor
    bias: Tensor
    begin: Tensor

    @classmethod
    def fit(cls, examples: Examples, rope: Rope | None) -> QueryPredictor:
        """Return what examples predict: no change for a row with too few tokens.

        rope: what the model rotates by; None: nothing.
        """
        q, k, repeated, distances, begin, real = examples
        if rope is not None:
            position = begin[:, None] + torch.arange(q.shape[2], device=q.device)
            q, k = rope.rotate(q, -position), rope.rotate(k, -position)
            pairs = zip(repeated, distances, strict=True)
            repeated = [rope.rotate(x, -(position + distance[:, None])) for x, distance in pairs]
        d, following = q.shape[-1], k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
        x = torch.cat([q[:, :, :-1], following[:, :, 1:]], dim=-1)[:, :, _UNSURE:].float()
        mean = torch.stack([x.float() for x in repeated]).mean(dim=0)
        y = (mean - q.float())[:, :, _UNSURE:-1]
        counted = real[:, None, _UNSURE + 1 :, None].to(x.dtype)
        count = counted.sum(dim=2, keepdim=True).clamp(min=1)
        m, b = ((counted * z).sum(dim=2, keepdim=True) / count for z in (x, y))
        x, y = counted * (x - m), counted * (y - b)
        system = x.mT @ x
        diagonal = system.diagonal(dim1=-2, dim2=-1)
        diagonal += diagonal.mean(dim=-1, keepdim=True).clamp(min=torch.finfo(x.dtype).tiny)
        w = solve(system, x.mT @ y).to(q.dtype)
        bias = (b - m @ w.float()).to(q.dtype)  # takes back what rounding w does to the mean
        return cls(w[..., :d, :], w[..., d:, :], bias, begin)

    def __call__(self, q: Tensor, k: Tensor, rope: Rope | None, index: Tensor) -> Tensor:
        """Return the queries [B, Hq, N, D] of a prompt as a repetition would have them.

        q: [B, Hq, N, D] and k: [B, Hk, N, D], as the model rotates them by `rope` (None: it does
        not). index: int64 [B or 1, 1, N], the place of each token in its row.
        """
        n, changed = k.shape[2], torch.empty_like(q)
        position = self.begin[:, None] + index
        at_once = max(_AT_ONCE, _ON_GPU // len(q)) if q.is_cuda else _AT_ONCE
        for lo in range(0, n, at_once):
            hi, end = min(n, lo + at_once), min(n, lo + at_once + 1)
            own, keys = q[:, :, lo:hi], k[:, :, lo:end]
            if rope is not None:
                cos, sin = rope.angles(position[..., lo:end])
                own = rope.apply(own, cos[..., : hi - lo, :], -sin[..., : hi - lo, :])
                keys = rope.apply(keys, cos, -sin)
            if end == n:
                keys = torch.cat([keys, keys[:, :, -1:]], dim=2)
            following = keys[:, :, 1 : 1 + hi - lo]
            change = following.unsqueeze(2) @ self.following.unflatten(1, (k.shape[1], -1))
            change = change.flatten(1, 2) + own @ self.own + self.bias
            if rope is not None:
                change = rope.apply(change, cos[..., : hi - lo, :], sin[..., : hi - lo, :])
            changed[:, :, lo:hi] = q[:, :, lo:hi] + change
        return changed
