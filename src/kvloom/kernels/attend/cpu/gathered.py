"""Decode attention to chosen tokens on CPU tensors: which cases the kernels cover, and their call.

Tokens are read where they are stored, dense or packed; nothing is gathered into memory first.
`gathered_kernel` does it, `coverage` names the formats. Importing this does not import Numba.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from ... import dispatch
from ...arguments import padded, strides
from ..kv_view import KVView, PackedPrefix
from ..reference import First, State
from . import coverage
from .arguments import (
    GATHERED,
    NUMBERS_PER_THREAD,
    SidePacker,
    from_packed_space,
    rope_of,
    to_packed_space,
)
from .rope_tables import tables


def problems(tokens: int, like: Tensor, keys: Any = None, values: Any = None) -> list[str]:
    """Return why no kernel reads chosen tokens of these formats for so many queries a step.

    like: exact keys [B, Hk, N, D]. keys, values: formats of packed tokens, or None.
    """
    found = list(coverage.problems(like.shape[-1], like.shape[1], like.dtype, keys, values))
    if like.device.type != "cpu":
        found.append(f"the tensors are on {like.device.type}")
    if tokens != 1:
        found.append(f"{tokens} queries a step are not one")
    return found


def load(q: Tensor, keys: KVView, values: KVView, slots: Tensor) -> None:
    """Compile the kernel for a case."""
    hk, d = keys.tail.shape[1], keys.tail.shape[3]
    _kernel(d, hk, q.shape[1] // slots.shape[1], keys, values)


def _kernel(d: int, hk: int, rows: int, keys: KVView, values: KVView) -> tuple[Any, int]:
    """Return the kernel for a case and the tokens of its tiles."""
    rope, key_format = rope_of(keys)
    return _compiled(d, hk, rows, keys.tail.dtype, rope, key_format, values.fmt)


class Gathered:
    """Attention of one layer to chosen tokens: keeps what does not change between its steps.

    Bound as `decode.Decode` is, and to the heads that choose.
    """

    def __init__(self, q: Tensor, keys: KVView, values: KVView, slots: Tensor) -> None:
        self.kv_heads, d = keys.tail.shape[1], keys.tail.shape[3]
        self.heads = slots.shape[1]
        self.rows = q.shape[1] // self.heads
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
        slots: Tensor,
        begin: int,
        scale: float,
        *,
        first: First | None = None,
        valid: Tensor | None = None,
        softcap: float | None = None,
        bias: Tensor | None = None,
    ) -> State:
        """Attend as `attend` does."""
        b, hq, _, d = q.shape
        m, h, hk, rows, sets = slots.shape[2], self.heads, self.kv_heads, self.rows, self.sets
        s = 0 if first is None else first[0].shape[2]
        n = s + m + keys.tokens - begin
        queries = q.float().contiguous()
        lse = queries.new_empty((b, hq, 1))
        if not n or not b:
            return State(torch.zeros_like(queries), lse.fill_(-torch.inf))
        threads = min(torch.get_num_threads(), 1 + 2 * b * hk * n * d // NUMBERS_PER_THREAD)
        splits = 1 if threads == 1 else min(-(-n // self.tile), -(-4 * threads // (b * h)))
        packed_queries = queries
        if keys.packed is not None and self.own_queries:
            packed_queries = to_packed_space(queries, keys.packed.channelwise)
        if sets == 1:
            out = torch.empty_like(queries)
        else:
            out = queries.new_empty((b, hk, h // hk, sets, rows, d))
        room = b * h * splits * rows * (sets * d + 32)
        if self.states.numel() < room:
            self.states = queries.new_empty(room)
        if valid is not None:
            valid = padded(valid).expand(b, h, -1)
        if bias is not None:
            bias = padded(bias.float()).expand(b, hq, -1)
        slots = slots if slots.stride(2) == 1 else slots.contiguous()
        lead: list[Any] = [x if x.stride(3) == 1 else x.contiguous() for x in first or ()]
        lead = lead or [None, None]
        (near, far, positions, per_token), tensors = _positions(keys.packed, d)
        numbers = GATHERED.pack(
            batch=b, heads=h, rows=rows, share=h // hk, first_tokens=s, slots_count=m, begin=begin,
            tokens=n, splits=splits, scale=scale, softcap=softcap or 0.0, q=queries.data_ptr(),
            q_packed=packed_queries.data_ptr(), out=out.data_ptr(), lse=lse.data_ptr(),
            states=self.states.data_ptr(), bias=strides(bias, 2), valid=strides(valid, 2),
            slots=strides(slots, 2), first_keys=strides(lead[0], 3),
            first_values=strides(lead[1], 3), keys=self.keys.pack(keys.packed, keys.tail),
            near=near, far=far, positions=positions, position_per_token=per_token,
            values=self.values.pack(values.packed, values.tail),
        )  # fmt: skip
        self.kernel.run(numbers, b * h, threads)
        del tensors  # they had to outlive the run
        if sets == 1:
            return State(out, lse)
        if values.packed is None:
            return State(out[..., 0, :, :].reshape(b, hq, 1, d), lse)
        return State(from_packed_space(out, values.packed.channelwise).view(b, hq, 1, d), lse)


def attend(
    q: Tensor,
    keys: KVView,
    values: KVView,
    slots: Tensor,
    begin: int,
    scale: float,
    **options: Any,
) -> State:
    """Attend as `reference.attend_gathered` does, with its options, without gathering.

    Packed tokens are not rounded to the dtype of the exact ones.
    """
    return Gathered(q, keys, values, slots)(q, keys, values, slots, begin, scale, **options)


def _positions(
    packed: PackedPrefix | None, d: int
) -> tuple[tuple[int, int, tuple[int, ...], int], tuple[Tensor, ...]]:
    """Return addresses of rope tables, packed positions and whether each token has its own."""
    if packed is None or packed.rope is None:
        return (0, 0, (0, 0, 0), 0), ()
    assert packed.at is not None
    at, per_token = packed.at.contiguous(), packed.at.shape[2] > 1
    last = at if at.numel() == 1 else at.max()
    near, far = tables(packed.rope, d, int(last) + (1 if per_token else packed.hi))
    return (near.data_ptr(), far.data_ptr(), strides(at, 2), int(per_token)), (near, far, at)


@cache
def _compiled(
    d: int, heads: int, rows: int, dtype: torch.dtype, rope: tuple[int, bool], *formats: Any
) -> tuple[Any, int]:
    """Compile the kernel for a case, as `coverage.kernel` does."""
    with dispatch.loading():
        from . import gathered_kernel
    variant = gathered_kernel.Variant(
        d,
        min(4, 1 << (rows - 1).bit_length()),
        coverage.DTYPES[dtype],
        coverage.dequant_spec(formats[0], d, heads, rope),
        coverage.dequant_spec(formats[1], d, heads),
        coverage.of_both(formats, coverage.number_format, 0),
        coverage.of_both(formats, lambda fmt: fmt.group if fmt.axis == "channel" else 1, 1),
        coverage.of_both(formats, coverage.own_space, False),
    )
    return gathered_kernel.kernel(variant), gathered_kernel.TILE
