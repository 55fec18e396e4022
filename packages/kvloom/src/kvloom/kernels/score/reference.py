"""Attention mass per key without the attention matrix, in plain torch.

mass[j] = sum over query rows i of softmax_j((s_ij + noise_ij) / tau), s the scaled, masked logits
(H2O, arXiv:2306.14048: noise 0, tau 1; Keyformer, arXiv:2403.09054, equation 9: Gumbel noise and
a temperature). Rows are normalised, exactly: MiniKV's kernel (arXiv:2411.18077) drops that.
Works through blocks of query rows, so memory grows with N, not with T times N.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..attend.reference import softcapped
from ..limits import DTYPES
from .noise import Noise

# Logits of one block of query rows hold about this many numbers (16 MiB in fp32) or one row.
_BLOCK_NUMEL = 1 << 22


class MassOptions(NamedTuple):
    """What changes logits and rows before they are summed.

    visible: bool [B, 1 or Hk, N], False hides a key. visible_queries: bool [B, 1, T], False leaves
    a query row out (padding). softcap and bias as in `attend_exact`. noise is added to the logits,
    and tau divides them. reduce_max: take the largest weight of any row, not the sum. later_seen:
    int64 [B, T], how many keys after its own a query sees, too. other_lse: fp32 [B, Hq, T], the
    log-sum-exp of the logits of keys that are not in k; if set, attention is not causal.
    """

    visible: Tensor | None = None
    visible_queries: Tensor | None = None
    softcap: float | None = None
    bias: Tensor | None = None
    noise: Noise | None = None
    tau: float = 1.0
    reduce_max: bool = False
    later_seen: Tensor | None = None
    other_lse: Tensor | None = None


def later_problem(*_: Any, later_seen: Tensor | None = None, **__: Any) -> str | None:
    """Return why no kernel sums the attention of queries to later tokens."""
    return None if later_seen is None else "queries see later tokens, as in an image"


def dtypes_problem(q: Tensor, k: Tensor, *_: Any, **__: Any) -> str | None:
    """Return why kernels do not read queries and keys of these dtypes; None if they do."""
    if q.dtype in DTYPES and q.dtype == k.dtype:
        return None
    return f"queries are {q.dtype} and keys {k.dtype}, not both fp32, fp16 or bf16"


def noise_problem(kinds: Iterable[str], noise: Noise | None) -> str | None:
    """Return why kernels with these kinds of noise do not add this one; None if they do."""
    if noise is None or noise.kind in kinds:
        return None
    return f"noise {noise.kind!r} is not one of {', '.join(kinds)}"


def column_mass(q: Tensor, k: Tensor, scale: float, **options: Any) -> Tensor:
    """Sum of attention over the rows of q [B, Hq, T, D] for each key of k [B, Hk, N, D].

    The T queries are the last T of the N tokens, causally, unless `other_lse` is set. options: of
    `MassOptions`. Returns fp32 [B, Hq, N].
    """
    b, hq, t, d = q.shape
    hk, n = k.shape[1], k.shape[2]
    r = hq // hk
    keys = k.float().transpose(-1, -2)
    mass = q.new_zeros(b, hk, r, n, dtype=torch.float32)
    step, given = max(1, _BLOCK_NUMEL // max(1, b * hq * n)), MassOptions(**options)
    rows = q.reshape(b, hk, r, t, d)
    for lo in range(0, t, step):
        hi = min(t, lo + step)
        # no row of this block sees further
        end = n - t + hi if given.later_seen is None and given.other_lse is None else n
        block = rows[:, :, :, lo:hi].float().reshape(b, hk, r * (hi - lo), d)
        logits = (block @ keys[..., :end]).mul_(scale).view(b, hk, r, hi - lo, end)
        part, block_mass = mass[..., :end], _combined(logits, lo, n, given)
        torch.maximum(part, block_mass, out=part) if given.reduce_max else part.add_(block_mass)
    return mass.view(b, hq, n)


def step_mass(products: Tensor, n: int, hk: int, **options: Any) -> Tensor:
    """Compute `column_mass` of a step whose attention has left its products behind.

    products: fp32 [B, Hq, T, N or more], scale * q @ k before softcap, bias and masks; what is
    after the first n keys may be anything. hk: key/value heads. options: as in `column_mass`.
    """
    b, hq = products.shape[:2]
    logits = products[..., :n].unflatten(1, (hk, hq // hk)).clone()
    mass = _combined(logits, 0, n, MassOptions(**options))
    return mass.reshape(b, hq, n)


def lowest(scores: Tensor, index: Tensor, before: int, visible: Tensor | None = None) -> Tensor:
    """Find the slot of the lowest score of tokens with an index below `before`: int64 [B, Hk, 1].

    scores: fp32 [B, Hk, N]. index: int32 [B, Hk, N]. visible: bool [B, Hk, N], False counts as
    lowest of all. The first of equals.
    """
    rank = scores if visible is None else scores.masked_fill(~visible, -torch.inf)
    return rank.masked_fill(index >= before, torch.inf).argmin(dim=-1, keepdim=True)


def _combined(logits: Tensor, lo: int, n: int, options: MassOptions) -> Tensor:
    """Return mass from logits [B, Hk, R, rows, end] of query rows from lo and the first keys of n.

    The last row's own key is the last, but for `later_seen`.
    """
    _, hk, r, rows, end = logits.shape
    visible, visible_queries, softcap, bias, noise, tau, reduce_max, later_seen, _ = options
    other_lse = options.other_lse
    logits = softcapped(logits, softcap)
    if bias is not None:
        logits += bias.view(-1, hk, r, 1, n)[..., :end]
    if noise is not None:
        logits = logits + noise.block(hk, r, lo, lo + rows, end)
    if tau != 1.0:
        logits = logits / tau
    pairs = torch.ones(rows, end, dtype=torch.bool, device=logits.device)
    if other_lse is not None:
        hidden = ~pairs
    elif later_seen is None:
        hidden = pairs.triu(end - rows + 1)
    else:
        first = n - later_seen.shape[1] + lo  # the own key of row lo
        after = torch.arange(end, device=logits.device) - torch.arange(
            first, first + rows, device=logits.device
        ).unsqueeze(1)
        hidden = (after > later_seen[:, lo : lo + rows, None])[:, None, None]
    logits = logits.masked_fill(hidden, -torch.inf)
    if visible is not None:
        logits = logits.masked_fill(~visible[:, :, None, None, :end], -torch.inf)
    if other_lse is not None:
        others = other_lse[:, :, lo : lo + rows, None].unflatten(1, (hk, r))
        weights = torch.cat([logits, others], dim=-1).softmax(dim=-1)[..., :-1]
    else:
        weights = logits.softmax(dim=-1)
    if visible is not None:
        weights = weights.nan_to_num(0.0)  # a row that sees nothing
    if visible_queries is not None:
        weights = weights * visible_queries[:, :, None, lo : lo + rows, None]
    return weights.amax(dim=3) if reduce_max else weights.sum(dim=3)
