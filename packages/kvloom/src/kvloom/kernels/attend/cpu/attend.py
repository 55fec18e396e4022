"""Decode attention on CPU tensors: which cases the compiled kernels cover, and their call.

A step of few queries attends to regions in one pass, straight from where tokens are stored:
exact tokens, then a packed prefix with an exact tail, then tokens of which heads have different
numbers (`decode_kernel`); or pages; or chosen tokens (`gathered_kernel`). Other regions take a call
each, whose states are merged. `coverage` names the encodings. Importing this does not import Numba;
making an `Attend` does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...arguments import TOKENS, Arguments, contiguous_rows, padded, strides
from ...dispatch import once
from ...quantize.encoding import LayerEncoding
from ..reference import State, merge
from ..regions import Paged, Region, Slots, Spans
from . import coverage
from .arguments import (
    ABSENT,
    DECODE,
    GATHERED,
    PAGED,
    SPANS,
    SidePacker,
    multiplied,
    positions,
    rope_of,
    rotation,
)

MAX_QUERIES = 8  # per step: with more, reading keys no longer dominates
_NUMBERS_PER_THREAD = 1 << 15  # of keys and values
_PAGE_TILE = 128  # tokens of a page that are read at a time, where codes fill bytes

KeptArguments = tuple[dict[str, Any], tuple[Tensor | None, ...]]
"""Some arguments of a kernel by name, and the tensors that must outlive its run."""

_NO_ROPE: KeptArguments = {"near": 0, "far": 0, "positions": ABSENT, "position_per_token": 0}, ()
_NO_MASKS: KeptArguments = {"visible": ABSENT, "bias": ABSENT}, ()
_NO_TOKENS = (0,) * TOKENS.numbers
_NO_LEAD = {"first_tokens": 0, "first_keys": _NO_TOKENS, "first_values": _NO_TOKENS}


class Pass(NamedTuple):
    """The regions that one run of a kernel reads."""

    main: Region
    lead: Region | None = None  # exact tokens before it
    spans: Region | None = None  # tokens of which heads have different numbers, behind it

    @property
    def regions(self) -> list[Region]:
        """All of them, in the order in which they are read."""
        return [x for x in (self.lead, self.main, self.spans) if x is not None]


Numbers = tuple[int, int | None, int | None]
"""The numbers of the regions of a `Pass`."""


def passes(regions: Sequence[Region]) -> list[Numbers]:
    """Divide regions into those that one run of a kernel reads."""
    found: list[Numbers] = []
    waiting: int | None = None  # exact tokens that may stand before the next region
    for i, region in enumerate(regions):
        where = region.where
        if isinstance(where, Spans) and waiting is not None:
            found.append((waiting, None, None))
            waiting = None
        if isinstance(where, Spans) and found and _joins(regions[found[-1][0]], region):
            found[-1] = (*found[-1][:2], i)
            continue
        if waiting is not None and _follows(region, regions[waiting]):
            found.append((i, waiting, None))
            waiting = None
            continue
        if waiting is not None:
            found.append((waiting, None, None))
            waiting = None
        if _leads(region) and i + 1 < len(regions):
            waiting = i
        else:
            found.append((i, None, None))
    return found if waiting is None else [*found, (waiting, None, None)]


def _leads(region: Region) -> bool:
    """Whether a region is exact tokens of the past, which may stand before others."""
    exact = region.keys.packed is None and region.values.packed is None
    return exact and region.where is None and not region.own


def _follows(region: Region, lead: Region) -> bool:
    """Whether a kernel reads exact tokens before a region: both have the same heads."""
    same = region.keys.exact.shape[1] == lead.keys.exact.shape[1]
    return same and (region.where is None or isinstance(region.where, Slots))


def _joins(main: Region, spans: Region) -> bool:
    """Whether a kernel reads spans behind another region: both have the same encodings."""
    same = main.keys.encoding, main.values.encoding
    return main.where is None and same == (spans.keys.encoding, spans.values.encoding)


def _pass(regions: Sequence[Region], numbers: Numbers) -> Pass:
    main, lead, spans = numbers
    return Pass(
        regions[main],
        None if lead is None else regions[lead],
        None if spans is None else regions[spans],
    )


def problems(q: Tensor, regions: Sequence[Region]) -> list[str]:
    """Return why no kernel attends q [B, Hq, T, D] to these regions; empty if one does."""
    reasons: list[str] = []
    for numbers in passes(regions):
        each = _pass(regions, numbers)
        for region in each.regions:
            reasons += [x for x in _problems(q.shape[2], region) if x not in reasons]
        if isinstance(each.main.where, Spans):
            reasons.append("spans have no region of the same encodings before them")
    return reasons


def _problems(tokens: int, region: Region) -> list[str]:
    where, keys = region.where, region.keys
    most, refuse = MAX_QUERIES, None
    if isinstance(where, Slots):
        most, refuse = 1, coverage.by_token
    elif isinstance(where, Spans):
        refuse = coverage.by_span
    elif isinstance(where, Paged):
        most, refuse = 1, coverage.by_page
    reasons = coverage.step_problems(
        most, tokens, keys.exact, (keys.encoding, region.values.encoding), refuse
    )
    if isinstance(where, Paged) and where.table.page % _PAGE_TILE:
        page = where.table.page
        reasons.append(f"a page of {page} tokens is not a multiple of {_PAGE_TILE}")
    if where is None and keys.packed is not None and not reasons:
        at = keys.packed.at
        if at is not None and at.shape[2] > 1:
            reasons.append("it reads keys before RoPE at consecutive positions only")
    return reasons


class Attend:
    """Attention of one layer: keeps what does not change between its steps."""

    def __init__(self, q: Tensor, regions: Sequence[Region]) -> None:
        self._passes = passes(regions)
        self._kernels = [_PassAttention(q, _pass(regions, each)) for each in self._passes]

    def __call__(
        self,
        q: Tensor,
        regions: Sequence[Region],
        scale: float,
        *,
        softcap: float | None = None,
        products: bool = False,
    ) -> State:
        """Attend as `reference.attend_regions` does; packed tokens are not rounded."""
        states = [
            kernel.run(q, _pass(regions, numbers), scale, softcap, products)
            for kernel, numbers in zip(self._kernels, self._passes, strict=True)
        ]
        return states[0] if len(states) == 1 else merge(states)


attend = once(Attend)


class _PassAttention:
    """A kernel, its workspace and the packed arguments of a layer's keys and values.

    Bound to the heads, queries, dtype, device, encodings and kinds of regions of the arguments it
    is made from; batch, tokens and options may differ at every step.
    """

    def __init__(self, q: Tensor, each: Pass) -> None:
        main, where = each.main, each.main.where
        _, hq, t, d = q.shape
        self.kv_heads = main.keys.exact.shape[1]
        self.heads = where.slots.shape[1] if isinstance(where, Slots) else self.kv_heads
        self.rows = hq // self.heads * t
        self.layout = _layout(each)
        rope, key_encoding = rope_of(main.keys)
        self.kernel, self.tile = coverage.kernel(
            d, self.kv_heads, self.rows, main.keys.exact.dtype, rope, self.layout is GATHERED,
            key_encoding, main.values.encoding,
            page=where.table.page if isinstance(where, Paged) else 0,
            lead=each.lead is not None and self.layout is not GATHERED,
            spans=each.spans is not None,
        )  # fmt: skip
        self.keys, self.values = SidePacker(), SidePacker()
        self.span_keys, self.span_values = SidePacker(), SidePacker()
        moved = [
            x is not None and coverage.own_space(x)
            for x in (main.keys.encoding, main.values.encoding)
        ]
        self.own_queries, self.sets = moved[0], 1 + moved[1]
        self.states = q.new_empty(0)

    def run(
        self,
        q: Tensor,
        each: Pass,
        scale: float,
        softcap: float | None = None,
        products: bool = False,
    ) -> State:
        """Attend q [B, Hq, T, D] to the regions of a pass."""
        main, lead, where = each.main, each.lead, each.main.where
        keys, values = main.keys, main.values
        b, hq, t, d = q.shape
        queries = q.float().contiguous()
        out, lse = torch.empty_like(queries), queries.new_empty(b, hq, t)
        first = 0 if lead is None else lead.keys.tokens
        n = keys.tokens
        numbers: dict[str, Any] = {}
        alive: tuple[Any, ...] = ()
        if isinstance(where, Slots):
            slots = contiguous_rows(where.slots)
            n = first + slots.shape[2] + n - where.begin
            numbers = {
                "share": self.heads // self.kv_heads, "slots_count": slots.shape[2],
                "begin": where.begin, "slots": strides(slots, 2),
            }  # fmt: skip
            alive = (slots,)
        elif isinstance(where, Paged):
            n = where.table.longest
            numbers, alive = _pages(where, keys.tail.dtype)
        longest = n if isinstance(where, Slots) else first + n
        if each.spans is not None:
            spans = each.spans
            assert isinstance(spans.where, Spans)
            bounds = spans.where.bounds.contiguous()
            longest += spans.where.longest
            alive = (bounds,)
            numbers = {
                "spans": bounds.data_ptr(), "span_keys": self.span_keys.pack(spans.keys),
                "span_values": self.span_values.pack(spans.values),
            }  # fmt: skip
        if not longest or not b:
            return State(out.zero_(), lse.fill_(-torch.inf))
        lead_numbers = _NO_LEAD
        if lead is not None:
            k, v = (contiguous_rows(x.tail) for x in (lead.keys, lead.values))
            alive = (*alive, k, v)
            lead_numbers = {
                "first_tokens": first, "first_keys": strides(k, 3), "first_values": strides(v, 3),
            }  # fmt: skip
        packed_queries, query_rotation = queries, 0
        sums, value_rotation = out, 0
        if self.own_queries:
            packed_queries, query_rotation = _packed_queries(queries, _layer(each, 0))
        layer = _layer(each, 1) if self.sets == 2 else None
        if self.sets == 2:
            sums, value_rotation = self._sums(queries, layer)
        masks, _masks_alive = self._masks(queries, each)
        rope, _rope_alive = _NO_ROPE
        if keys.packed is not None and keys.packed.rope is not None:
            consecutive = n if self.layout is PAGED else keys.packed.hi
            rope, _rope_alive = positions(keys.packed, keys.packed.rope, d, consecutive)
        logits, width = None, -(-n // 16) * 16
        if products and where is None and lead is None and each.spans is None:
            logits = queries.new_empty(b, hq, t, width)
        threads, splits = self._tasks(queries, longest)
        job = self.layout.pack(
            batch=b, heads=self.heads, rows=self.rows, queries=t, tokens=n,
            causal=main.own > 1, splits=splits, scale=scale, softcap=softcap or 0.0,
            q=queries.data_ptr(), q_packed=packed_queries.data_ptr(),
            query_rotation=query_rotation, out=sums.data_ptr(), value_rotation=value_rotation,
            rotated_out=out.data_ptr(), lse=lse.data_ptr(), states=self.states.data_ptr(),
            keys=self.keys.pack(keys), values=self.values.pack(values),
            logits=0 if logits is None else logits.data_ptr(), logits_row=4 * width,
            **masks, **rope, **lead_numbers, **numbers,
        )  # fmt: skip
        self.kernel.run(job, b * self.heads, threads)
        if self.sets == 2 and not value_rotation:
            out = _merged(sums, layer).reshape(q.shape)
        return State(out, lse, logits)

    def _tasks(self, queries: Tensor, n: int) -> tuple[int, int]:
        """Return the threads and the tasks per head for n tokens; make room for their states."""
        b, _, _, d = queries.shape
        numbers = 2 * b * self.kv_heads * n * d
        threads = min(torch.get_num_threads(), 1 + numbers // _NUMBERS_PER_THREAD)
        heads, splits = b * self.heads, 1
        if threads > 1:
            splits = min(-(-n // self.tile), -(-4 * threads // heads))
        room = heads * splits * self.rows * (self.sets * d + 32)
        if self.states.numel() < room:
            self.states = queries.new_empty(room)
        return threads, splits

    def _sums(self, queries: Tensor, layer: LayerEncoding | None) -> tuple[Tensor, int]:
        """Return room for the sums of exact and of packed values, and the latter's rotation."""
        b, _hq, _t, d = queries.shape
        shared = self.heads // self.kv_heads
        sums = queries.new_empty(b, self.kv_heads, shared, self.sets, self.rows, d)
        group = 0 if layer is None else layer.rotated
        return sums, rotation(group, d, back=True).data_ptr() if group else 0

    def _masks(self, queries: Tensor, each: Pass) -> KeptArguments:
        """Return the arguments of the mask and of the bias of all regions."""
        regions = each.regions
        if all(x.visible is None and x.bias is None for x in regions):
            return _NO_MASKS
        b, hq, _t, _d = queries.shape
        visible = bias = None
        if any(x.visible is not None for x in regions):
            parts = [_visible(x, b, self.heads, queries.device) for x in regions]
            visible = padded(parts[0] if len(parts) == 1 else torch.cat(parts, dim=2))
            visible = visible.expand(b, self.heads, -1)
        if any(x.bias is not None for x in regions):
            biases = [x.bias.float().expand(b, hq, -1) for x in regions if x.bias is not None]
            assert len(biases) == len(regions)
            bias = padded(biases[0] if len(biases) == 1 else torch.cat(biases, dim=2))
        return {"visible": strides(visible, 2), "bias": strides(bias, 2)}, (visible, bias)


