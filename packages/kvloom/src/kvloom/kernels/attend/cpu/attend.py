"""Decode attention on CPU tensors: which cases the compiled kernels cover, and their call.

A step of few queries attends to regions in one pass, straight from where tokens are stored:
exact tokens, then a packed prefix with an exact tail, then tokens of which heads have different
numbers (`decode_kernel`); or pages; or chosen tokens (`gathered_kernel`). Other regions take a call
each, whose states are merged. `coverage` names the encodings. Importing this does not import Numba;
`bind` does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ....encoding import LayerEncoding
from ...arguments import TOKENS, contiguous_rows, padded, strides
from ...limits import MAX_STEP
from ..reference import AttentionState, merge, with_sinks
from ..regions import Paged, Region, Slots, Spans
from . import coverage, many_queries
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

_NUMBERS_PER_THREAD = 1 << 15  # of keys and values

KeptArguments = tuple[dict[str, Any], tuple[Tensor | None, ...]]
"""Some arguments of a kernel by name, and the tensors that must outlive its run."""

_NO_ROPE: KeptArguments = {"near": 0, "far": 0, "positions": ABSENT, "position_per_token": 0}, ()
_NO_MASKS: KeptArguments = {"visible": ABSENT, "bias": ABSENT}, ()
_NO_TOKENS = (0,) * TOKENS.numbers
_NO_LEAD = {"lead_tokens": 0, "lead_keys": _NO_TOKENS, "lead_values": _NO_TOKENS}


class KernelCall(NamedTuple):
    """Regions that one run of a kernel reads, by index.

    lead: exact tokens before the main region. spans: tokens after it, of which heads have different
    numbers.
    """

    main: int
    lead: int | None = None
    spans: int | None = None

    @property
    def indices(self) -> list[int]:
        """The regions in the order of their tokens."""
        return [i for i in (self.lead, self.main, self.spans) if i is not None]


def kernel_calls(regions: Sequence[Region]) -> list[KernelCall]:
    """Divide regions into those that one run of a kernel reads."""
    found: list[KernelCall] = []
    waiting: int | None = None  # exact tokens that may stand before the next region
    for i, region in enumerate(regions):
        if waiting is not None:
            lead, waiting = waiting, None
            if _follows(region, regions[lead]):
                found.append(KernelCall(i, lead))
                continue
            found.append(KernelCall(lead))
        spans = isinstance(region.where, Spans)
        if spans and found and _joins(regions[found[-1].main], region):
            found[-1] = found[-1]._replace(spans=i)
        elif _leads(region) and i + 1 < len(regions):
            waiting = i
        else:
            found.append(KernelCall(i))
    return found


def _leads(region: Region) -> bool:
    """Whether a region is exact tokens of the past, which may stand before others."""
    exact = region.keys.packed is None and region.values.packed is None
    return exact and region.where is None and not region.step_tokens


def _follows(region: Region, lead: Region) -> bool:
    """Whether a kernel reads exact tokens before a region: both have the same heads."""
    same = region.keys.exact.shape[1] == lead.keys.exact.shape[1]
    return same and (region.where is None or isinstance(region.where, Slots))


def _joins(main: Region, spans: Region) -> bool:
    """Whether a kernel reads spans after another region: both have the same encodings."""
    same = main.keys.encoding, main.values.encoding
    return main.where is None and same == (spans.keys.encoding, spans.values.encoding)


COVERAGE = f"{coverage.WORDS}; more queries: {many_queries.COVERAGE}"


def problems(q: Tensor, regions: Sequence[Region], softcap: float | None = None) -> list[str]:
    """Return why no kernel attends q [B, Hq, T, D] to these regions; empty if one does."""
    if q.shape[2] > MAX_STEP:
        return many_queries.problems(q, regions, softcap)
    reasons: list[str] = []
    for call in kernel_calls(regions):
        for region in (regions[i] for i in call.indices):
            reasons += [x for x in coverage.problems(q.shape[2], region) if x not in reasons]
        if isinstance(regions[call.main].where, Spans):
            reasons.append("spans have no region of the same encodings before them")
    return reasons


def bind(q: Tensor, regions: Sequence[Region], *_: Any, **__: Any) -> Callable[..., AttentionState]:
    """Return what attends to such regions at every step of a layer.

    It keeps what does not change between these steps. Packed tokens are not rounded.
    """
    if q.shape[2] > MAX_STEP:
        return many_queries.attend
    calls = [BoundCall(q, regions, call) for call in kernel_calls(regions)]
    return calls[0].run if len(calls) == 1 else partial(_run_all, calls)


def _run_all(
    calls: Sequence[BoundCall],
    q: Tensor,
    regions: Sequence[Region],
    scale: float,
    *,
    softcap: float | None = None,
    products: bool = False,
    sink_logits: Tensor | None = None,
) -> AttentionState:
    """Attend as `reference.attend_regions` does, by several runs of kernels."""
    first, *others = calls
    states = [first.run(q, regions, scale, softcap=softcap, sink_logits=sink_logits)]
    return merge([*states, *(call.run(q, regions, scale, softcap=softcap) for call in others)])


class BoundCall:
    """A kernel, its workspace and the packed arguments of a layer's keys and values.

    Bound to the heads, queries, dtype, device, encodings and kinds of regions of the arguments it
    is made from; batch, tokens and options may differ at every step.
    """

    def __init__(self, q: Tensor, regions: Sequence[Region], call: KernelCall) -> None:
        self.main, self.lead, self.spans = call
        self.indices = call.indices
        self.single_region = self.lead is None and self.spans is None
        main = regions[self.main]
        where = main.where
        self.slots, self.pages = isinstance(where, Slots), isinstance(where, Paged)
        _, hq, t, d = q.shape
        self.kv_heads = main.keys.exact.shape[1]
        self.heads = where.slots.shape[1] if isinstance(where, Slots) else self.kv_heads
        self.rows = hq // self.heads * t
        dense_layout = DECODE if self.spans is None else SPANS
        self.layout = GATHERED if self.slots else PAGED if self.pages else dense_layout
        rope, key_encoding = rope_of(main.keys)
        self.kernel, self.tile = coverage.kernel(
            d, self.kv_heads, self.rows, main.keys.exact.dtype, rope, self.slots, key_encoding,
            main.values.encoding,
            page=where.table.page if isinstance(where, Paged) else 0,
            lead=self.lead is not None and not self.slots,
            spans=self.spans is not None,
        )  # fmt: skip
        self.keys, self.values = SidePacker(), SidePacker()
        self.span_keys, self.span_values = SidePacker(), SidePacker()
        transformed = [
            x is not None and x.own_space for x in (main.keys.encoding, main.values.encoding)
        ]
        self.own_queries, self.sets = transformed[0], 1 + transformed[1]
        self.states = q.new_empty(0)

    def run(
        self,
        q: Tensor,
        regions: Sequence[Region],
        scale: float,
        *,
        softcap: float | None = None,
        products: bool = False,
        sink_logits: Tensor | None = None,
    ) -> AttentionState:
        """Attend q to the regions of this call, as `reference.attend_regions` does to all."""
        keys, values, where, visible, bias, step_tokens = regions[self.main]
        b, hq, t, d = q.shape
        queries = q.float().contiguous()
        out, lse = torch.empty_like(queries), queries.new_empty(b, hq, t)
        longest = n = keys.tokens
        arguments: dict[str, Any] = _NO_LEAD
        keepalive: tuple[Any, ...] = ()
        if where is not None or not self.single_region:
            n, longest, arguments, keepalive = self._region_arguments(regions)
        if not longest or not b:
            state = AttentionState(out.zero_(), lse.fill_(-torch.inf))
            return state if sink_logits is None else with_sinks(state, sink_logits)
        packed_queries, query_rotation = queries, 0
        if self.own_queries:
            layer_encoding = self._layer_encoding(regions, 0)
            if layer_encoding is not None:
                packed_queries, query_rotation = _packed_queries(queries, layer_encoding)
        sums, value_rotation, layer_encoding = out, 0, None
        if self.sets == 2:
            layer_encoding = self._layer_encoding(regions, 1)
            sums, value_rotation = self._sums(queries, layer_encoding)
        masks, masks_keepalive = _NO_MASKS
        if visible is not None or bias is not None or not self.single_region:
            masks, masks_keepalive = self._masks(queries, regions)
        rope, rope_keepalive = _NO_ROPE
        if keys.packed is not None and keys.packed.rope is not None:
            consecutive = n if self.pages else keys.packed.hi
            rope, rope_keepalive = positions(keys.packed, keys.packed.rope, d, consecutive)
        logits, width = None, -(-n // 16) * 16
        if products and where is None and self.single_region:
            logits = queries.new_empty(b, hq, t, width)
        threads, splits = self._tasks(queries, longest)
        packed = self.layout.pack(
            batch=b, heads=self.heads, rows=self.rows, queries=t, tokens=n, causal=step_tokens > 1,
            splits=splits, scale=scale, softcap=softcap or 0.0,
            q=queries.data_ptr(), q_packed=packed_queries.data_ptr(),
            query_rotation=query_rotation, out=sums.data_ptr(), value_rotation=value_rotation,
            rotated_out=out.data_ptr(), lse=lse.data_ptr(),
            sink_logits=0 if sink_logits is None else sink_logits.data_ptr(),
            states=self.states.data_ptr(),
            keys=self.keys.pack(keys), values=self.values.pack(values),
            logits=0 if logits is None else logits.data_ptr(), logits_row=4 * width,
            **masks, **rope, **arguments,
        )  # fmt: skip
        self.kernel.run(packed, b * self.heads, threads)
        # Until here, the kernel reads these by address.
        del keepalive, masks_keepalive, rope_keepalive
        if self.sets == 2 and not value_rotation:
            out = _merged(sums, layer_encoding).reshape(q.shape)
        return AttentionState(out, lse, logits)

    def _region_arguments(
        self, regions: Sequence[Region]
    ) -> tuple[int, int, dict[str, Any], tuple[Any, ...]]:
        """Return what regions beside dense tokens add to the arguments.

        Returns the tokens of the main region, those that are read in all, arguments, and what must
        outlive the run.
        """
        main = regions[self.main]
        where, n, first = main.where, main.keys.tokens, 0
        arguments, keepalive = dict(_NO_LEAD), []
        if self.lead is not None:
            lead = regions[self.lead]
            k, v = contiguous_rows(lead.keys.tail), contiguous_rows(lead.values.tail)
            first = k.shape[2]
            arguments = {
                "lead_tokens": first, "lead_keys": strides(k, 3), "lead_values": strides(v, 3),
            }  # fmt: skip
            keepalive += [k, v]
        longest = first + n
        if isinstance(where, Slots):
            slots = contiguous_rows(where.slots)
            longest = n = first + slots.shape[2] + n - where.begin
            arguments |= {
                "share": self.heads // self.kv_heads, "slots_count": slots.shape[2],
                "begin": where.begin, "slots": strides(slots, 2),
            }  # fmt: skip
            keepalive.append(slots)
        elif isinstance(where, Paged):
            longest = n = where.table.longest
            page_arguments, tensors = _pages(where, main.keys.tail.dtype)
            arguments |= page_arguments
            keepalive += tensors
        if self.spans is not None:
            spans = regions[self.spans]
            assert isinstance(spans.where, Spans)
            bounds = spans.where.bounds.contiguous()
            longest += spans.where.longest
            arguments |= {
                "spans": bounds.data_ptr(), "span_keys": self.span_keys.pack(spans.keys),
                "span_values": self.span_values.pack(spans.values),
            }  # fmt: skip
            keepalive.append(bounds)
        return n, longest, arguments, tuple(keepalive)

    def _layer_encoding(self, regions: Sequence[Region], side: int) -> LayerEncoding | None:
        """Return the encoding of packed keys (0) or values (1); None if none is packed."""
        for i in (self.main, self.spans):
            if i is not None:
                view = regions[i].values if side else regions[i].keys
                if view.packed is not None:
                    layer_encoding: LayerEncoding = view.packed.layer_encoding
                    return layer_encoding
        return None

    def _tasks(self, queries: Tensor, n: int) -> tuple[int, int]:
        """Return the threads and the tasks per head for n tokens; make room for their states."""
        b, _, _, d = queries.shape
        elements = 2 * b * self.kv_heads * n * d
        threads = min(torch.get_num_threads(), 1 + elements // _NUMBERS_PER_THREAD)
        heads, splits = b * self.heads, 1
        if threads > 1:
            splits = min(-(-n // self.tile), -(-4 * threads // heads))
        room = heads * splits * self.rows * (self.sets * d + 32)
        if self.states.numel() < room:
            self.states = queries.new_empty(room)
        return threads, splits

    def _sums(self, queries: Tensor, layer_encoding: LayerEncoding | None) -> tuple[Tensor, int]:
        """Return room for the sums of exact and of packed values, and the latter's rotation."""
        b, _hq, _t, d = queries.shape
        shared = self.heads // self.kv_heads
        sums = queries.new_empty(b, self.kv_heads, shared, self.sets, self.rows, d)
        group = 0 if layer_encoding is None else layer_encoding.rotation_size
        return sums, rotation(group, d, back=True).data_ptr() if group else 0

    def _masks(self, queries: Tensor, regions: Sequence[Region]) -> KeptArguments:
        """Return the arguments of the mask and of the bias of all regions."""
        read = [regions[i] for i in self.indices]
        if all(x.visible is None and x.bias is None for x in read):
            return _NO_MASKS
        b, hq, _t, _d = queries.shape
        visible = bias = None
        if any(x.visible is not None for x in read):
            parts = [_visible(x, b, self.heads, queries.device) for x in read]
            visible = padded(parts[0] if len(parts) == 1 else _with_room(parts))
        biases = [x.bias.float().expand(b, hq, -1) for x in read if x.bias is not None]
        if biases:
            assert len(biases) == len(read)
            bias = padded(biases[0] if len(biases) == 1 else _with_room(biases))
        return {"visible": strides(visible, 2), "bias": strides(bias, 2)}, (visible, bias)


