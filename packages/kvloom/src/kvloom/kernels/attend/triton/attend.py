"""Decode attention on CUDA tensors: which cases the Triton kernels cover, and their calls.

Each region takes a call, chosen tokens and the tokens after them one each; one kernel merges the
splits of all calls but those for pages.
Importing this does not import Triton; the first call does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ...limits import OF_ONE_HEAD, Coverage
from ..reference import AttentionState, merge, nothing, with_sinks
from ..regions import KVView, Paged, Region, Slots, Spans
from . import decode, paged
from .decode import kernels, run

__all__ = ["attend", "kernels", "problems"]


_FIRST = 64  # tokens at most that a call reads beside its own
SPANS = Coverage(OF_ONE_HEAD)
COVERAGE = f"{decode.STEPS}; {decode.ENCODINGS}; `Spans`: {SPANS}; `Paged`: {paged.COVERAGE}"


def problems(q: Tensor, regions: Sequence[Region], softcap: float | None = None) -> list[str]:
    """Return why no kernel attends q [B, Hq, T, D] to these regions; empty if one does."""
    reasons: list[str] = []
    for region in regions:
        given = q.shape[2], region.keys.exact, region.keys.encoding, region.values.encoding
        if isinstance(region.where, Paged):
            found = paged.problems(*given)
            found += [] if softcap is None else ["logits of pages are not capped"]
        else:
            found = decode.problems(*given)
            if isinstance(region.where, Slots) and given[0] > 1:
                found = [*found, f"{given[0]} queries a step are not one"]
        if isinstance(region.where, Spans) and not found:
            sides = zip(("keys", "values"), given[2:], strict=True)
            found = [f"{side}: {x}" for side, e in sides if e for x in SPANS.problems(e)]
        reasons += [reason for reason in found if reason not in reasons]
    return reasons


def attend(
    q: Tensor,
    regions: Sequence[Region],
    scale: float,
    *,
    softcap: float | None = None,
    products: bool = False,
    sink_logits: Tensor | None = None,
) -> AttentionState:
    """Attend as `reference.attend_regions` does; returns no products."""
    regions = regions if q.shape[0] else ()
    dense = [region for region in regions if not isinstance(region.where, Paged)]
    states = [
        _pages(q, *region[:2], region.where, scale)
        for region in regions
        if isinstance(region.where, Paged)
    ]
    if dense:
        q = q.to(dense[0].keys.tail.dtype).contiguous()
        calls = _calls(q, dense, scale, softcap)
        states += [run([(call, kernels()._split) for call in calls])] if calls else []
    state = merge(states) if states else nothing(q, q.shape[3])
    return state if sink_logits is None else with_sinks(state, sink_logits)


def _calls(
    q: Tensor, regions: Sequence[Region], scale: float, softcap: float | None
) -> list[decode.Launch]:
    """Return the calls for regions; exact first tokens are read by that of other tokens."""
    first = next((region for region in regions if _are_first(region)), None)
    others = [(region, *stretch) for region in regions for stretch in _stretches(region)]
    reader = next((r for r, where, *_ in others if where is None and r is not first), None)
    calls = []
    for region, where, lo, hi, column in others:
        if region is first and reader is not None:
            continue
        columns = slice(column, column + hi - lo)
        masks = decode.masks_of(
            *(None if x is None else x[..., columns] for x in (region.visible, region.bias))
        )
        also = first[:2] if first is not None and region is reader and where is None else None
        causal = region.step_tokens > 1  # a single query is the last token and sees all
        calls.append(
            decode.call(q, *region[:2], scale, causal, softcap, masks, where, lo, hi, also)
        )
    return calls


def _are_first(region: Region) -> bool:
    """Return whether these are exact tokens that every query sees, few enough for one program."""
    masked = region.visible is not None or region.bias is not None or region.step_tokens > 1
    exact = region.keys.packed is None and region.values.packed is None
    return exact and not masked and region.where is None and region.keys.tokens <= _FIRST


_Stretch = tuple[Slots | Spans | None, int, int, int]
"""Where tokens are, the first and the end, and the first one's column in masks."""


def _stretches(region: Region) -> list[_Stretch]:
    """Return chosen tokens, or those of spans, packed or not, and the rest: each takes a call."""
    where, tokens = region.where, region.keys.tokens
    found: list[_Stretch] = [(None, 0, tokens, 0)]
    if isinstance(where, Slots):
        chosen = where.slots.shape[2]
        found = [(where, 0, chosen, 0), (None, where.begin, tokens, chosen)]
    elif isinstance(where, Spans):
        found = [(where, 0, where.longest, 0)]
    return [stretch for stretch in found if stretch[2] > stretch[1]]


def _pages(q: Tensor, keys: KVView, values: KVView, where: Paged, scale: float) -> AttentionState:
    """Attend q [B, Hq, 1, D], each row to its own pages."""
    table, tail_row = where.table, where.table.tokens - where.table.packed_tokens - 1
    if where.new is not None:
        for view, x in zip((keys, values), where.new, strict=True):
            view.tail[table.tails, :, tail_row] = x[:, :, 0].to(view.tail.dtype)
    call: Any = paged.arguments(q, keys, values, table, scale, where.sinks)
    return run([(call, paged.kernel())])
