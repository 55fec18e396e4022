"""Packing and unpacking on CUDA tensors: which cases the Triton kernels cover, and their calls.

Results are those of the reference to the last bit. Importing this does not import Triton; the first
call does.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...encoding import PACK_BLOCK, LayerEncoding, top
from ...positions.rope import rotate_pairs
from .. import triton_runtime as cuda
from ..arguments import META_CODES
from ..limits import Coverage, dtype_problem, unread_fields
from .hadamard import ends, levels, parts
from .reference import PackedTensors, RopeAngles

_TILE = 2048  # numbers a program owns, about


def _other_rotations(layer_encoding: LayerEncoding, dtype: torch.dtype) -> str | None:
    size = getattr(layer_encoding, "rotation_size", 0)
    if not size or butterflies(size)["STAGES"]:
        return None
    return f"{size} rotated channels are not a power of 2"


COVERAGE = Coverage(
    ("every encoding", unread_fields),
    ("rotations of 2<sup>k</sup> channels", _other_rotations),
    ("tokens in fp32, fp16, bf16", lambda layer_encoding, dtype: dtype_problem(dtype)),
)


def pack(
    x: Tensor,
    layer_encoding: LayerEncoding,
    out: PackedTensors,
    begin: int,
    nonpadding: Tensor | None = None,
    rope: RopeAngles | None = None,
) -> None:
    """Write x [B, Hk, T, D] after `begin` packed tokens, into storage that has room.

    Arguments as in `cpu.pack.Packer`; torch rotates by `rope`.
    """
    if not x.numel():
        return
    x = x if rope is None else rotate_pairs(x.float(), *rope)
    if layer_encoding.encoding.rotation == "group":
        _pack_levels(x, layer_encoding, out, begin)
        return
    if layer_encoding.encoding.rotation == "head":
        x = rotated(x, x.shape[3], torch.float32)
    (_, h, n, d), encoding, module = x.shape, layer_encoding.encoding, kernels()
    bits, group, divided = encoding.bits, layer_encoding.group, layer_encoding.divisor is not None
    codes, scale, zero, steps, m_steps = _storage(out, layer_encoding)
    table = _table(layer_encoding, h, d, x.device)
    begun, channel = begin % PACK_BLOCK[bits][0] > 0, encoding.axis == "channel"
    form: dict[str, Any] = {"BITS_X2": int(2 * bits), "TOP": top(bits)}
    fused = layer_encoding.group_of is None and (not channel or group % PACK_BLOCK[bits][0] == 0)
    if layer_encoding.group_of is None:
        mask_steps, mask = (0, 0), codes
        if nonpadding is not None and channel:
            mask = nonpadding.contiguous().view(torch.uint8)
            mask_steps = mask.stride(0), mask.stride(1) if mask.shape[1] > 1 else 0
        # 1.5 bits per channel: groups and pack blocks end apart; here, metadata as if of 8 bit
        tokens = group if channel else 0
        tile, grid = _tile(x, bits if fused else 8, begin, tokens, whole=not channel)
        cuda.launch(
            module.pack, grid, x,
            x, mask, codes, scale, zero, begin, n, h, *x.stride(), *mask_steps, *steps, *m_steps,
            d, scale.shape[3], **form, META=META_CODES[encoding.meta], **tile,
            CHANNEL=channel, G=tile["DB"] if group == d else group,
            HAS_PADDING=nonpadding is not None and channel, BEGUN=begun, CODES=fused,
            contract=False,
        )  # fmt: skip
    elif layer_encoding.static is None:
        room = cuda.padded_size(d)
        tokens = max(1, _TILE // room)
        cuda.launch(
            module.ranges, (-(-n // tokens), x.shape[0], scale.shape[3]), x,
            x, table.columns, table.clip, table.divisor, scale, zero, begin, n, h, *x.stride(),
            m_steps[0], m_steps[2], d, TOP=top(bits), META=META_CODES[encoding.meta],
            TB=tokens, DB=room, DIVISOR=divided, contract=False,
        )  # fmt: skip
    if not fused:
        tile, grid = _tile(x, bits, begin)
        scale, zero, m_steps = _given(scale, zero, m_steps, table)
        cuda.launch(
            module.pack_given, grid, x,
            x, codes, scale, zero, table.columns, table.divisor, begin, n, h, *x.stride(),
            *steps, *m_steps, d, **form, **tile, PER=encoding.tokens_per_scale,
            BEGUN=begun, DIVISOR=divided, contract=False,
        )  # fmt: skip


def unpack(
    packed: PackedTensors,
    layer_encoding: LayerEncoding,
    lo: int,
    hi: int,
    dtype: torch.dtype,
    rope: RopeAngles | None = None,
) -> Tensor:
    """Return tokens lo..hi of what `pack` wrote, [B, Hk, hi - lo, D]; torch rotates by `rope`."""
    if rope is not None:
        x = unpack(packed, layer_encoding, lo, hi, torch.float32)
        return rotate_pairs(x, *rope).to(dtype)
    size = layer_encoding.rotation_size
    if size:
        x = _unpack(packed, layer_encoding, lo, hi, torch.float32)
        return rotated(x, size, dtype, back=True)
    return _unpack(packed, layer_encoding, lo, hi, dtype)


def _unpack(
    packed: PackedTensors, layer_encoding: LayerEncoding, lo: int, hi: int, dtype: torch.dtype
) -> Tensor:
    """Unpack as `unpack` does, without rotating channels back."""
    if layer_encoding.encoding.rotation == "group":  # no zeros
        packed = packed._replace(zero=packed.scale)
    b, h, _, d = packed.codes.shape
    out = packed.codes.new_empty(b, h, hi - lo, d, dtype=dtype)
    if not out.numel():
        return out
    codes, scale, zero, steps, m_steps = _storage(
        PackedTensors(
            *(x if x.stride(3) == 1 or not x.numel() else x.contiguous() for x in packed)
        ),
        layer_encoding,
    )
    table = _table(layer_encoding, h, d, out.device)
    scale, zero, m_steps = _given(scale, zero, m_steps, table)
    encoding, by_levels = layer_encoding.encoding, layer_encoding.encoding.rotation == "group"
    tile, grid = _tile(out, encoding.bits, lo)
    codebook = rounding(encoding.bits, out.device)[0] if by_levels else scale
    cuda.launch(
        kernels().unpack, grid, out,
        codes, scale, zero, codebook, table.columns, table.divisor, out, lo, hi, h, *steps,
        *m_steps, d, BITS_X2=int(2 * encoding.bits), PER=encoding.tokens_per_scale,
        DIVISOR=layer_encoding.divisor is not None, LEVELS=by_levels, contract=False, **tile,
    )  # fmt: skip
    return out


def _pack_levels(x: Tensor, layer_encoding: LayerEncoding, out: PackedTensors, begin: int) -> None:
    """Pack x as `pack` does, in rotated groups."""
    (_, h, n, d), encoding, group = x.shape, layer_encoding.encoding, layer_encoding.group
    codes, scale, _, steps, m_steps = _storage(out._replace(zero=out.scale), layer_encoding)
    tile, grid = _tile(x, encoding.bits, begin, whole=True)
    cuda.launch(
        rotation_kernels().pack_levels, grid, x,
        x, signs(group, x.device), *rounding(encoding.bits, x.device), codes, scale, begin, n, h,
        *x.stride(), *steps, *m_steps, d, d // group, BITS_X2=int(2 * encoding.bits),
        TOP=top(encoding.bits), META=META_CODES[encoding.meta],
        MOST=torch.finfo(layer_encoding.meta).max, BEGUN=begin % PACK_BLOCK[encoding.bits][0] > 0,
        G=group, ROOT=math.sqrt(group), HALVINGS=min(4, group.bit_length() - 1),
        **butterflies(group), **tile, contract=False,
    )  # fmt: skip


def rotated(x: Tensor, size: int, dtype: torch.dtype, back: bool = False) -> Tensor:
    """Rotate each `size` channels of x [B, H, T, D], or rotate them back; size: a power of 2."""
    out = x.new_empty(x.shape, dtype=dtype)
    if not out.numel():
        return out
    rows, each = x.numel() // size, cuda.padded_size(max(1, _TILE // size), 1)
    cuda.launch(
        rotation_kernels().rotate, (-(-rows // each), 1, 1), x,
        x, signs(size, x.device), out, rows, x.shape[1], x.shape[2], *x.stride(),
        D=x.shape[3], G=size, M=each, BACK=back, **butterflies(size), contract=False,
    )  # fmt: skip
    return out


def butterflies(size: int) -> dict[str, Any]:
    """Return the constants of `hadamard` for so many channels; no stages unless a power of 2."""
    if size < 2 or size & (size - 1):
        return {"STAGES": 0, "NORM": 1.0}
    return {"STAGES": size.bit_length() - 1, "NORM": 1 / math.sqrt(size)}


@cache
def signs(size: int, device: torch.device) -> Tensor:
    """Return the signs of rotated channels, fp32 [size]."""
    return parts(size)[0].to(device)


@cache
def rounding(bits: float, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the levels of rotated groups, and up to where each but the last is the nearest."""
    return levels(bits).to(device), ends(levels(bits)).to(device)


