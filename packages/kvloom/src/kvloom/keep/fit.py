"""Values fitted to the tokens that stay (after Attention Matching, arXiv:2602.16284).

Decides the values alone: which tokens stay, and how their keys are stored, is given.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import RecipeError
from ..registry.fields import check_fields, check_whole
from .scorer import Step

RIDGES = 0.01, 0.1, 1.0, 10.0
"""Relative to the mean diagonal of a head's system."""
_MARGIN = 0.3  # of what the best ridge gains, that a larger one may lose


@dataclass(frozen=True)
class Fit:
    """Change the values of the tokens that stay, so that attention to them replaces all tokens.

    The prompt's queries, rotated behind the prompt as by `Rotated`, attend to all tokens of a chunk
    and the sinks: Y = softmax(A) V. Attention to the tokens that stay, with their keys as they are
    stored, has the weights X. Ridge regression finds the values closest to the kept ones:

        V' = V + (X'X + ridge d 1)^-1 X' (Y - X V),  d the mean of the diagonal of X'X

    Only the values with the largest sums of weights change, so many of a head. A head's ridge is
    the largest of `RIDGES` that is nearly the best in two-fold cross-validation: values are fitted
    to the first and third quarter of a chunk's rows, and judged by the others, and the other way
    round. A head keeps its values where the system cannot be solved, or the error does not shrink.
    In later chunks, the values of the sinks are no more changed.

    Attributes:
        chunk: Tokens of a chunk.
        every: Every so many-th query is a row of the regression.
        ridge: How much a large change of values costs. None: cross-validation decides.
        values: How many values of a head change in a chunk.
    """

    chunk: int = 2048
    every: int = 6
    ridge: float | None = None
    values: int = 256

    def __post_init__(self) -> None:
        check_fields(self, "chunk", "every", "ridge", "values")
        check_whole("chunk", self.chunk, 1)
        check_whole("every", self.every, 1)
        check_whole("values", self.values, 1)
        if self.ridge is not None and self.ridge < 0:
            raise RecipeError(f"ridge={self.ridge!r} must be 0 or more")

    def rows(self, q: Tensor, visible: Tensor | None) -> Tensor:
        """Return the queries of the regression [B, Hq, M, D], of a prompt's queries q.

        They are those of every so many-th token that is not padding. visible: bool [B, 1, N].
        """
        if visible is None:
            return q[:, :, :: self.every].clone()
        slots = (~visible[:, 0]).byte().argsort(dim=-1, stable=True)[:, :: self.every]
        return q.gather(2, slots[:, None, :, None].expand(-1, q.shape[1], -1, q.shape[3]))

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
        fitted, heads = step.v.clone(), step.k.shape[1]
        free = kept if free is None else free & kept
        for row in range(len(step.k)):
            real = slice(None) if step.visible is None else step.visible[row, 0]
            queries = step.q[row].unflatten(0, (heads, -1))
            first = without_query
            if step.visible is not None:
                first = int(step.visible[row, 0, :without_query].sum())
            for head in range(heads):
                values = self._of_head(
                    step, queries[head], step.k[row, head, real], step.v[row, head, real],
                    kept[row, head, real], free[row, head, real], keys[row, head, real], first,
                )  # fmt: skip
                fitted[row, head, real] = values.to(fitted.dtype)
        return fitted

    def _of_head(
        self,
        step: Step,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        kept: Tensor,
        free: Tensor,
        keys: Tensor,
        first: int,
    ) -> Tensor:
        """Return the values of one head, fp32 [N, D].

        q: [R, M, D], of its query heads; M are every so many-th token from `first` on.
        """
        values = v.float().clone()
        for lo in range(0, len(k), self.chunk):
            hi = min(len(k), lo + self.chunk)
            sinks = torch.arange(min(step.sinks, lo))
            seen = torch.cat([sinks, torch.arange(lo, hi)]).to(k.device)
            begin, end = (-(-max(0, i - first) // self.every) for i in (lo, hi))
            rows = q[:, begin:end].flatten(0, 1)
            back = lo - hi  # turning keys back turns queries further
            y = self._weights(step, rows, k[seen], back) @ v[seen].float()
            stay = seen[kept[seen]]
            x = self._weights(step, rows, keys[stay], back)
            changing = free[stay] & (stay >= lo)
            if len(changing) > self.values:
                sums = x.sum(dim=0).masked_fill(~changing, -1.0)
                changing[sums.argsort(descending=True)[self.values :]] = False
            weights, missing = x[:, changing], y - x @ values[stay]
            ridge = self.ridge
            if ridge is None:
                place = torch.arange(len(rows), device=k.device) % max(1, end - begin)
                ridge = _best_ridge(weights, missing, place * 4 // max(1, end - begin) % 2 == 0)
            change = None if ridge is None else _change(weights, missing, ridge)
            if change is not None and (missing - weights @ change).norm() < missing.norm():
                values[stay[changing]] += change
        return values

    def _weights(self, step: Step, q: Tensor, k: Tensor, back: int) -> Tensor:
        """Return the attention weights fp32 [rows, N] of q to keys that are rotated back."""
        if step.rope is not None:
            by = torch.tensor(back, device=k.device)[None, None, None]
            k = step.rope.rotate(k[None, None], by)[0, 0]
        logits = q.float() @ k.float().T * step.scale
        if step.softcap is not None:
            logits = step.softcap * torch.tanh(logits / step.softcap)
        return logits.softmax(dim=-1)


def _best_ridge(x: Tensor, missing: Tensor, fold: Tensor) -> float | None:
    """Return a ridge by cross-validation; None if unchanged values have the smallest error.

    x, missing: as for `_change`. fold: bool [rows], about half of the rows.
    """
    before, errors = missing.square().sum().item(), []
    for ridge in RIDGES:
        error = 0.0
        for half in (fold, ~fold):
            # the same penalty as of all rows
            change = _change(x[half], missing[half], ridge, x.square().sum().item())
            if change is None:
                error = math.inf
            else:
                error += (missing[~half] - x[~half] @ change).square().sum().item()
        errors.append(error)
    best = min(errors)
    if not best < before:
        return None
    enough = best + _MARGIN * (before - best)
    return max(r for r, error in zip(RIDGES, errors, strict=True) if error <= enough)


def _change(
    x: Tensor, missing: Tensor, ridge: float, squares: float | None = None
) -> Tensor | None:
    """Return the change of values fp32 [N, D] by ridge regression; None if it has no solution.

    x: the weights of the values, fp32 [rows, N]. missing: what they lack, fp32 [rows, D]. squares:
    the sum of squares to which the ridge is relative (None: of x).
    """
    rows, values = x.shape
    if not x.numel():
        return missing.new_zeros(values, missing.shape[1]) if values else None
    few = rows < values  # (X'X + r 1)^-1 X' = X' (XX' + r 1)^-1
    gram = x @ x.T if few else x.T @ x
    gram.diagonal().add_(ridge * (gram.trace() if squares is None else squares) / values)
    factor, failed = torch.linalg.cholesky_ex(gram)
    if failed:
        return None
    if few:
        return x.T @ torch.cholesky_solve(missing, factor)
    return torch.cholesky_solve(x.T @ missing, factor)
