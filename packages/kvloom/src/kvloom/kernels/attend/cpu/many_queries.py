"""Attention of many queries to stored tokens on CPU tensors: later turns, and chunks of a prompt.

Decides the parts: packed tokens are unpacked `TILE` at a time, so that the past is never unpacked
as a whole. A kernel of `attend_prompt` attends to each part where one covers the case, else torch's
fused attention; both return the log-sum-exp, by which parts are merged.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from ....encoding import Encoding
from ...limits import DTYPES, Coverage
from ..reference import AttentionState, merge, nothing, with_sinks
from ..regions import KVView, Region, Spans
from .prompt import attend_tokens

TILE = 1024
"""Tokens that are unpacked at once."""


def _other_dtypes(q: Tensor, region: Region, softcap: float | None) -> str | None:
    dtypes = {q.dtype, region.keys.exact.dtype, region.values.exact.dtype}
    if len(dtypes) == 1 and q.dtype in DTYPES:
        return None
    return f"queries, keys and values are {', '.join(sorted(map(str, dtypes)))}"


def _other_addressing(q: Tensor, region: Region, softcap: float | None) -> str | None:
    if region.where is None or isinstance(region.where, Spans):
        return None
    return f"{q.shape[2]} queries a step are not one"


def _other_formats(q: Tensor, region: Region, softcap: float | None) -> str | None:
    if all(isinstance(side.encoding, Encoding | None) for side in (region.keys, region.values)):
        return None
    return "tokens are packed in a format of another distribution"


COVERAGE = Coverage(
    ("queries, keys and values all in fp32, fp16 or bf16", _other_dtypes),
    ("dense tokens and `Spans`", _other_addressing),
    ("any encoding", _other_formats),
    ("no bias", lambda q, region, _: None if region.bias is None else "logits have a bias"),
    ("no softcap", lambda q, region, softcap: None if softcap is None else "logits are capped"),
)


def problems(q: Tensor, regions: Sequence[Region], softcap: float | None) -> list[str]:
    """Return why q [B, Hq, T, D] does not attend to these regions here; empty if it does."""
    reasons = [reason for region in regions for reason in COVERAGE.problems(q, region, softcap)]
    return list(dict.fromkeys(reasons))


def attend(
    q: Tensor,
    regions: Sequence[Region],
    scale: float,
    *,
    softcap: float | None = None,
    products: bool = False,
    sink_logits: Tensor | None = None,
) -> AttentionState:
    """Attend as `reference.attend_regions` does; each part is rounded to q's dtype."""
    assert softcap is None
    state = merge([state for region in regions for state in _states(q, region, scale)])
    return state if sink_logits is None else with_sinks(state, sink_logits)


def _states(q: Tensor, region: Region, scale: float) -> Iterator[AttentionState]:
    """Attend to the parts of a region."""
    keys, values, where, visible, _, step_tokens = region
    if isinstance(where, Spans):
        yield _spans(q, region, where, scale)
        return
    past = keys.tokens - step_tokens
    for lo, hi in _parts(keys, values, 0, past):
        yield _part(q, keys.tensor(lo, hi), values.tensor(lo, hi), scale, False, visible, lo)
    if step_tokens:
        k, v = keys.tensor(past), values.tensor(past)
        yield _part(q, k, v, scale, step_tokens > 1, visible, past)
    elif not past:
        yield nothing(q)


def _parts(keys: KVView, values: KVView, lo: int, hi: int) -> list[tuple[int, int]]:
    """Cut tokens lo to hi into the exact ones and `TILE` packed ones at a time."""
    packed = min(max(lo, keys.prefix, values.prefix), hi)
    return list(pairwise(sorted({lo, *range(lo, packed, TILE), packed, hi})))


def _spans(q: Tensor, region: Region, where: Spans, scale: float) -> AttentionState:
    """Attend q [B, Hq, T, D], each key/value head of each row to its own tokens."""
    b, hq, t, d = q.shape
    heads = b * where.bounds.shape[1]
    rows = q.reshape(heads, b * hq // heads, t, d)
    seen = None if region.visible is None else region.visible.reshape(heads, 1, -1)
    states = []
    for i, (first, count) in enumerate(where.bounds.view(-1, 2).tolist()):
        row, parts = rows[i : i + 1], []
        for lo, hi in _parts(region.keys, region.values, first, first + count):
            k, v = region.keys.tensor(lo, hi), region.values.tensor(lo, hi)
            mask = None if seen is None else seen[i : i + 1]
            parts.append(_part(row, k, v, scale, False, mask, lo - first))
        states.append(merge(parts) if parts else nothing(row))
    out, lse = (torch.cat(x) for x in list(zip(*states, strict=True))[:2])
    return AttentionState(out.view(b, hq, t, d), lse.view(b, hq, t))


def _part(
    q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, visible: Tensor | None, begin: int
) -> AttentionState:
    """Attend to exact tokens, which are those of the mask from `begin` on."""
    if visible is not None:
        visible = visible[..., begin : begin + k.shape[2]]
    return attend_tokens(q, k, v, scale, causal=causal, visible=visible)
