"""Attention over one set of tokens as a mergeable state, in plain torch.

Attention over a set of tokens splits exactly: attend to each part, keep (out, lse), merge. For
part p with logits s_j: lse_p = log sum_j exp(s_j), out_p = sum_j exp(s_j - lse_p) v_j; then
lse = log sum_p exp(lse_p), out = sum_p exp(lse_p - lse) out_p. The empty part is the identity
(lse = -inf, out = 0). Everything here is computed in fp32; keys and values are never repeated for
grouped-query attention.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..limits import dtype_problem
from ..select.reference import gather, gather_packed
from .regions import KVView, Paged, Region, Slots, Spans

# Logits of one block of query rows hold at most this many numbers (64 MiB in fp32).
_BLOCK_NUMEL = 1 << 24
_MASK_NUMEL = 1 << 26  # bytes of a mask of queries and keys
UNPACK_TOKENS = 8192
"""Tokens that are unpacked at once."""


class AttentionState(NamedTuple):
    """Attention over one set of tokens: out fp32 [B, Hq, T, D] and lse fp32 [B, Hq, T].

    products: scale * q @ k, where a kernel returns it (see `attend_regions`).
    """

    out: Tensor
    lse: Tensor
    products: Tensor | None = None


def nothing(q: Tensor, channels: int) -> AttentionState:
    """Return the state of attention of q [B, Hq, T, D] to no tokens, with values of `channels`."""
    out = q.new_zeros(*q.shape[:3], channels, dtype=torch.float32)
    return AttentionState(out, out.new_full(q.shape[:3], -torch.inf))


def attend_regions(
    q: Tensor,
    regions: Sequence[Region],
    scale: float,
    *,
    softcap: float | None = None,
    products: bool = False,
    sink_logits: Tensor | None = None,
) -> AttentionState:
    """Attend q [B, Hq, T, D] to the tokens of all regions.

    softcap: as for `attend_exact`. sink_logits: as for `with_sinks`. products: a kernel that reads
    one region without an addressing may also return scale * q @ k, fp32 [B, Hq, T, N padded to
    whole vectors of 16], for `score.reference.step_mass`; the reference returns None for it.
    """
    state = merge([_region(q, region, scale, softcap) for region in regions])
    return state if sink_logits is None else with_sinks(state, sink_logits)


def _region(q: Tensor, region: Region, scale: float, softcap: float | None) -> AttentionState:
    where, attend = region.where, partial(attend_exact, softcap=softcap)
    if isinstance(where, Slots):
        return _slots(q, region, where, scale, attend)
    if isinstance(where, Paged):
        return _pages(q, region.keys, region.values, where, scale, attend)
    return attend_region(q, region, scale, attend, UNPACK_TOKENS)


def attend_region(
    q: Tensor, region: Region, scale: float, attend: Callable[..., AttentionState], most: int
) -> AttentionState:
    """Attend to a region of dense tokens or `Spans`, unpacking `most` tokens at a time.

    attend: `attend_exact`, or a function with the same arguments. It gets the argument `bias` only
    where there is a bias.
    """
    if isinstance(region.where, Spans):
        return _spans(q, region, region.where, scale, attend, most)
    return _dense(q, region, 0, region.keys.tokens, scale, attend, most)


def _dense(
    q: Tensor,
    region: Region,
    begin: int,
    end: int,
    scale: float,
    attend: Callable[..., AttentionState],
    most: int,
) -> AttentionState:
    """Attend to the tokens from `begin` to `end`; the region's masks are those of these tokens."""
    keys, values, _, visible, bias, step_tokens = region
    own = min(step_tokens, q.shape[2])
    past = end - own if own > 1 else end  # a single query sees all tokens
    packed = [min(max(begin, side.prefix), past) for side in (keys, values)]
    states = []
    for lo, hi in pairwise(sorted({begin, *range(begin, max(packed), most), *packed, past, end})):
        columns = slice(lo - begin, hi - begin)
        masks = {} if bias is None else {"bias": bias[..., columns]}
        states.append(
            attend(
                q, keys.tensor(lo, hi), values.tensor(lo, hi), scale, causal=lo >= past,
                visible=None if visible is None else visible[..., columns], **masks,
            )
        )  # fmt: skip
    return merge(states) if states else nothing(q, values.exact.shape[3])


