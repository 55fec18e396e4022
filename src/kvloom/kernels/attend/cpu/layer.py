"""Attention of one layer by a compiled kernel: what is kept between its steps, and a step's call.

`decode` and `gathered` decide which tokens a step reads. Importing this does not import Numba;
making a `KernelAttention` does.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...arguments import Arguments, address, padded, strides
from ..kv_view import KVView
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


class KernelAttention:
    """A kernel, its workspace and the packed arguments of a layer's keys and values.

    Bound to the heads, queries, dtype, device and formats of the arguments it is made from; batch,
    tokens and options may differ at every step. heads: how many see the same tokens each. layout:
    the arguments of the kernel, which name it. page: tokens of a page, for `PAGED`.
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
            values.fmt, page=page, ragged=layout is RAGGED,
        )  # fmt: skip
        self.layout = layout
        self.keys, self.values = SidePacker(keys.fmt), SidePacker(values.fmt)
        self.own_queries = keys.packed is not None and coverage.own_space(keys.fmt)
        self.sets = 1 + (values.fmt is not None and coverage.own_space(values.fmt))
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
        h, hk, rows, sets, packed = self.heads, self.kv_heads, self.rows, self.sets, keys.packed
        queries = q.float().contiguous()
        out, lse = torch.empty_like(queries), queries.new_empty(b, hq, t)
        if not n or not b:
            return State(out.zero_(), lse.fill_(-torch.inf))
        threads = min(torch.get_num_threads(), 1 + 2 * b * hk * n * d // _NUMBERS_PER_THREAD)
        splits = 1 if threads == 1 else min(-(-n // self.tile), -(-4 * threads // (b * h)))
        packed_queries, query_rotation = queries, None
        if packed is not None and self.own_queries:
            how = packed.channelwise
            if how.rotated:
                query_rotation = rotation(how.rotated, d)
            elif how.divisor is not None:
                packed_queries = multiplied(queries, how.divisor)
        sums, value_rotation = out, None
        if sets == 2:
            sums = queries.new_empty(b, hk, h // hk, sets, rows, d)
            if values.packed is not None and values.packed.channelwise.rotated:
                value_rotation = rotation(values.packed.channelwise.rotated, d, back=True)
        room = b * h * splits * rows * (sets * d + 32)
        if self.states.numel() < room:
            self.states = queries.new_empty(room)
        if visible is not None:
            visible = padded(visible).expand(b, h, -1)
        if bias is not None:
            bias = padded(bias.float()).expand(b, hq, -1)
        logits, width = None, -(-n // 16) * 16
        if products:
            logits = queries.new_empty(b, hq, t, width)
        near, far, per_token = 0, 0, 0
        at: tuple[int, ...] = ABSENT
        if packed is not None and packed.rope is not None:
            (near, far, at, per_token), _alive = positions(
                packed, packed.rope, d, n if self.layout is PAGED else packed.hi
            )
        job = self.layout.pack(
            batch=b, heads=h, rows=rows, queries=t, tokens=n, splits=splits, scale=scale,
            causal=causal, softcap=softcap or 0.0, q=queries.data_ptr(),
            q_packed=packed_queries.data_ptr(),
            query_rotation=address(query_rotation), out=sums.data_ptr(),
            value_rotation=address(value_rotation), rotated_out=out.data_ptr(),
            lse=lse.data_ptr(), states=self.states.data_ptr(),
            bias=ABSENT if bias is None else strides(bias, 2),
            visible=ABSENT if visible is None else strides(visible, 2),
            keys=self.keys.pack(keys), near=near, far=far, positions=at,
            position_per_token=per_token, values=self.values.pack(values),
            logits=0 if logits is None else logits.data_ptr(), logits_row=4 * width, **numbers,
        )  # fmt: skip
        self.kernel.run(job, b * h, threads)
        if sets == 1 or value_rotation is not None:
            return State(out, lse, logits)
        exact, packed_sums = sums.unbind(-3)
        if values.packed is None:
            return State(exact.reshape(b, hq, t, d), lse, logits)
        divisor = values.packed.channelwise.divisor
        assert divisor is not None
        found = torch.addcmul(exact, packed_sums, divisor[:, None])
        return State(found.view(b, hq, t, d), lse, logits)
