"""Attention over one set of tokens as a mergeable state, in plain torch.

Attention over a set of tokens splits exactly: attend to each part, keep (out, lse), merge. For
part p with logits s_j: lse_p = log sum_j exp(s_j), out_p = sum_j exp(s_j - lse_p) v_j; then
lse = log sum_p exp(lse_p), out = sum_p exp(lse_p - lse) out_p. The empty part is the identity
(lse = -inf, out = 0). Everything here is computed in fp32; keys and values are never repeated for
grouped-query attention.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..select.reference import gather
from .kv_view import KVView

# Logits of one block of query rows hold at most this many numbers (64 MiB in fp32).
_BLOCK_NUMEL = 1 << 24


First = tuple[Tensor, Tensor]
"""Exact keys and values [B, Hk, S, D] that are read before chosen ones."""


class State(NamedTuple):
    """Attention over one part: out fp32 [B, Hq, T, D] and lse fp32 [B, Hq, T].

    products: scale * q @ k, where a kernel returns it (see `attend_views`).
    """

    out: Tensor
    lse: Tensor
    products: Tensor | None = None


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    *,
    causal: bool = False,
    visible: Tensor | None = None,
    softcap: float | None = None,
    bias: Tensor | None = None,
) -> State:
    """Attend q [B, Hq, T, D] to k, v [B, Hk, N, D].

    causal: the T queries are the last T of the N tokens, and see no later one. visible: bool
    [B, 1 or Hk, N], False hides a token. softcap c: logits become c * tanh(logits / c). bias: fp32
    [B or 1, Hq, N], added to the logits after that, the same for all T queries (ALiBi).
    """
    b, hq, t, d = q.shape
    hk, n = k.shape[1], k.shape[2]
    r = hq // hk
    out = q.new_empty(b, hk, r, t, v.shape[-1], dtype=torch.float32)
    lse = q.new_empty(b, hk, r, t, dtype=torch.float32)
    keys, values = k.float().transpose(-1, -2), v.float()
    rows = q.reshape(b, hk, r, t, d)
    step = max(1, _BLOCK_NUMEL // max(1, b * hq * n))
    for lo in range(0, t, step):
        hi = min(t, lo + step)
        block = rows[:, :, :, lo:hi].float().reshape(b, hk, r * (hi - lo), d)
        logits = (block @ keys).mul_(scale).view(b, hk, r, hi - lo, n)  # [B, Hk, R, rows, N]
        if softcap is not None:
            logits = torch.tanh(logits / softcap) * softcap
        if bias is not None:
            logits += bias.view(-1, hk, r, 1, n)
        if causal:
            ahead = torch.ones(hi - lo, n, dtype=torch.bool, device=q.device)
            logits.masked_fill_(ahead.triu_(n - t + lo + 1), -torch.inf)
        if visible is not None:
            logits.masked_fill_(~visible[:, :, None, None, :], -torch.inf)
        o, s = _softmax(logits, values)
        out[:, :, :, lo:hi], lse[:, :, :, lo:hi] = o, s
    return State(out.view(b, hq, t, -1), lse.view(b, hq, t))


def attend_views(
    q: Tensor,
    keys: KVView,
    values: KVView,
    scale: float,
    *,
    products: bool = False,
    **options: Any,
) -> State:
    """Attend q [B, Hq, T, D] to all tokens of two views, unpacked; options as in `attend`.

    products: a kernel may also return scale * q @ k, fp32 [B, Hq, T, N padded to whole vectors of
    16], for `score.reference.step_mass`; the reference returns None for it.
    """
    return attend(q, keys.tensor(), values.tensor(), scale, **options)


def attend_gathered(
    q: Tensor,
    keys: KVView,
    values: KVView,
    slots: Tensor,
    begin: int,
    scale: float,
    *,
    first: First | None = None,
    **options: Any,
) -> State:
    """Attend q [B, Hq, 1, D] to `first`, to the tokens at slots and to all tokens from `begin` on.

    slots: int64 [B, H, M] of the views' tokens, H a multiple of Hk that divides Hq: heads of a
    group may have chosen alone. visible: bool [B, 1 or H, S + M + rest], in the order named. bias:
    fp32 [B or 1, Hq, S + M + rest]. The rest is as in `attend`.
    """

    def read(view: KVView, lead: Tensor | None) -> Tensor:
        x = view.tensor()
        r = slots.shape[1] // x.shape[1]
        parts = [gather(x, slots), x[:, :, begin:].repeat_interleave(r, dim=1)]
        before = [] if lead is None else [lead.repeat_interleave(r, dim=1)]
        return torch.cat([*before, *parts], dim=2)

    k, v = (read(*both) for both in zip((keys, values), first or (None, None), strict=True))
    return attend(q, k, v, scale, **options)


def _softmax(logits: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Softmax of logits [B, Hk, R, T, N] times values [B, Hk, N, D]; all-hidden rows give 0."""
    b, hk, r, t, n = logits.shape
    if n == 0:
        return values.new_zeros(b, hk, r, t, values.shape[-1]), logits.new_full(
            (b, hk, r, t), -torch.inf
        )
    top = logits.amax(dim=-1, keepdim=True)
    weights = (logits - torch.where(top == -torch.inf, 0.0, top)).exp_()
    total = weights.sum(dim=-1, keepdim=True)  # 0 for a row that sees nothing
    out = (weights.view(b, hk, r * t, n) @ values).view(b, hk, r, t, -1)
    lse = (total.log() + top).squeeze(-1)
    return out / total.clamp_min(torch.finfo(torch.float32).tiny), lse


