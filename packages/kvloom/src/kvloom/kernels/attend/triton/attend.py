"""Decode attention on CUDA tensors: which cases the Triton kernels cover, and their calls.

Each region takes a call, chosen tokens and the tokens after them one each; one kernel merges the
splits of all calls.
Importing this does not import Triton; the first call does.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

from ...limits import OF_ONE_HEAD, Coverage
from ..reference import AttentionState, with_sinks
from ..regions import KVView, Paged, Region, Slots, Spans
from . import decode, paged
from .decode import kernels, nothing, run

__all__ = ["attend", "kernels", "problems"]


SPANS = Coverage(OF_ONE_HEAD)
COVERAGE = f"{decode.STEPS}; {decode.ENCODINGS}; `Spans`: {SPANS}; `Paged`: {paged.COVERAGE}"


def problems(q: Tensor, regions: Sequence[Region], _softcap: float | None = None) -> list[str]:
    """Return why no kernel attends q [B, Hq, T, D] to these regions; empty if one does."""
    reasons: list[str] = []
    for region in regions:
        given = q.shape[2], region.keys.exact, region.keys.encoding, region.values.encoding
        if isinstance(region.where, Paged):
            found = paged.problems(*given)
        else:
            found = decode.problems(*given)
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
    if not q.shape[0]:
        state = nothing(q)
    elif isinstance(where := regions[0].where, Paged):
        state = _pages(q, regions[0].keys, regions[0].values, where, scale)
    else:
        q = q.to(regions[0].keys.tail.dtype).contiguous()
        rotated: dict[int, Tensor] = {}
        calls = [x for region in regions for x in _calls(q, rotated, region, scale, softcap)]
        state = run([(call, kernels()._split) for call in calls]) if calls else nothing(q)
    return state if sink_logits is None else with_sinks(state, sink_logits)


def _calls(
    q: Tensor,
    rotated: dict[int, Tensor],
    region: Region,
    scale: float,
    softcap: float | None,
) -> Iterator[decode.Launch]:
    """Yield the calls for chosen tokens, or those of spans, packed or not, and for the rest."""
    keys, values, where = region[:3]
    stretches: list[tuple[Slots | Spans | None, int, int]] = [(None, 0, keys.tokens)]
    if isinstance(where, Slots):
        stretches = [(where, 0, where.slots.shape[2]), (None, where.begin, keys.tokens)]
    elif isinstance(where, Spans):
        stretches = [(where, 0, where.longest)]
    column = 0
    for there, lo, hi in stretches:
        if hi > lo:
            columns = slice(column, column + hi - lo)
            visible, bias = (
                None if x is None else x[..., columns] for x in (region.visible, region.bias)
            )
            causal = region.step_tokens > 1  # a single query is the last token and sees all
            yield decode.call(
                q, rotated, keys, values, scale, causal, softcap, decode.masks_of(visible, bias),
                there, lo, hi,
            )  # fmt: skip
            column += hi - lo


def _pages(q: Tensor, keys: KVView, values: KVView, where: Paged, scale: float) -> AttentionState:
    """Attend q [B, Hq, 1, D], each row to its own pages."""
    table, tail_row = where.table, where.table.tokens - where.table.packed_tokens - 1
    if where.new is not None:
        for view, x in zip((keys, values), where.new, strict=True):
            view.tail[table.tails, :, tail_row] = x[:, :, 0].to(view.tail.dtype)
    call: Any = paged.arguments(q, keys, values, table, scale, where.sinks)
    return run([(call, paged.kernel())])
