"""A launch of Triton's decode kernels: arguments of keys and values, shapes of tiles, the merge.

Decides how views of stored tokens become kernel arguments. Which cases are covered, and over which
tokens a kernel goes, is decided by `decode` and `paged`. Importing this does not import Triton.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ... import triton_runtime as cuda
from ...arguments import contiguous_rows
from ...quantize.hadamard import levels, rotate
from ..reference import AttentionState
from ..regions import KVView
from .arguments import Form, Side


class SideArguments(NamedTuple):
    """The kernel arguments of keys or values."""

    side: Side
    form: Form
    packed_end: int
    rotation_size: int  # channels that are rotated together, or 0
    most: int  # tokens of a tile that registers hold


def side_arguments(view: KVView) -> SideArguments:
    """Return the kernel arguments of keys or values."""
    tail, packed = view.tail, view.packed
    tail = contiguous_rows(tail)
    codes = scale = zero = group_of = divisor = table = tail  # placeholders that are not read
    meta, form, rotation_size, packed_end = [0, 0, 0], Form(), 0, 0
    if packed is not None:
        layer_encoding, packed_end = packed.layer_encoding, packed.hi
        form, rotation_size = Form.of(layer_encoding), layer_encoding.rotation_size
        codes, scale, zero = (
            x if x.stride(3) == 1 or x.shape[3] == 1 else x.contiguous()
            for x in (packed.codes, packed.scale, packed.zero)
        )
        if form.rotation == 1:
            zero, table = scale, _levels(layer_encoding.encoding.bits, tail.device)
        elif layer_encoding.static is not None:
            scale, zero = layer_encoding.static
        elif layer_encoding.group_of is not None:
            group_of = layer_encoding.group_of
        if layer_encoding.divisor is not None:
            divisor = layer_encoding.divisor
        if scale.stride() != zero.stride():
            scale, zero = scale.contiguous(), zero.contiguous()
        if scale.dtype == torch.float8_e4m3fn:  # not all GPUs convert it; the kernel does
            scale, zero = scale.view(torch.uint8), zero.view(torch.uint8)
        meta = [scale.stride(i) if scale.shape[i] > 1 else 0 for i in range(3)]
    tensors = codes, scale, zero, group_of, divisor, table, tail
    side = Side(*tensors, *codes.stride()[:3], *meta, *tail.stride()[:3])
    # Groups by channel, levels, bytes by token are looked up one by one; e4m3 is read by hand.
    looked_up = form.bits == 15 or form.rotation == 1 or form.kind == 2
    slow = form.bits in (1, 3, 8)
    most = 16 if looked_up else 32 if slow or scale.dtype == torch.uint8 else 64
    return SideArguments(side, form, packed_end, rotation_size, most)


@cache
def kernels() -> Any:
    """Import the kernels, and with them Triton."""
    from . import decode_kernel

    return decode_kernel


class Launch(NamedTuple):
    """A call of a kernel that makes splits, and of the one that merges them."""

    grid: int
    arguments: dict[str, Any]
    constants: dict[str, Any]
    warps: int
    stages: int
    q: Tensor
    rotation_size: int  # of values: channels that are rotated together, or 0
    splits: int
    rotated_splits: int  # splits whose values are rotated


def run(call: Launch, split: Any) -> AttentionState:
    """Launch a kernel that makes splits, and the merge of these."""
    b, hq, t, d = call.q.shape
    rows, s = b * hq * t, call.splits
    new = torch.float32
    acc, ml = call.q.new_empty(rows, s, d, dtype=new), call.q.new_empty(rows, s, 2, dtype=new)
    out, lse = call.q.new_empty(b, hq, t, d, dtype=new), call.q.new_empty(b, hq, t, dtype=new)
    back = torch.empty_like(out) if call.rotation_size else out
    with cuda.on(call.q):
        split[(call.grid,)](
            **call.arguments, acc_ptr=acc, ml_ptr=ml, **call.constants,
            num_warps=call.warps, num_stages=call.stages,
        )  # fmt: skip
        kernels()._merge[(rows,)](
            acc, ml, out, back, lse, s, call.rotated_splits, D=d, DP=call.constants["DP"], BS=16,
            ROTATED=call.rotation_size > 0, num_warps=4,
        )  # fmt: skip
    if call.rotation_size:
        out = out + rotate_groups(back, call.rotation_size, back=True)
    return AttentionState(out, lse)


class Shape(NamedTuple):
    """Shapes of tiles: query rows, packed tokens, exact tokens; and warps a program."""

    rows: int
    tokens: int
    alone: int
    warps: int
    stages: int


def tile_shapes(d: int, rows: int, dtype: torch.dtype, most: int) -> Shape:
    """Return shapes of tiles that neither spill nor need more than 99 KiB of shared memory.

    most: tokens of a tile that its formats allow.
    """
    large = dtype == torch.float32 or d > 128
    tokens = min(most, 32) if large else most
    rows = min(16 if most < 32 else 32 if large else 64, cuda.padded_size(rows))
    return Shape(rows, tokens, min(tokens, 32), 8 if d > 64 and large else 4, 2)


@cache
def processors(device: torch.device) -> int:
    """Return the multiprocessors of a GPU; in the interpreter one."""
    if device.type == "meta":
        return 132
    if device.type != "cuda":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@cache
def _rotation(group: int, device: torch.device) -> Tensor:
    """The matrix whose product with a row is the row rotated, fp32 [group, group]."""
    return rotate(torch.eye(group)).to(device)


@cache
def _levels(bits: float, device: torch.device) -> Tensor:
    return levels(bits).to(device)


def rotate_groups(x: Tensor, group: int, back: bool = False) -> Tensor:
    """Return x [..., D] with groups of channels rotated, or rotated back, fp32."""
    matrix = _rotation(group, x.device)
    return (x.float().unflatten(-1, (-1, group)) @ (matrix.T if back else matrix)).flatten(-2)


def nothing(q: Tensor) -> AttentionState:
    """Return the state of attention of q [B, Hq, T, D] to no tokens."""
    out = torch.zeros_like(q, dtype=torch.float32)
    return AttentionState(out, out.new_full(q.shape[:3], -torch.inf))
