"""Values fitted to the tokens that stay (after Attention Matching, arXiv:2602.16284).

Decides the values alone: which tokens stay, and how their keys are stored, is given.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..kernels.attend import reference
from ..kernels.select.reference import gather
from ..registry.fields import check_whole
from .chunks import chunks, longest, query_shift
from .ridge import solve
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
    head with the largest sums of weights change, and at most one for two rows; every 8th row is
    counted. A head keeps its values where the error does not shrink. Later chunks do not change the
    values of sinks.

    Attributes:
        chunk: The most tokens of a chunk; in a model, at most half of its positions. Chunks are
            equally long.
        queries: About how many queries of a chunk, at equal distances, are rows of the regression.
        values: How many values of a head change in a chunk.
    """

    chunk: int = 2048
    queries: int = 192
    values: int = 256

    def __post_init__(self) -> None:
        check_whole("chunk", self.chunk, 1)
        check_whole("queries", self.queries, 1)
        check_whole("values", self.values, 1)

    def sampled(self, q: Tensor, visible: Tensor | None) -> Tensor:
        """Return the queries of the regression [B, Hq, M, D], of a prompt's queries q.

        They are at equal distances among the tokens that are not padding. visible: bool [B, 1, N].
        A row with fewer queries than others ends with arbitrary ones.
        """
        if visible is None:
            return q[:, :, :: self._every(q.shape[2])].clone()
        tokens = visible[:, 0].sum(dim=-1).tolist()
        every = [self._every(n) for n in tokens]
        count = max(-(-n // step) for n, step in zip(tokens, every, strict=True))
        places = torch.arange(count) * torch.tensor(every)[:, None]
        order = (~visible[:, 0]).byte().argsort(dim=-1, stable=True)
        slots = order.gather(1, places.clamp(max=q.shape[2] - 1).to(q.device))
        return q.gather(2, slots[:, None, :, None].expand(-1, q.shape[1], -1, q.shape[3]))

    def rows(self, tokens: int) -> int:
        """Return how many queries of a prompt of `tokens` unpadded tokens are rows."""
        return -(-tokens // self._every(tokens))

    def _every(self, tokens: int) -> int:
        """Return the distance of the queries that are rows, among `tokens` tokens with a query."""
        return max(1, -(-longest(tokens, self.chunk) // self.queries))

    def __call__(
        self,
        step: Step,
        kept: Tensor,
        keys: Tensor,
        free: Tensor | None = None,
        without_query: int = 0,
    ) -> Tensor:
        """Return values [B, Hk, N, D]: fitted ones of the tokens that stay, the others unchanged.

        step: its queries are those of `sampled`. kept: bool [B, Hk, N], the tokens that stay. keys:
        [B, Hk, N, D], theirs as they are stored. free: bool [B, Hk, N], the tokens whose values may
        change (None: all that stay). without_query: the first tokens, which had no query.
        """
        fitted = step.v.clone()
        free = kept if free is None else free & kept
        for rows, real in step.rows_alike():
            before = int((real < without_query).sum()) if without_query else 0
            every = self._every(len(real) - before)
            for lo, hi in chunks(len(real), self.chunk):
                sinks = min(step.sinks, lo)
                slots = torch.cat([real[:sinks], real[lo:hi]])
                begin, end = (-(-max(0, i - before) // every) for i in (lo, hi))
                q = step.q[rows, :, begin:end]
                if not q.shape[2]:  # a chunk may be shorter than the distance of two rows
                    continue
                if step.rope is not None:
                    q = step.rope.rotate(q, query_shift(lo, hi, len(real), step.rope))
                k, v, stored, values, stay, may_change = (
                    x[rows][:, :, slots] for x in (step.k, step.v, keys, fitted, kept, free)
                )
                may_change[..., :sinks] = False
                y = step.attend(q, k, v).out
                fitted[rows][:, :, slots] = self._of_chunk(
                    step, q, y, stored, values, stay, may_change
                )
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
        """Return the values of a chunk of rows with equal padding, [B, Hk, N, D].

        q, y: [B, Hq, M, D], of the queries after the chunk. keys: as they are stored. values: as
        they are by now. kept: bool [B, Hk, N]. free: bool [B, Hk, N], the values that may change.
        """
        most_kept = int(kept.sum(dim=-1).max())
        most = min(self.values, most_kept, q.shape[1] // keys.shape[1] * q.shape[2] // 2)
        if not most:
            return values
        slots = (~kept).byte().argsort(dim=-1, stable=True)[..., :most_kept]
        kept_keys = gather(keys, slots)
        kept_only = step.attend(q, kept_keys, gather(values, slots), kept.gather(-1, slots))
        missing, rows, lse = (
            x.float().reshape(*keys.shape[:2], -1, x.shape[-1])
            for x in (y.float() - kept_only.out.float(), q, kept_only.lse[..., None])
        )
        counted = slice(None, None, _COUNTED)
        sums = _weights(step, rows[:, :, counted], kept_keys, lse[:, :, counted]).sum(dim=-2)
        may_change = free.gather(-1, slots)
        heavy = sums.masked_fill_(~may_change, -1.0).topk(most)[1]
        changing, changes = slots.gather(-1, heavy), may_change.gather(-1, heavy)
        x = _weights(step, rows, gather(keys, changing), lse) * changes[..., None, :]
        old = gather(values, changing)
        new = (old + _solve(x, missing, changes)).to(old.dtype)
        return values.scatter(2, changing[..., None].expand(new.shape), new)


def _weights(step: Step, q: Tensor, k: Tensor, lse: Tensor) -> Tensor:
    """Return the attention weights fp32 [B, Hk, rows, N] of q; lse: of all keys, [B, Hk, rows, 1].

    q: [B, Hk, rows, D]. k: some of the keys, [B, Hk, N, D].
    """
    logits = reference.softcapped((q * step.scale) @ k.float().mT, step.softcap)
    return (logits - lse).exp_()


def _solve(x: Tensor, missing: Tensor, changes: Tensor) -> Tensor:
    """Return the change of values fp32 [B, Hk, N, D] by ridge regression; 0 where it does not help.

    x: the weights of the values, fp32 [B, Hk, rows, N]. missing: what they lack, fp32
    [B, Hk, rows, D]. changes: bool [B, Hk, N]; the weights of the others are 0.
    """
    gram = x.mT @ x
    diagonal = gram.diagonal(dim1=-2, dim2=-1)
    median = diagonal.masked_fill(~changes, torch.nan).nanmedian(dim=-1, keepdim=True)[0]
    largest = diagonal.amax(dim=-1, keepdim=True)
    ridge = torch.maximum(RIDGE * median, _FLOOR * largest)
    diagonal += ridge.nan_to_num(1.0)  # NaN: no value of the head changes
    change = solve(gram, x.mT @ missing)
    error, before = (y.square().sum(dim=(-2, -1)) for y in (missing - x @ change, missing))
    return torch.where((error < before)[..., None, None], change, 0.0)
