"""Values fitted to the tokens that stay (after Attention Matching, arXiv:2602.16284).

Decides the values alone: which tokens stay, and how their keys are stored, is given.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..kernels import ops
from ..kernels.attend import reference
from ..registry.fields import check_whole
from .scorer import Step

RIDGE = 30.0
"""Relative to the median of the diagonal of a head's system."""
_FLOOR = 1e-6  # of a ridge, relative to the largest number of the diagonal, for its rounding
_COUNTED = 8  # stride of the rows that choose which values change


@dataclass(frozen=True)
class Fit:
    """Change the values of the tokens that stay, so that attention to them replaces all tokens.

    The prompt's queries, rotated to positions after the prompt as by `Rotated`, attend to all
    tokens of a chunk and the sinks: Y = softmax(A) V. Attention to the tokens that stay, with their
    keys as they are stored, has the weights X. Ridge regression finds the values closest to the
    kept ones:

        V' = V + (X'X + 30 d 1)^-1 X' (Y - X V),  d the median of the diagonal of X'X

    The median is robust against the large diagonal entries of sinks. Only the `values` values of a
    head with the largest sums of weights change; every 8th row is counted. A head keeps its values
    where the error does not shrink. Later chunks do not change the values of sinks.

    Attributes:
        chunk: Tokens of a chunk.
        queries: The most queries of a chunk, at equal distances, that are rows of the regression.
        values: How many values of a head change in a chunk.
    """

    chunk: int = 2048
    queries: int = 192
    values: int = 256

    def __post_init__(self) -> None:
        check_whole("chunk", self.chunk, 1)
        check_whole("queries", self.queries, 1)
        check_whole("values", self.values, 1)

    @classmethod
    def upgraded(cls, table: dict[str, Any]) -> dict[str, Any]:
        """Return the fields of a table without the former `ridge` and `every`, of other units."""
        return {name: x for name, x in table.items() if name not in ("ridge", "every")}

    def rows(self, q: Tensor, visible: Tensor | None) -> Tensor:
        """Return the queries of the regression [B, Hq, M, D], of a prompt's queries q.

        They are at equal distances among the tokens that are not padding. visible: bool [B, 1, N].
        A row with fewer queries than others ends with arbitrary ones.
        """
        if visible is None:
            return q[:, :, :: self._every(q.shape[2])].clone()
        tokens = visible[:, 0].sum(dim=-1).tolist()
        every = [self._every(n) for n in tokens]
        longest = max(-(-n // step) for n, step in zip(tokens, every, strict=True))
        places = torch.arange(longest) * torch.tensor(every)[:, None]
        order = (~visible[:, 0]).byte().argsort(dim=-1, stable=True)
        slots = order.gather(1, places.clamp(max=q.shape[2] - 1).to(q.device))
        return q.gather(2, slots[:, None, :, None].expand(-1, q.shape[1], -1, q.shape[3]))

    def _every(self, tokens: int) -> int:
        """Return the distance of the queries that are rows, among `tokens` tokens with a query."""
        return max(1, -(-min(tokens, self.chunk) // self.queries))

    def __call__(
        self,
        step: Step,
        kept: Tensor,
        keys: Tensor,
        free: Tensor | None = None,
        without_query: int = 0,
    ) -> Tensor:
        """Return values [B, Hk, N, D]: fitted ones of the tokens that stay, the others unchanged.

        step: its queries are those of `rows`. kept: bool [B, Hk, N], the tokens that stay. keys:
        [B, Hk, N, D], theirs as they are stored. free: bool [B, Hk, N], the tokens whose values may
        change (None: all that stay). without_query: the first tokens, which had no query.
        """
        fitted = step.v.clone()
        free = kept if free is None else free & kept
        for row in range(len(step.k)):
            real = torch.arange(step.k.shape[2], device=step.k.device)
            if step.visible is not None:
                real = real[step.visible[row, 0]]
            before = int((real < without_query).sum())
            every = self._every(len(real) - before)
            for lo in range(0, len(real), self.chunk):
                hi, sinks = min(len(real), lo + self.chunk), min(step.sinks, lo)
                slots = torch.cat([real[:sinks], real[lo:hi]])
                begin, end = (-(-max(0, i - before) // every) for i in (lo, hi))
                if begin == end:  # a last chunk may be shorter than the distance of two rows
                    continue
                q = step.q[row, :, begin:end]
                if step.rope is not None:
                    q = step.rope.rotate(q[None], torch.tensor(hi - lo).view(1, 1, 1))[0]
                y = _attend(step, q, step.k[row, :, slots], step.v[row, :, slots]).out
                may_change = free[row, :, slots]
                may_change[:, :sinks] = False
                fitted[row, :, slots] = self._of_chunk(
                    step, q, y, keys[row, :, slots], fitted[row, :, slots], kept[row, :, slots],
                    may_change,
                )  # fmt: skip
        return fitted

    def _of_chunk(
        self,
        step: Step,
        q: Tensor,
        y: Tensor,
        keys: Tensor,
        values: Tensor,
        kept: Tensor,
        free: Tensor,
    ) -> Tensor:
        """Return the values of a chunk of one row, [Hk, N, D].

        q, y: [Hq, M, D], of the queries after the chunk. keys: as they are stored. values: as they
        are by now. kept: bool [Hk, N]. free: bool [Hk, N], the values that may change.
        """
        heads = len(keys)
        slots = (~kept).byte().argsort(dim=-1, stable=True)[:, : int(kept.sum(dim=-1).max())]
        of_slots = slots[..., None].expand(-1, -1, keys.shape[2])
        kept_only = _attend(
            step, q, keys.gather(1, of_slots), values.gather(1, of_slots), kept.gather(1, slots)
        )
        missing, rows, lse = (
            x.float().reshape(heads, -1, x.shape[-1])
            for x in (y.float() - kept_only.out.float(), q, kept_only.lse[..., None])
        )
        for head in range(heads):
            changing = free[head].nonzero()[:, 0]
            if len(changing) > self.values:
                part = slice(None, None, _COUNTED)
                sums = _weights(step, rows[head, part], keys[head, changing], lse[head, part]).sum(
                    0
                )
                changing = changing[sums.topk(self.values).indices]
            x = _weights(step, rows[head], keys[head, changing], lse[head])
            change = _solve(x, missing[head])
            if change is not None:
                values[head, changing] = (values[head, changing] + change).to(values.dtype)
        return values


def _attend(
    step: Step, q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None = None
) -> reference.AttentionState:
    """Attend q [Hq, M, D] to all of k, v [Hk, N, D]; visible: bool [Hk, N].

    Returns out [Hq, M, D], in q's dtype or fp32, and lse [Hq, M].
    """
    inputs = q[None], k[None], v[None], step.scale
    shown = None if visible is None else visible[None]
    if step.softcap is None:
        state = ops.attend_prompt(*inputs, causal=False, visible=shown)
    else:
        state = reference.attend_exact(*inputs, visible=shown, softcap=step.softcap)
    return reference.AttentionState(state.out[0], state.lse[0])


def _weights(step: Step, q: Tensor, k: Tensor, lse: Tensor) -> Tensor:
    """Return the attention weights fp32 [rows, N] of q to some keys; lse: of all, [rows, 1]."""
    logits = reference.softcapped((q * step.scale) @ k.float().T, step.softcap)
    return (logits - lse).exp_()


def _solve(x: Tensor, missing: Tensor) -> Tensor | None:
    """Return the change of values fp32 [N, D] by ridge regression; None if it does not help.

    x: the weights of the values, fp32 [rows, N]. missing: what they lack, fp32 [rows, D].
    """
    if not x.numel():
        return None
    gram = x.T @ x
    diagonal = gram.diagonal()
    diagonal += torch.maximum(RIDGE * diagonal.median(), _FLOOR * diagonal.max())
    change = torch.cholesky_solve(x.T @ missing, torch.linalg.cholesky_ex(gram).L)
    return change if (missing - x @ change).norm() < missing.norm() else None
