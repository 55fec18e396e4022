"""What a compiled attention kernel is told of the tensors it reads: addresses, steps, tables.

Decides how a strand is written into a job (see `kernels.team`), the same for all of these kernels;
what is done with it they say. Importing this does not import Numba.
"""

from __future__ import annotations

from functools import cache

import torch.nn.functional as F
from torch import Tensor

from ..quant.rotated import levels, matrix
from .strand import Channelwise, Codes, Strand
from .turns import tables

# Elements of keys and values that are worth a thread.
WORTH = 1 << 18


def into(q: Tensor, how: Channelwise) -> Tensor:
    """Queries [B, Hq, T, D] as they meet packed keys."""
    if how.rotated:
        return (q.unflatten(-1, (-1, how.rotated)) @ matrix(how.rotated)).flatten(-2).contiguous()
    assert how.divisor is not None
    by_head = q.unflatten(1, (len(how.divisor), -1)) * how.divisor[:, None]
    return by_head.flatten(1, 2).contiguous()


def out_of(sums: Tensor, how: Channelwise) -> Tensor:
    """Sums [B, Hk, rows, D] of packed values as sums of values."""
    if how.rotated:
        return (sums.unflatten(-1, (-1, how.rotated)) @ matrix(how.rotated).T).flatten(-2)
    assert how.divisor is not None
    return sums * how.divisor


def padded(x: Tensor) -> Tensor:
    """x [..., N] with room for whole vectors of 16 behind it."""
    more = -x.shape[-1] % 16
    return F.pad(x, (0, more)) if more else x.contiguous()


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
    row = 0 if how.fixed is not None else scale.shape[3] * scale.element_size()
    where = (
        *place(codes, 3), packed.hi, *place(scale, 2), *place(zero, 2), row, *place(tail, 3),
        0 if table is None else table.data_ptr(), step, 0 if first is None else first.data_ptr(),
    )  # fmt: skip
    return where, (codes, scale, zero, tail, table, first)


def rowwise(x: Tensor) -> Tensor:
    """x [., ., rows, .] with rows one behind the other."""
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
    at = packed.at[:, 0, 0].expand(b).contiguous()
    held = (*tables(packed.rope, d, int(at.max()) + packed.hi), at)
    return tuple(x.data_ptr() for x in held), held


def place(x: Tensor | None, dims: int) -> tuple[int, ...]:
    """A tensor's address and the bytes from one element to the next along its first `dims`.

    Where a batch or heads share one element, there is no next.
    """
    if x is None:
        return (0,) * (dims + 1)
    size, (rows, heads, *_), steps = x.element_size(), x.shape, x.stride()
    batch = steps[0] * size if rows > 1 else 0
    head = steps[1] * size if heads > 1 else 0
    if dims == 2:
        return x.data_ptr(), batch, head
    return x.data_ptr(), batch, head, steps[2] * size
