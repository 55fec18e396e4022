"""The arguments that the attention kernels share: addresses, strides and lookup tables.

Decides how keys and values are written into a kernel's arguments. The kernels decide what is
computed from them. Importing this does not import Numba.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...quantize.rotated import levels, matrix
from ..kv_view import Channelwise, Codes, Strand
from .rope_tables import tables

# Elements of keys and values that are worth a thread.
WORTH = 1 << 15


def into(q: Tensor, how: Channelwise) -> Tensor:
    """Queries fp32 [B, Hq, T, D] as they meet packed keys."""
    if how.rotated:
        return q @ _rotation(how.rotated, q.shape[3])
    assert how.divisor is not None
    by_head = q.view(q.shape[0], len(how.divisor), -1, q.shape[3])
    return (by_head * how.divisor).view(q.shape)


def whole(sums: Tensor, how: Channelwise) -> Tensor:
    """Sums fp32 [B, Hk, R, rows, D] of values, from those of exact and of packed ones.

    sums: [B, Hk, R, 2, rows, D], packed values as they are stored.
    """
    exact, packed = sums.unbind(-3)
    if how.rotated:
        return exact + packed @ _rotation(how.rotated, sums.shape[-1]).T
    assert how.divisor is not None
    return torch.addcmul(exact, packed, how.divisor[:, None])


@cache
def _rotation(group: int, d: int) -> Tensor:
    """M fp32 [d, d] with x M = R x for every group of x."""
    return torch.block_diag(*[matrix(group)] * (d // group))


def padded(x: Tensor) -> Tensor:
    """x [..., N] with room for whole vectors of 16 behind it."""
    more = -x.shape[-1] % 16
    return F.pad(x, (0, more)) if more else x.contiguous()


def turning(keys: Strand) -> tuple[tuple[int, bool], Any]:
    """What a kernel turns of packed keys, as `forms.kernel` takes it, and the format it reads.

    As long as nothing is packed, keys that will be packed before RoPE are exact ones.
    """
    if keys.packed is None:
        return (0, False), None if keys.fmt is not None and keys.fmt.pre_rope else keys.fmt
    rope = keys.packed.rope
    turned = (0, False) if rope is None else (2 * rope.inv_freq.shape[0], rope.interleaved)
    return turned, keys.fmt


def side(strand: Strand) -> tuple[tuple[int, ...], tuple[Tensor | None, ...]]:
    """Where a strand lies, as a job says it, and the tensors that must live meanwhile."""
    tail, packed = strand.tail, strand.packed
    if tail.stride(3) != 1:
        tail = tail.contiguous()
    if packed is None:
        return (*(0,) * 12, *place(tail, 3), 0, 0, 0), (tail,)
    how, scale, zero = packed.channelwise, packed.scale, packed.zero
    table: Tensor | None = None
    first: Tensor | None = None
    step = 0
    if how.fixed is not None:
        scale, zero = how.multiplied
    elif how.rotated:
        table = _levels(strand.fmt.bits)
    elif how.group_of is not None:
        by = how.by_layer if strand.fmt.transform.span == "layer" else how.by_head
        table, first, step = *by, 4 * tail.shape[3]
    codes, scale, zero = rowwise(packed.codes), rowwise(scale), rowwise(zero)
    row = 0 if how.fixed is not None else scale.shape[3] * scale.itemsize
    where = (
        *place(codes, 3), packed.hi, *place(scale, 2), *place(zero, 2), row, *place(tail, 3),
        0 if table is None else table.data_ptr(), step, 0 if first is None else first.data_ptr(),
    )  # fmt: skip
    return where, (codes, scale, zero, tail, table, first)


def rowwise(x: Tensor) -> Tensor:
    """x [., ., rows, .] with rows one behind the other."""
    if x.is_contiguous():
        return x
    _, _, row, one = x.stride()
    return x if one == 1 and row == x.shape[3] else x.contiguous()


@cache
def _levels(bits: float) -> Tensor:
    """The levels of a code, fp32 [16]."""
    found = levels(bits)
    return F.pad(found, (0, 16 - len(found)))


def turns(packed: Codes | None, b: int, d: int) -> tuple[tuple[int, ...], tuple[Tensor, ...]]:
    """Where the tables for keys packed before RoPE and each row's first position lie."""
    if packed is None or packed.rope is None:
        return (0, 0, 0), ()
    assert packed.at is not None
    assert packed.at.shape[1:] == (1, 1), "each token stands one behind the one before"
    first = packed.at if packed.at.numel() == 1 else packed.at.max()
    at = packed.at.expand(b, 1, 1).contiguous()
    held = (*tables(packed.rope, d, int(first) + packed.hi), at)
    return tuple(x.data_ptr() for x in held), held


def place(x: Tensor | None, dims: int) -> tuple[int, ...]:
    """A tensor's address and the bytes from one element to the next along its first `dims`.

    Where a batch or heads share one element, there is no next.
    """
    if x is None:
        return (0,) * (dims + 1)
    size, shape, steps = x.itemsize, x.shape, x.stride()
    batch = steps[0] * size if shape[0] > 1 else 0
    head = steps[1] * size if shape[1] > 1 else 0
    if dims == 2:
        return x.data_ptr(), batch, head
    return x.data_ptr(), batch, head, steps[2] * size