def _visible(region: Region, b: int, heads: int, device: torch.device) -> Tensor:
    """Return the mask of a region, bool [b, 1 or heads, tokens read]."""
    mask, where = region.visible, region.where
    if mask is None:
        n = where.longest if isinstance(where, Spans) else int(region.tokens)
        return torch.ones(b, heads, n, dtype=torch.bool, device=device)
    if mask.shape[1] not in (1, heads):  # of key/value heads that share a choice
        mask = mask.repeat_interleave(heads // mask.shape[1], dim=1)
    return mask.expand(b, heads, -1)


def _layout(each: Pass) -> Arguments:
    """Return the arguments of the kernel that reads a pass."""
    where = each.main.where
    if isinstance(where, Slots):
        return GATHERED
    if isinstance(where, Paged):
        return PAGED
    return DECODE if each.spans is None else SPANS


def _pages(where: Paged, dtype: torch.dtype) -> tuple[dict[str, Any], tuple[Any, ...]]:
    """Return the arguments of pages, and the tensors that must outlive the run."""
    blocks, packed, lengths, tails = where.table.contiguous
    exact = [
        (None, None) if pair is None else tuple(contiguous_rows(x.to(dtype)) for x in pair)
        for pair in (where.sinks, where.new)
    ]
    (sink_keys, sink_values), (new_keys, new_values) = exact
    numbers = {
        "table": blocks.data_ptr(), "table_row": 8 * blocks.shape[1], "packed": packed.data_ptr(),
        "lengths": lengths.data_ptr(), "tails": tails.data_ptr(),
        "sinks": 0 if sink_keys is None else sink_keys.shape[2],
        "sink_keys": strides(sink_keys, 3), "sink_values": strides(sink_values, 3),
        "new_keys": strides(new_keys, 2), "new_values": strides(new_values, 2),
    }  # fmt: skip
    return numbers, (*exact, where.table)


def _layer(each: Pass, side: int) -> LayerEncoding | None:
    """Return the encoding of packed keys (0) or values (1); None if none is packed."""
    for region in (each.main, each.spans):
        view = None if region is None else region.values if side else region.keys
        if view is not None and view.packed is not None:
            layer: LayerEncoding = view.packed.layer
            return layer
    return None


def _packed_queries(queries: Tensor, layer: LayerEncoding | None) -> tuple[Tensor, int]:
    """Return queries in the space of packed keys, or the rotation that the kernel applies."""
    if layer is None:
        return queries, 0
    if layer.rotated:
        return queries, rotation(layer.rotated, queries.shape[3]).data_ptr()
    return queries if layer.divisor is None else multiplied(queries, layer.divisor), 0


def _merged(sums: Tensor, layer: LayerEncoding | None) -> Tensor:
    """Add the sums of packed values, times their divisor, to those of exact values."""
    exact, packed_sums = sums.unbind(-3)
    if layer is None:
        return exact
    assert layer.divisor is not None
    return torch.addcmul(exact, packed_sums, layer.divisor[:, None, None])