def merge(states: list[State]) -> State:
    """Merge attention over disjoint parts into attention over their union; exact, any order."""
    out, lse, _ = states[0]
    for part in states[1:]:
        weight = torch.sigmoid(part.lse - lse).nan_to_num()  # NaN: neither sees anything
        out = out.lerp(part.out, weight.unsqueeze(-1))
        lse = torch.logaddexp(lse, part.lse)
    return State(out, lse)


def visible_keys(t: int, n: int, visible: Tensor | None, device: torch.device) -> Tensor:
    """Which of n keys each of the last t tokens may see: causally, itself if it would see none.

    visible: bool [B, 1 or Hk, 1, N], False hides a key. Returns bool [T, N], or [B, 1 or Hk, T, N].
    """
    see = torch.ones(t, n, dtype=torch.bool, device=device).tril_(n - t)
    if visible is None:
        return see
    see = see & visible
    sees_none = visible[:, :, 0].cumsum(-1)[..., n - t :] == 0
    see.diagonal(n - t, -2, -1).logical_or_(sees_none)
    return see


def sdpa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    *,
    causal: bool,
    visible: Tensor | None,
    bias: Tensor | None = None,
) -> Tensor:
    """Attend as `attend` does, by torch's fused kernel and without the lse: [B, Hq, T, D].

    A query that would see no key sees itself (rows of padding must not be NaN).
    A bias needs T = 1: for more queries the kernel would want it as a matrix [Hq, T, N].
    """
    assert bias is None or q.shape[2] == 1
    b, hq, t, d = q.shape
    hk, n = k.shape[1], k.shape[2]
    mask = None if visible is None else visible[:, :, None, :]
    if t == 1:
        # One query row a head: the R heads of a group become rows over the same keys.
        rows = q.view(b, hk, hq // hk, d)
        if bias is not None:
            added = bias.view(-1, hk, hq // hk, n).to(q.dtype)
            mask = added if mask is None else added.masked_fill(~mask, -torch.inf)
        return F.scaled_dot_product_attention(rows, k, v, mask, scale=scale).view(b, hq, 1, -1)
    if causal and (mask is not None or n > t):
        mask, causal = visible_keys(t, n, mask, q.device), False
        if mask.dim() == 4 and mask.shape[1] not in (1, hq):
            mask = mask.repeat_interleave(hq // hk, dim=1)
    return F.scaled_dot_product_attention(
        q, k, v, mask, is_causal=causal, scale=scale, enable_gqa=hq != hk
    )