def _with_room(parts: list[Tensor]) -> Tensor:
    """Join masks [b, heads, tokens]; kernels read whole vectors from any token on."""
    return F.pad(torch.cat(parts, dim=2), (0, 15))


def _visible(region: Region, b: int, heads: int, device: torch.device) -> Tensor:
    """Return the mask of a region, bool [b, 1 or heads, tokens read]."""
    mask, where = region.visible, region.where
    if mask is None:
        n = where.longest if isinstance(where, Spans) else int(region.tokens)
        return torch.ones(b, heads, n, dtype=torch.bool, device=device)
    if mask.shape[1] not in (1, heads):  # of key/value heads that share a choice
        mask = mask.repeat_interleave(heads // mask.shape[1], dim=1)
    return mask.expand(b, heads, -1)


def _pages(where: Paged, dtype: torch.dtype) -> tuple[dict[str, Any], tuple[Any, ...]]:
    """Return the arguments of pages, and the tensors that must outlive the run."""
    blocks, packed_tokens, lengths, tails = where.table.contiguous
    exact = [
        (None, None) if pair is None else tuple(contiguous_rows(x.to(dtype)) for x in pair)
        for pair in (where.sinks, where.new)
    ]
    (sink_keys, sink_values), (new_keys, new_values) = exact
    arguments = {
        "table": blocks.data_ptr(), "table_row": 8 * blocks.shape[1],
        "packed_tokens": packed_tokens.data_ptr(), "lengths": lengths.data_ptr(),
        "tails": tails.data_ptr(),
        "sinks": 0 if sink_keys is None else sink_keys.shape[2],
        "sink_keys": strides(sink_keys, 3), "sink_values": strides(sink_values, 3),
        "new_keys": strides(new_keys, 2), "new_values": strides(new_values, 2),
    }  # fmt: skip
    return arguments, (*exact, where.table)


def _packed_queries(queries: Tensor, layer_encoding: LayerEncoding) -> tuple[Tensor, int]:
    """Return queries in the space of packed keys, or the rotation that the kernel applies."""
    if layer_encoding.rotation_size:
        return queries, rotation(layer_encoding.rotation_size, queries.shape[3]).data_ptr()
    divisor = layer_encoding.divisor
    return queries if divisor is None else multiplied(queries, divisor), 0


def _merged(sums: Tensor, layer_encoding: LayerEncoding | None) -> Tensor:
    """Add the sums of packed values, times their divisor, to those of exact values."""
    exact, packed_sums = sums.unbind(-3)
    if layer_encoding is None:
        return exact
    assert layer_encoding.divisor is not None
    return torch.addcmul(exact, packed_sums, layer_encoding.divisor[:, None, None])
