"""Values fitted to the tokens that stay (after Attention Matching, arXiv:2602.16284).

Decides the values alone: which tokens stay, and how their keys are stored, is given.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import RecipeError
from ..kernels.attend.reference import softcapped
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
            place = torch.arange(len(rows), device=k.device) % max(1, end - begin)
            fold = place * 4 // max(1, end - begin) % 2 == 0
            change = _solve(x[:, changing], y - x @ values[stay], self.ridge, fold)
            if change is not None:
                values[stay[changing]] += change
        return values

    def _weights(self, step: Step, q: Tensor, k: Tensor, back: int) -> Tensor:
        """Return the attention weights fp32 [rows, N] of q to keys that are rotated back."""
        if step.rope is not None:
            by = torch.tensor(back, device=k.device)[None, None, None]
            k = step.rope.rotate(k[None, None], by)[0, 0]
        logits = q.float() @ k.float().T * step.scale
        return softcapped(logits, step.softcap).softmax(dim=-1)


@dataclass(frozen=True)
class _System:
    """The normal equations of rows x [rows, N] that should give missing [rows, D].

    gram: x'x. cross: x' missing. squares: of missing, summed up.
    """

    gram: Tensor
    cross: Tensor
    squares: Tensor

    @classmethod
    def of(cls, x: Tensor, missing: Tensor) -> _System:
        return cls(x.T @ x, x.T @ missing, missing.square().sum())

    def __add__(self, other: _System) -> _System:
        return _System(
            self.gram + other.gram, self.cross + other.cross, self.squares + other.squares
        )

    def solve(self, penalty: Tensor) -> Tensor | None:
        """Return the change of values [N, D] for a penalty; None if the system is singular."""
        gram = self.gram.clone()
        gram.diagonal().add_(penalty)
        factor, failed = torch.linalg.cholesky_ex(gram)
        return None if failed else torch.cholesky_solve(self.cross, factor)

    def error(self, change: Tensor | None) -> float:
        """Return the squared error of these rows after a change of values."""
        if change is None:
            return math.inf
        fitted = (change * (self.gram @ change - 2 * self.cross)).sum()
        return float(self.squares + fitted)


def _solve(x: Tensor, missing: Tensor, ridge: float | None, fold: Tensor) -> Tensor | None:
    """Return the change of values fp32 [N, D] by ridge regression; None if it does not help.

    x: the weights of the values, fp32 [rows, N]. missing: what they lack, fp32 [rows, D]. ridge:
    None if the rows decide, of which fold, bool [rows], are about half.
    """
    if not x.numel():
        return None
    halves = _System.of(x[fold], missing[fold]), _System.of(x[~fold], missing[~fold])
    system = halves[0] + halves[1]
    unit = system.gram.diagonal().mean()
    if ridge is None:
        ridge = _best_ridge(*halves, unit)
    change = None if ridge is None else system.solve(ridge * unit)
    if change is None or not (missing - x @ change).norm() < missing.norm():
        return None
    return change


def _best_ridge(one: _System, other: _System, unit: Tensor) -> float | None:
    """Return a ridge by two-fold cross-validation; None if unchanged values are the best."""
    errors = [
        one.error(other.solve(ridge * unit)) + other.error(one.solve(ridge * unit))
        for ridge in RIDGES
    ]
    before, best = float(one.squares + other.squares), min(errors)
    if not best < before:
        return None
    enough = best + _MARGIN * (before - best)
    return max(r for r, error in zip(RIDGES, errors, strict=True) if error <= enough)