class _Tables(NamedTuple):
    """Tables on a device; columns: int32 [Hk, D], the metadata column of each channel."""

    columns: Tensor
    clip: Tensor  # fp32 [groups]
    divisor: Tensor  # fp32 [Hk, D]
    static: tuple[Tensor, Tensor] | None  # fp32 [Hk, D]


def _table(layer_encoding: LayerEncoding, heads: int, d: int, device: torch.device) -> _Tables:
    key = ("gpu", heads, d, device)
    if key not in layer_encoding.prepared:
        each = torch.arange(d, device=device).expand(heads, d)
        columns = (
            each if layer_encoding.encoding.axis == "channel" else each // layer_encoding.group
        )
        nothing = torch.ones(1, dtype=torch.float32, device=device)
        clip, divisor, static = nothing, nothing, None
        if layer_encoding.group_of is not None:
            columns, groups = layer_encoding.group_of, layer_encoding.scales[1]
            clip = torch.as_tensor(layer_encoding.alpha, dtype=torch.float32, device=device)
            clip = clip.expand(groups or 1).contiguous()
        if layer_encoding.divisor is not None:
            divisor = layer_encoding.divisor.float().to(device).contiguous()
        if layer_encoding.static is not None:
            scale, zero = (
                x.float().to(device).expand(1, heads, 1, d).reshape(heads, d).contiguous()
                for x in layer_encoding.static
            )
            static, columns = (scale, zero), each
        columns = columns.to(device=device, dtype=torch.int32).contiguous()
        layer_encoding.prepared[key] = _Tables(columns, clip, divisor, static)
    return layer_encoding.prepared[key]


