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
    from_packed_space,
    rope_of,
    side,
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


def attend(
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
    """Attend as `reference.attend_gathered` does, without gathering.

    Packed tokens are not rounded to the dtype of the exact ones.
    """
    b, hq, _, d = q.shape
    h, m = slots.shape[1:]
    hk = keys.tail.shape[1]
    rows, s = hq // h, 0 if first is None else first[0].shape[2]
    n = s + m + keys.tokens - begin
    lse = q.new_empty(b, hq, 1, dtype=torch.float32)
    if not n or not b:
        out = q.new_zeros(b, hq, 1, d, dtype=torch.float32)
        return State(out, lse.fill_(-torch.inf))
    kernel, tile = _kernel(d, hk, rows, keys, values)
    threads = min(torch.get_num_threads(), 1 + 2 * b * hk * n * d // NUMBERS_PER_THREAD)
    splits = 1 if threads == 1 else min(-(-n // tile), -(-4 * threads // (b * h)))
    queries = q.float().contiguous()
    packed_queries = queries
    if keys.packed is not None and coverage.own_space(keys.fmt):
        packed_queries = to_packed_space(queries, keys.packed.channelwise)
    sets = 1 + (values.fmt is not None and coverage.own_space(values.fmt))
    out = q.new_empty(b, hk, h // hk, sets, rows, d, dtype=torch.float32)
    states = q.new_empty(b * h * splits * rows * (sets * d + 32), dtype=torch.float32)
    if valid is not None:
        valid = padded(valid).expand(b, h, -1)
    if bias is not None:
        bias = padded(bias.float()).expand(b, hq, -1)
    slots = slots if slots.stride(2) == 1 else slots.contiguous()
    lead: list[Any] = [x if x.stride(3) == 1 else x.contiguous() for x in first or ()]
    lead = lead or [None, None]
    (key_side, key_tensors), (value_side, value_tensors) = side(keys), side(values)
    (near, far, positions, per_token), rope_tensors = _positions(keys.packed, d)
    numbers = GATHERED.pack(
        batch=b, heads=h, rows=rows, share=h // hk, first_tokens=s, slots_count=m, begin=begin,
        tokens=n, splits=splits, scale=scale, softcap=softcap or 0.0, q=queries.data_ptr(),
        q_packed=packed_queries.data_ptr(), out=out.data_ptr(), lse=lse.data_ptr(),
        states=states.data_ptr(), bias=strides(bias, 2), valid=strides(valid, 2),
        slots=strides(slots, 2), first_keys=strides(lead[0], 3),
        first_values=strides(lead[1], 3), keys=key_side, near=near, far=far,
        positions=positions, position_per_token=per_token, values=value_side,
    )  # fmt: skip
    kernel.run(numbers, b * h, threads)
    del key_tensors, value_tensors, rope_tensors
    if sets == 1:
        return State(out.view(b, hq, 1, d), lse)
    if values.packed is None:
        return State(out[..., 0, :, :].reshape(b, hq, 1, d), lse)
    return State(from_packed_space(out, values.packed.channelwise).view(b, hq, 1, d), lse)


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
