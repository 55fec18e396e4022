"""The arguments of the attention kernels: addresses, strides and lookup tables.

Decides how keys and values are described to a kernel; the kernels decide what is computed. Strides
are in bytes. Importing this does not import Numba.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...arguments import MATRIX, TOKENS, Arguments, Block, address, strides
from ...quantize.rotated import levels, matrix
from ..kv_view import Channelwise, KVView, PackedPrefix
from .rope_tables import tables

NUMBERS_PER_THREAD = 1 << 15  # of keys and values

SIDE = Block(  # keys or values: a packed prefix and an exact tail
    codes=TOKENS,  # uint8 [B, Hk, rows, D]
    packed=int,  # tokens of the prefix
    scale=MATRIX,
    zero=MATRIX,
    meta_row=int,  # bytes of a row of scales
    tail=TOKENS,  # [B, Hk, N - packed, D]
    table=int,  # int32 [Hk, D], each channel's group; or fp32 [16], levels
    table_head=int,  # bytes of a head's table
    first_group=int,  # int64 [Hk], a head's first group among a token's scales
)

DECODE = Arguments(
    batch=int,
    kv_heads=int,
    rows=int,  # query rows per key/value head: group * queries
    queries=int,
    tokens=int,
    causal=int,
    splits=int,  # tasks per key/value head
    scale=float,
    softcap=float,  # 0: none
    q=int,  # fp32 [B, Hq, T, D]
    q_packed=int,  # the same in the space of packed keys
    out=int,  # result: fp32 [B, Hk, sets, rows, D]
    lse=int,  # result: fp32 [B, Hq, T]
    states=int,  # one state per task
    bias=MATRIX,  # fp32 [B, Hq, N padded], address 0: none
    valid=MATRIX,  # bool [B, Hk, N padded], address 0: none
    keys=SIDE,
    near=int,  # rope_tables, for keys packed before RoPE
    far=int,
    position=int,  # int64 [B], of each row's first token
    values=SIDE,
    logits=int,  # result: fp32 [B, Hq, T, N padded], scale * q @ k; 0: not wanted
    logits_row=int,
)

GATHERED = Arguments(
    batch=int,
    heads=int,  # heads that choose tokens
    rows=int,  # query rows per such head
    share=int,  # such heads per key/value head
    first_tokens=int,  # tokens of `first`
    slots_count=int,
    begin=int,  # all tokens from this one on are read, behind the chosen ones
    tokens=int,  # tokens read in all
    splits=int,
    scale=float,
    softcap=float,
    q=int,
    q_packed=int,
    out=int,
    lse=int,
    states=int,
    bias=MATRIX,
    valid=MATRIX,
    slots=MATRIX,  # int64 [B, heads, slots_count]
    first_keys=TOKENS,
    first_values=TOKENS,
    keys=SIDE,
    near=int,
    far=int,
    positions=MATRIX,  # int64 [B, Hk, packed], or of the first token
    position_per_token=int,  # 0: tokens follow the first one without gaps
    values=SIDE,
)


def side(view: KVView) -> tuple[tuple[int, ...], tuple[Tensor | None, ...]]:
    """Pack keys or values, and return the tensors that must outlive the call."""
    tail, packed = view.tail, view.packed
    if tail.stride(3) != 1:
        tail = tail.contiguous()
    if packed is None:
        return (*(0,) * 12, *strides(tail, 3), 0, 0, 0), (tail,)
    how, scale, zero = packed.channelwise, packed.scale, packed.zero
    table: Tensor | None = None
    first: Tensor | None = None
    table_head = 0
    if how.fixed is not None:
        scale, zero = how.multiplied
    elif how.rotated:
        table = _levels(view.fmt.bits)
    elif how.group_of is not None:
        by = how.by_layer if view.fmt.transform.span == "layer" else how.by_head
        table, first, table_head = *by, 4 * tail.shape[3]
    codes, scale, zero = _rowwise(packed.codes), _rowwise(scale), _rowwise(zero)
    row = 0 if how.fixed is not None else scale.shape[3] * scale.itemsize
    numbers = SIDE.pack(  # in order: keywords would take as long as all the rest
        strides(codes, 3), packed.hi, strides(scale, 2), strides(zero, 2), row, strides(tail, 3),
        address(table), table_head, address(first),
    )  # fmt: skip
    return numbers, (codes, scale, zero, tail, table, first)


def rope_of(keys: KVView) -> tuple[tuple[int, bool], Any]:
    """Return how a kernel rotates packed keys (channels, interleaved), and the format it reads.

    While nothing is packed, keys that will be packed before RoPE are exact keys.
    """
    if keys.packed is None:
        return (0, False), None if keys.fmt is not None and keys.fmt.pre_rope else keys.fmt
    rope = keys.packed.rope
    rotated = (0, False) if rope is None else (2 * rope.inv_freq.shape[0], rope.interleaved)
    return rotated, keys.fmt


def contiguous_positions(
    packed: PackedPrefix | None, b: int, d: int
) -> tuple[tuple[int, int, int], tuple[Tensor, ...]]:
    """Return addresses of rope tables and of each row's first position, and the tensors."""
    if packed is None or packed.rope is None:
        return (0, 0, 0), ()
    assert packed.at is not None
    assert packed.at.shape[1:] == (1, 1), "positions must not have gaps"
    first = packed.at if packed.at.numel() == 1 else packed.at.max()
    at = packed.at.expand(b, 1, 1).contiguous()
    near, far = tables(packed.rope, d, int(first) + packed.hi)
    return (near.data_ptr(), far.data_ptr(), at.data_ptr()), (near, far, at)


def to_packed_space(q: Tensor, how: Channelwise) -> Tensor:
    """Transform queries fp32 [B, Hq, T, D] as packed keys were, so that products are unchanged."""
    if how.rotated:
        return q @ _rotation(how.rotated, q.shape[3])
    assert how.divisor is not None
    by_head = q.view(q.shape[0], len(how.divisor), -1, q.shape[3])
    return (by_head * how.divisor).view(q.shape)


def from_packed_space(sums: Tensor, how: Channelwise) -> Tensor:
    """Add sums of exact values and of packed ones, transformed back: fp32 [B, Hk, R, rows, D].

    sums: [B, Hk, R, 2, rows, D], exact and packed.
    """
    exact, packed = sums.unbind(-3)
    if how.rotated:
        return exact + packed @ _rotation(how.rotated, sums.shape[-1]).T
    assert how.divisor is not None
    return torch.addcmul(exact, packed, how.divisor[:, None])


def _rowwise(x: Tensor) -> Tensor:
    """Return x [., ., rows, .] with contiguous rows."""
    if x.is_contiguous():
        return x
    _, _, row, one = x.stride()
    return x if one == 1 and row == x.shape[3] else x.contiguous()


@cache
def _rotation(group: int, d: int) -> Tensor:
    """M fp32 [d, d] with x M = R x for every group of x."""
    return torch.block_diag(*[matrix(group)] * (d // group))


@cache
def _levels(bits: float) -> Tensor:
    """The levels of a code, fp32 [16]."""
    found = levels(bits)
    return F.pad(found, (0, 16 - len(found)))