def _given(
    scale: Tensor, zero: Tensor, steps: tuple[int, ...], table: _Tables
) -> tuple[Tensor, Tensor, tuple[int, ...]]:
    """Return the metadata that kernels read, stored or static, and their strides."""
    if table.static is None:
        return scale, zero, steps
    return *table.static, (0, table.static[0].shape[1], 0)


def _storage(
    packed: PackedTensors, layer_encoding: LayerEncoding
) -> tuple[Tensor, Tensor, Tensor, tuple[int, ...], tuple[int, ...]]:
    """Return codes, scales and zeros, and the strides of batch row, head and line of either."""
    scale, zero = (x.view(torch.uint8) if x.element_size() == 1 else x for x in packed[1:])
    assert scale.stride() == zero.stride(), "scales and zeros lie alike"
    row, head, line, _ = scale.stride()
    if layer_encoding.group_of is not None:
        head = 0
    return packed.codes, scale, zero, packed.codes.stride()[:3], (row, head, line)


def _tile(
    x: Tensor, bits: float, begin: int, group: int = 0, whole: bool = False
) -> tuple[dict[str, Any], tuple[int, int, int]]:
    """Return the shape of a tile of tokens like x after `begin`, and the grid."""
    n, d, per_block = x.shape[2], x.shape[3], PACK_BLOCK[bits][0]
    p, db, blocks = (
        cuda.padded_size(per_block, 1),
        cuda.padded_size(d),
        (begin + n - 1) // per_block - begin // per_block + 1,
    )
    if not whole:
        db = min(db, max(32, _TILE // group) if group else 128)
    if group:
        a = group // per_block
    else:  # of two sizes only: a kernel is compiled for each
        a = cuda.padded_size(max(1, _TILE // (db * p)), 1) if blocks > 1 else 1
    tile: dict[str, Any] = {"PACK_BLOCK": per_block, "A": a, "P": p, "DB": db}
    return tile, (-(-blocks // a), x.shape[0] * x.shape[1], -(-d // db))


@cache
def kernels() -> Any:
    """Import the kernels, and with them Triton."""
    from . import triton_kernel

    return triton_kernel


@cache
def rotation_kernels() -> Any:
    """Import the kernels of rotated encodings, and with them Triton."""
    from . import triton_rotation_kernel

    return triton_rotation_kernel