def _spans(
    q: Tensor,
    region: Region,
    where: Spans,
    scale: float,
    attend: Callable[..., AttentionState],
    most: int,
) -> AttentionState:
    """Attend q [B, Hq, T, D], each key/value head of each row to its own tokens."""
    b, hq, t, d = q.shape
    heads = b * where.bounds.shape[1]
    rows = q.reshape(heads, b * hq // heads, t, d)
    seen = None if region.visible is None else region.visible.reshape(heads, 1, -1)
    states = []
    for i, (first, count) in enumerate(where.bounds.view(-1, 2).tolist()):
        own = region._replace(visible=None if seen is None else seen[i : i + 1], step_tokens=0)
        states.append(_dense(rows[i : i + 1], own, first, first + count, scale, attend, most))
    out, lse = (torch.cat(x) for x in list(zip(*states, strict=True))[:2])
    return AttentionState(out.view(b, hq, t, -1), lse.view(b, hq, t))


def _slots(
    q: Tensor, region: Region, where: Slots, scale: float, attend: Callable[..., AttentionState]
) -> AttentionState:
    """Attend q [B, Hq, 1, D] to tokens at slots, and to all from `begin` on."""
    count, states = where.slots.shape[2], []
    parts = [None if x is None else x.split([count, x.shape[-1] - count], dim=-1)
             for x in (region.visible, region.bias)]  # fmt: skip
    (seen, seen_rest), (bias, bias_rest) = (part or (None, None) for part in parts)
    if count:
        k, v = (_gathered(view, where) for view in (region.keys, region.values))
        states.append(attend(q, k, v, scale, visible=seen, bias=bias))
    rest = region._replace(visible=seen_rest, bias=bias_rest, step_tokens=0)
    states.append(_dense(q, rest, where.begin, rest.keys.tokens, scale, attend, UNPACK_TOKENS))
    return merge(states)


def _gathered(view: KVView, where: Slots) -> Tensor:
    """Return the tokens at slots: [B, H, M, D]."""
    packed, slots = view.packed, where.slots
    if packed is None:
        return gather(view.tail, slots)
    layer_encoding = getattr(packed, "layer_encoding", None)
    if layer_encoding is None or not layer_encoding.encoding.plain or where.begin > packed.hi:
        return gather(view.tensor(), slots)  # unpacks all tokens to gather some
    encoding = layer_encoding.encoding
    return gather_packed(
        packed.codes, packed.scale, packed.zero, encoding.bits, encoding.axis,
        layer_encoding.group, slots, packed.dtype,
    )  # fmt: skip


def _pages(
    q: Tensor,
    keys: KVView,
    values: KVView,
    where: Paged,
    scale: float,
    attend: Callable[..., AttentionState],
) -> AttentionState:
    """Attend q [B, Hq, 1, D], each row to its own pages."""
    table, rows = where.table, []
    for i, (packed, tokens) in enumerate(
        zip(table.packed_tokens.tolist(), table.tokens.tolist(), strict=True)
    ):
        sides = []
        for view, first, last in zip(
            (keys, values), where.sinks or (None, None), where.new or (None, None), strict=True
        ):
            if last is not None:
                view.tail[table.tails[i], :, tokens - packed - 1] = last[i, :, 0]
            x = _tokens_of_row(view, where, i, packed, tokens)
            if first is not None and packed:
                x[0, :, : first.shape[2]] = first[table.blocks[i, 0]]
            sides.append(x)
        rows.append(attend(q[i : i + 1], sides[0], sides[1], scale))
    return AttentionState(
        torch.cat([row.out for row in rows]), torch.cat([row.lse for row in rows])
    )


def _tokens_of_row(view: KVView, where: Paged, row: int, packed: int, tokens: int) -> Tensor:
    """Return a copy of one row's tokens, unpacked: [1, H, tokens, D]."""
    table, pages = where.table, view.packed
    exact = view.tail[table.tails[row], :, : tokens - packed][None]
    if not packed or pages is None:
        return exact.clone()
    blocks = table.blocks[row, : packed // table.page]
    begin = table.page * torch.arange(len(blocks), device=blocks.device)
    chosen = pages._replace(
        codes=pages.codes[blocks], scale=pages.scale[blocks], zero=pages.zero[blocks],
        positions=None if pages.rope is None else begin[:, None, None],
    )  # fmt: skip
    old: Tensor = chosen.tensor().transpose(0, 1).flatten(1, 2)[None]
    return torch.cat([old, exact], dim=2)


def attend_exact(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    *,
    causal: bool = False,
    visible: Tensor | None = None,
    softcap: float | None = None,
    bias: Tensor | None = None,
    later_seen: Tensor | None = None,
) -> AttentionState:
    """Attend q [B, Hq, T, D] to k, v [B, Hk, N, D].

    causal: the T queries are the last T of the N tokens, and see no later one. visible: bool
    [B, 1 or Hk or Hq, N], False hides a token. softcap c: logits become c * tanh(logits / c). bias:
    fp32 [B or 1, Hq, N], added to the logits after that, the same for all T queries (ALiBi).
    later_seen: int64 [B, T], the queries attend only to so many tokens after their own, the last T
    of the N.
    """
    b, hq, t, d = q.shape
    hk, n = k.shape[1], k.shape[2]
    r = hq // hk
    out = q.new_empty(b, hk, r, t, v.shape[-1], dtype=torch.float32)
    lse = q.new_empty(b, hk, r, t, dtype=torch.float32)
    keys, values = k.float().transpose(-1, -2), v.float()
    rows = q.reshape(b, hk, r, t, d)
    numel = _BLOCK_NUMEL * (4 if q.is_cuda else 1)  # launches take longer than a pass over memory
    step = max(1, numel // max(1, b * hq * n))
    for lo in range(0, t, step):
        hi = min(t, lo + step)
        block = rows[:, :, :, lo:hi].float().reshape(b, hk, r * (hi - lo), d)
        logits = (block @ keys).mul_(scale).view(b, hk, r, hi - lo, n)  # [B, Hk, R, rows, N]
        logits = softcapped(logits, softcap)
        if bias is not None:
            logits += bias.view(len(bias), hk, r, 1, n)
        if causal:
            later = torch.ones(hi - lo, n, dtype=torch.bool, device=q.device)
            logits.masked_fill_(later.triu_(n - t + lo + 1), -torch.inf)
        if later_seen is not None:
            after = torch.arange(n, device=q.device) - torch.arange(
                n - t + lo, n - t + hi, device=q.device
            ).unsqueeze(1)
            seen = (after > 0) & (after <= later_seen[:, lo:hi, None])
            logits.masked_fill_(~seen[:, None, None], -torch.inf)
        if visible is not None:
            heads = min(visible.shape[1], hk)
            mask = visible.reshape(b, heads, visible.shape[1] // heads, 1, n)
            logits.masked_fill_(~mask, -torch.inf)
        o, s = _softmax(logits, values)
        out[:, :, :, lo:hi], lse[:, :, :, lo:hi] = o, s
    return AttentionState(out.view(b, hq, t, -1), lse.view(b, hq, t))


def attend_prompt(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    *,
    causal: bool = True,
    visible: Tensor | None = None,
) -> AttentionState:
    """Attend to exact tokens: `attend_exact` of many queries, such as a prompt's.

    visible: bool [B, 1 or Hk, N]. A kernel returns out in q's dtype.
    """
    return attend_exact(q, k, v, scale, causal=causal, visible=visible)


def unfit_prompt(
    q: Tensor, k: Tensor, v: Tensor, *_: Any, visible: Tensor | None = None, **__: Any
) -> str | None:
    """Return what kernels of `attend_prompt` do not read: several dtypes, widths or batches.

    They do not read masks of query heads, either.
    """
    if not len(q) == len(k) == len(v):
        return f"queries, keys and values have {len(q)}, {len(k)} and {len(v)} rows"
    if not 1 <= q.shape[3] == k.shape[3] == v.shape[3]:
        widths = f"{q.shape[3]}, {k.shape[3]} and {v.shape[3]}"
        return f"queries, keys and values have the widths {widths}"
    if not q.dtype == k.dtype == v.dtype:
        return f"queries, keys and values are {q.dtype}, {k.dtype} and {v.dtype}"
    if problem := dtype_problem(q.dtype, "queries, keys and values are"):
        return problem
    if visible is None or (len(visible) == len(q) and visible.shape[1] in (1, k.shape[1])):
        return None
    (rows, heads), (b, hk) = visible.shape[:2], k.shape[:2]
    return f"a mask for {rows} rows and {heads} heads, not for {b} and 1 or {hk}"


def softcapped(logits: Tensor, softcap: float | None) -> Tensor:
    """Return logits that stay between -softcap and softcap; None: as they are."""
    return logits if softcap is None else torch.tanh(logits / softcap) * softcap


def _softmax(logits: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Return softmax of logits [B, Hk, R, T, N] times values [B, Hk, N, D]; hidden rows give 0."""
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


def with_sinks(state: AttentionState, sink_logits: Tensor) -> AttentionState:
    """Add attention sinks to a softmax: logits fp32 [Hq] that have no value.

    A sink takes weight from all tokens: out * exp(lse - lse'), lse' = log(exp(lse) + exp(sink)).
    """
    lse = torch.logaddexp(state.lse, sink_logits[:, None])
    return AttentionState(state.out * (state.lse - lse).exp().unsqueeze(-1), lse)


def merge(states: list[AttentionState]) -> AttentionState:
    """Merge attention over disjoint parts into attention over their union; exact, any order."""
    out, lse, _ = states[0]
    for part in states[1:]:
        weight = torch.sigmoid(part.lse - lse).nan_to_num()  # NaN: neither sees anything
        out = out.lerp(part.out, weight.unsqueeze(-1))
        lse = torch.logaddexp(lse, part.lse)
    return AttentionState(out, lse)


def _visible_keys(t: int, n: int, visible: Tensor | None, device: torch.device) -> Tensor:
    """Return which of n keys the last t tokens may see: causally, itself if it would see none.

    visible: bool [B, 1 or Hk, 1, N], False hides a key. Returns bool [T, N], or [B, 1 or Hk, T, N].
    """
    mask = torch.ones(t, n, dtype=torch.bool, device=device).tril_(n - t)
    if visible is None:
        return mask
    mask = mask & visible
    sees_none = visible[:, :, 0].cumsum(-1)[..., n - t :] == 0
    mask.diagonal(n - t, -2, -1).logical_or_(sees_none)
    return mask


def sdpa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    *,
    causal: bool,
    visible: Tensor | None,
    bias: Tensor | None = None,
    sink_logits: Tensor | None = None,
) -> Tensor:
    """Attend as `attend_exact` does, by torch's fused kernel and without the lse: [B, Hq, T, D].

    A query that would see no key sees itself (rows of padding must not be NaN).
    A bias needs T = 1: for more queries the kernel would want it as a matrix [Hq, T, N].
    sink_logits: as for `with_sinks`.
    """
    assert bias is None or q.shape[2] == 1
    if sink_logits is not None:
        return _sdpa_with_sinks(q, k, v, scale, causal, visible, bias, sink_logits)
    b, hq, t, d = q.shape
    hk, n = k.shape[1], k.shape[2]
    mask = None if visible is None else visible[:, :, None, :]
    if t == 1:
        # One query row a head: the R heads of a group become rows over the same keys.
        rows = q.view(b, hk, hq // hk, d)
        if bias is not None:
            added = bias.view(-1, hk, hq // hk, n).to(q.dtype)
            mask = added if mask is None else added.masked_fill(~mask, -torch.inf)
        out = F.scaled_dot_product_attention(rows, k, v, mask, scale=scale)
        return out.reshape(b, hq, 1, -1)  # some kernels return another memory layout
    if mask is not None and mask.shape[1] not in (1, hq):
        mask = mask.repeat_interleave(hq // hk, dim=1)
    masked = mask is not None or (causal and n > t)
    flash = not masked and q.dtype.itemsize == 2 and d == v.shape[3] <= 256
    if q.is_cuda and hq != hk and not flash:  # else the kernel of such groups may hold all logits
        k, v = (
            x.expand(-1, hq, -1, -1) if hk == 1 else x.repeat_interleave(hq // hk, dim=1)
            for x in (k, v)
        )
    fused = partial(F.scaled_dot_product_attention, scale=scale, enable_gqa=hq != k.shape[1])
    if not (causal and masked):
        return fused(q, k, v, mask, is_causal=causal)
    step, outs = max(1, _MASK_NUMEL // (n if mask is None else mask.numel())), []
    for lo in range(0, t, step):
        queries, end = q[:, :, lo : lo + step], n - t + min(t, lo + step)
        shown = None if mask is None else mask[..., :end]
        seen = _visible_keys(queries.shape[2], end, shown, q.device)
        outs.append(fused(queries, k[:, :, :end], v[:, :, :end], seen))
    return outs[0] if len(outs) == 1 else torch.cat(outs, dim=2)


def _sdpa_with_sinks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    causal: bool,
    visible: Tensor | None,
    bias: Tensor | None,
    sink_logits: Tensor,
) -> Tensor:
    """Attend by `sdpa` with sinks, each of which is a key without a value in front of the others.

    All keys have one channel more: 1 for the sink's, else 0; that of a query is sink / scale. A
    query in front of the others keeps the causal mask square.
    """
    b, hq, t, d = q.shape
    extra = (sink_logits / scale).to(q.dtype).view(1, hq, 1, 1).expand(b, hq, t, 1)
    q = F.pad(torch.cat([q, extra], dim=-1), (0, 7, 1 if t > 1 else 0, 0))
    k, v = F.pad(k, (0, 8, 1, 0)), F.pad(v, (0, 8, 1, 0))
    k[:, :, 0, d] = 1.0
    if visible is not None:
        visible = F.pad(visible, (1, 0), value=True)
    if bias is not None:
        bias = F.pad(bias, (1, 0))
    out = sdpa(q, k, v, scale, causal=causal, visible=visible, bias=bias)
    return out[:, :, -t:, : v.shape[-1] - 8]
