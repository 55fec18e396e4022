"""Attention of one layer by a compiled kernel: what is kept between its steps, and a step's call.

`decode` and `gathered` decide which tokens a step reads. Importing this does not import Numba;
making a `KernelAttention` does.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...arguments import Arguments, padded, strides
from ..kv_view import KVView, PackedPrefix
from ..reference import State
from . import coverage
from .arguments import (
    ABSENT,
    GATHERED,
    PAGED,
    RAGGED,
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


class KernelAttention:
    """A kernel, its workspace and the packed arguments of a layer's keys and values.

    Bound to the heads, queries, dtype, device and formats of the arguments it is made from; batch,
    tokens and options may differ at every step. heads: the number of heads that have a token
    selection of their own (Hk, or those of `slots`). layout: the arguments of the kernel, which
    name it. page: tokens of a page, for `PAGED`.
    """

    def __init__(
        self,
        q: Tensor,
        keys: KVView,
        values: KVView,
        heads: int,
        layout: Arguments,
        page: int = 0,
    ) -> None:
        _, hq, t, d = q.shape
        self.heads, self.rows = heads, hq // heads * t
        self.kv_heads = heads if layout is RAGGED else keys.exact.shape[1]
        rope, key_format = rope_of(keys)
        self.kernel, self.tile = coverage.kernel(
            d, self.kv_heads, self.rows, keys.exact.dtype, rope, layout is GATHERED, key_format,
            values.encoding, page=page, ragged=layout is RAGGED,
        )  # fmt: skip
        self.layout = layout
        self.keys, self.values = SidePacker(), SidePacker()
        moved = [x is not None and coverage.own_space(x) for x in (keys.encoding, values.encoding)]
        self.own_queries = keys.packed is not None and moved[0]
        self.sets = 1 + moved[1]
        self.states = q.new_empty(0)

    def run(
        self,
        q: Tensor,
        keys: KVView,
        values: KVView,
        n: int,
        scale: float,
        *,
        causal: bool = False,
        visible: Tensor | None = None,
        softcap: float | None = None,
        bias: Tensor | None = None,
        products: bool = False,
        **numbers: Any,
    ) -> State:
        """Attend q [B, Hq, T, D] to n tokens, with the options of `reference.attend_views`.

        numbers: the arguments that only the caller knows.
        """
        b, hq, t, d = q.shape
        queries = q.float().contiguous()
        out, lse = torch.empty_like(queries), queries.new_empty(b, hq, t)
        if not n or not b:
            return State(out.zero_(), lse.fill_(-torch.inf))
        packed_queries, query_rotation = queries, 0
        if self.own_queries and keys.packed is not None:
            packed_queries, query_rotation = _packed_queries(queries, keys.packed)
        sums, value_rotation = out, 0
        if self.sets == 2:
            sums, value_rotation = self._sums(queries, values.packed)
        masks, _masks_alive = _NO_MASKS
        if visible is not None or bias is not None:
            masks, _masks_alive = self._masks(queries, visible, bias)
        rope, _rope_alive = _NO_ROPE
        if keys.packed is not None and keys.packed.rope is not None:
            consecutive = n if self.layout is PAGED else keys.packed.hi
            rope, _rope_alive = positions(keys.packed, keys.packed.rope, d, consecutive)
        logits, width = None, -(-n // 16) * 16
        if products:
            logits = queries.new_empty(b, hq, t, width)
        threads, splits = self._tasks(queries, n)
        job = self.layout.pack(
            batch=b, heads=self.heads, rows=self.rows, queries=t, tokens=n,
            causal=causal, splits=splits, scale=scale, softcap=softcap or 0.0,
            q=queries.data_ptr(), q_packed=packed_queries.data_ptr(),
            query_rotation=query_rotation, out=sums.data_ptr(), value_rotation=value_rotation,
            rotated_out=out.data_ptr(), lse=lse.data_ptr(), states=self.states.data_ptr(),
            keys=self.keys.pack(keys), values=self.values.pack(values),
            logits=0 if logits is None else logits.data_ptr(), logits_row=4 * width,
            **masks, **rope, **numbers,
        )  # fmt: skip
        self.kernel.run(job, b * self.heads, threads)
        if self.sets == 2 and not value_rotation:
            out = _merged(sums, values.packed).reshape(q.shape)
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

    def _sums(self, queries: Tensor, packed: PackedPrefix | None) -> tuple[Tensor, int]:
        """Return room for the sums of exact and of packed values, and the latter's rotation."""
        b, _hq, _t, d = queries.shape
        shared = self.heads // self.kv_heads
        sums = queries.new_empty(b, self.kv_heads, shared, self.sets, self.rows, d)
        group = 0 if packed is None else packed.layer.rotated
        return sums, rotation(group, d, back=True).data_ptr() if group else 0

    def _masks(self, queries: Tensor, visible: Tensor | None, bias: Tensor | None) -> KeptArguments:
        """Return the arguments of the mask and of the bias."""
        b, hq, _t, _d = queries.shape
        if visible is not None:
            visible = padded(visible).expand(b, self.heads, -1)
        if bias is not None:
            bias = padded(bias.float()).expand(b, hq, -1)
        return {"visible": strides(visible, 2), "bias": strides(bias, 2)}, (visible, bias)


def _packed_queries(queries: Tensor, packed: PackedPrefix) -> tuple[Tensor, int]:
    """Return queries in the space of packed keys, or the rotation that the kernel applies."""
    layer = packed.layer
    if layer.rotated:
        return queries, rotation(layer.rotated, queries.shape[3]).data_ptr()
    return queries if layer.divisor is None else multiplied(queries, layer.divisor), 0


def _merged(sums: Tensor, packed: PackedPrefix | None) -> Tensor:
    """Add the sums of packed values, times their divisor, to those of exact values."""
    exact, packed_sums = sums.unbind(-3)
    if packed is None:
        return exact
    divisor = packed.layer.divisor
    assert divisor is not None
    return torch.addcmul(exact, packed_sums, divisor[:, None, None])
