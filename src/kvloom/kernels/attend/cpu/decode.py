"""Decode attention on CPU tensors: which cases the compiled kernels cover, and their call.

A step of few queries attends to a packed prefix and an exact tail in one pass; `decode_kernel` does
it, `coverage` names the formats. Importing this does not import Numba; the first call does.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...arguments import padded, strides
from ..kv_view import KVView
from ..reference import State
from . import coverage
from .arguments import (
    ABSENT,
    DECODE,
    NUMBERS_PER_THREAD,
    SidePacker,
    contiguous_positions,
    from_packed_space,
    rope_of,
    to_packed_space,
)

MAX_QUERIES = 8  # per step: with more, reading keys no longer dominates


def problems(tokens: int, like: Tensor, keys: Any = None, values: Any = None) -> list[str]:
    """Return why no kernel attends so many queries a step to tokens in these formats.

    like: exact keys [B, Hk, N, D]. keys, values: formats of packed tokens, or None.
    """
    _, heads, _, d = like.shape
    found = list(coverage.problems(d, heads, like.dtype, keys, values))
    if not like.is_cpu:
        found.append(f"the tensors are on {like.device.type}")
    if tokens > MAX_QUERIES:
        found.append(f"more than {MAX_QUERIES} queries a step")
    return found


def load(q: Tensor, keys: KVView, values: KVView) -> None:
    """Compile the kernel for a case."""
    hk = keys.tail.shape[1]
    _kernel(q.shape[3], hk, q.shape[1] // hk * q.shape[2], keys, values)


def _kernel(d: int, hk: int, rows: int, keys: KVView, values: KVView) -> tuple[Any, int]:
    """Return the kernel for a case and the tokens of its tiles."""
    rope, key_format = rope_of(keys)
    return coverage.kernel(d, hk, rows, keys.tail.dtype, rope, key_format, values.fmt)


class Decode:
    """Decode attention of one layer: keeps what does not change between its steps.

    Bound to the heads, queries, dtype, device and formats of the arguments it is made from; batch,
    tokens and options may differ at every step.
    """

    def __init__(self, q: Tensor, keys: KVView, values: KVView) -> None:
        _, hq, t, d = q.shape
        self.kv_heads = keys.tail.shape[1]
        self.rows = hq // self.kv_heads * t
        self.kernel, self.tile = _kernel(d, self.kv_heads, self.rows, keys, values)
        self.keys, self.values = SidePacker(keys.fmt), SidePacker(values.fmt)
        self.own_queries = keys.packed is not None and coverage.own_space(keys.fmt)
        self.sets = 1 + (values.fmt is not None and coverage.own_space(values.fmt))
        self.states = q.new_empty(0)

    def __call__(
        self,
        q: Tensor,
        keys: KVView,
        values: KVView,
        scale: float,
        *,
        causal: bool = False,
        valid: Tensor | None = None,
        softcap: float | None = None,
        bias: Tensor | None = None,
        products: list[Tensor] | None = None,
    ) -> State:
        """Attend as `attend` does."""
        b, hq, t, d = q.shape
        packed, n = keys.packed, keys.tail.shape[2]
        if packed is not None:
            n += packed.hi
        hk, rows, sets = self.kv_heads, self.rows, self.sets
        queries = q.float().contiguous()
        lse = queries.new_empty((b, hq, t))
        if not n or not b:
            return State(torch.zeros_like(queries), lse.fill_(-torch.inf))
        threads = min(torch.get_num_threads(), 1 + 2 * b * hk * n * d // NUMBERS_PER_THREAD)
        splits = 1 if threads == 1 else min(-(-n // self.tile), -(-4 * threads // (b * hk)))
        packed_queries = queries
        if packed is not None and self.own_queries:
            packed_queries = to_packed_space(queries, packed.channelwise)
        if sets == 1:
            out = torch.empty_like(queries)
        else:
            out = queries.new_empty((b, hk, 1, sets, rows, d))
        room = b * hk * splits * rows * (sets * d + 32)
        if self.states.numel() < room:
            self.states = queries.new_empty(room)
        if valid is not None:
            valid = padded(valid).expand(b, hk, -1)
        if bias is not None:
            bias = padded(bias.float()).expand(b, hq, -1)
        logits, width = None, -(-n // 16) * 16
        if products is not None:
            logits = queries.new_empty((b, hq, t, width))
            products.append(logits)
        near = far = position = 0
        if packed is not None and packed.rope is not None:
            (near, far, position), _alive = contiguous_positions(packed, packed.rope, b, d)
        numbers = DECODE.pack(
            batch=b, kv_heads=hk, rows=rows, queries=t, tokens=n, causal=causal, splits=splits,
            scale=scale, softcap=softcap or 0.0, q=queries.data_ptr(),
            q_packed=packed_queries.data_ptr(), out=out.data_ptr(), lse=lse.data_ptr(),
            states=self.states.data_ptr(), bias=ABSENT if bias is None else strides(bias, 2),
            valid=ABSENT if valid is None else strides(valid, 2),
            keys=self.keys.pack(packed, keys.tail), near=near, far=far, position=position,
            values=self.values.pack(values.packed, values.tail),
            logits=0 if logits is None else logits.data_ptr(), logits_row=4 * width,
        )  # fmt: skip
        self.kernel.run(numbers, b * hk, threads)
        if sets == 1:
            return State(out, lse)
        if values.packed is None:
            return State(out[:, :, 0, 0].reshape(b, hq, t, d), lse)
        return State(from_packed_space(out, values.packed.channelwise).view(b, hq, t, d), lse)


def attend(q: Tensor, keys: KVView, values: KVView, scale: float, **options: Any) -> State:
    """Attend q [B, Hq, T, D] as `reference.attend` does to the N tokens of two views.

    Packed tokens are not rounded to the dtype of the exact ones. options, as in
    `reference.attend_views`: products, a list, gets scale * q @ k, fp32 [B, Hq, T, N padded to
    whole vectors of 16].
    """
    return Decode(q, keys, values)(q, keys, values, scale, **options)
