"""The queries that tokens would have while the model repeats them, predicted from examples.

Decides the prediction alone. `hf.examples` runs the model on the examples.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..positions.rope import Rope

_UNSURE = 8  # first examples: the model does not know yet that it repeats


class Examples(NamedTuple):
    """The first E tokens of each row of a text, which the model has read twice.

    Attributes:
        q: [B, Hq, E, D], their queries, rotated to the positions 0 to E.
        k: [B, Hk, E, D], their keys.
        repeated: [B, Hq, E, D], the queries of the second time, `distance` positions later.
        distance: int64 [B, 1].
        real: bool [B, E]; False after the tokens of a row that has fewer.
    """

    q: Tensor
    k: Tensor
    repeated: Tensor
    distance: Tensor
    real: Tensor


class QueryPredictor(NamedTuple):
    """Predicts how queries change while the model repeats a text.

    Heads that copy then become sharp: a query also depends on the token that comes next. In each
    query head, ridge regression over examples predicts the change, before RoPE:

        q' = q + b + (x - m) W,  W = (X'X + d 1)^-1 X'Y

    x: a token's query q, and the key of the next token. The examples are the rows of X, less their
    mean m, and of Y, their changes less the mean b. d is the mean of the diagonal of X'X.

    Attributes:
        own: [B, Hq, D, D], the rows of W for the query.
        following: [B, Hq, D, D], the rows of W for the next token's key.
        bias: [B, Hq, 1, D], b - m W.
    """

    own: Tensor
    following: Tensor
    bias: Tensor

    @classmethod
    def fit(cls, examples: Examples, rope: Rope | None) -> QueryPredictor:
        """Return what examples predict: no change for a row with too few tokens.

        rope: what the model rotates by; None: nothing.
        """
        q, k, repeated, distance, real = examples
        if rope is not None:
            index = torch.arange(q.shape[2], device=q.device).view(1, 1, -1)
            q, k = rope.rotate(q, -index), rope.rotate(k, -index)
            repeated = rope.rotate(repeated, -(index + distance[:, None]))
        d, following = q.shape[-1], k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
        x = torch.cat([q[:, :, :-1], following[:, :, 1:]], dim=-1)[:, :, _UNSURE:].float()
        y = (repeated.float() - q.float())[:, :, _UNSURE:-1]
        counted = real[:, None, _UNSURE + 1 :, None].to(x.dtype)
        count = counted.sum(dim=2, keepdim=True).clamp(min=1)
        m, b = ((counted * z).sum(dim=2, keepdim=True) / count for z in (x, y))
        x, y = counted * (x - m), counted * (y - b)
        system = x.mT @ x
        diagonal = system.diagonal(dim1=-2, dim2=-1)
        diagonal += diagonal.mean(dim=-1, keepdim=True).clamp(min=torch.finfo(x.dtype).tiny)
        w = torch.linalg.solve(system, x.mT @ y)
        return cls(*(z.to(q.dtype) for z in (w[..., :d, :], w[..., d:, :], b - m @ w)))

    def __call__(self, q: Tensor, k: Tensor, rope: Rope | None, index: Tensor) -> Tensor:
        """Return the queries [B, Hq, N, D] of a prompt as a repetition would have them.

        q: [B, Hq, N, D] and k: [B, Hk, N, D], both rotated by `rope` (None: not rotated) to the
        positions index, int64 [B or 1, 1, N].
        """
        own, keys = q, k
        if rope is not None:
            cos, sin = rope.angles(index)
            own, keys = (rope.apply(x, cos, -sin) for x in (q, k))
        keys = torch.cat([keys[:, :, 1:], keys[:, :, -1:]], dim=2)
        change = keys.unsqueeze(2) @ self.following.unflatten(1, (k.shape[1], -1))
        change = change.flatten(1, 2) + own @ self.own + self.bias
        return q + (change if rope is None else rope.apply(change, cos, sin))
