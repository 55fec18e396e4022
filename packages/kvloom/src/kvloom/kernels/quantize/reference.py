"""Asymmetric round-to-nearest quantization, in plain torch.

Decides the arithmetic, and writes codes into bytes as `encoding` lays them out. Knows nothing of
when tokens are packed.

For a group x with b bits, that is codes 0 .. top with top = 2^b - 1: zero = min(x),
scale = (max(x) - min(x)) / top, code = clamp(round((x - zero) / scale), 0, top),
x' = code * scale + zero (KIVI, arXiv:2402.02750, section 3.1). "1.5 bit" is three codes, top = 2
(SKVQ, arXiv:2405.06219). Clipping by alpha takes alpha * min(x) and alpha * max(x) for the ends of
a group (SKVQ, section 3.2). Codes are computed with the *stored* (rounded) scale and zero, so
|x - x'| <= scale / 2 holds up to clipping and the rounding of the metadata; a constant group has
scale 0 and comes back as its zero. A scale that fp8 would round to 0 is its least positive number
instead: half of 2^-9 is the most such a group is off.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ...encoding import PACK_BLOCK, LayerEncoding, metadata, per_channel, rows_for, top
from ...positions.rope import rotate_pairs
from .hadamard import dequantize_rotated, quantize_rotated, rotate, unrotate


class PackedTensors(NamedTuple):
    """Storage of packed tokens, token 0 first.

    codes: uint8 [B, Hk, rows, D]. scale, zero: [B, Hk, N/G, D], [B, Hk, N, D/G] or, with groups of
    all heads, [B, 1, N, groups]; fp8 as bytes or as numbers. Rotated groups have no zeros.
    """

    codes: Tensor
    scale: Tensor
    zero: Tensor


class RopeAngles(NamedTuple):
    """The rotation of tokens before they are packed, or after they are unpacked (see `rope`).

    cos, sin: fp32 [B or 1, Hk or 1, N, dims / 2]; (a, b) becomes (a cos - b sin, b cos + a sin),
    where a pair is channels (2i, 2i + 1) if interleaved, else (i, i + dims / 2).
    """

    cos: Tensor
    sin: Tensor
    interleaved: bool = False


def pack(
    x: Tensor,
    layer_encoding: LayerEncoding,
    out: PackedTensors,
    begin: int,
    nonpadding: Tensor | None = None,
    rope: RopeAngles | None = None,
) -> None:
    """Quantize x [B, Hk, T, D] and write it after `begin` packed tokens, in place.

    out: storage that has room. Filler codes of the last pack block are 0. nonpadding: bool
    [B, 1 or Hk, T], False for padding, which does not enter the range of a group along tokens.
    rope: rotates each token first. Per channel, `begin` and T are multiples of the group.
    """
    if not x.numel():
        return
    encoding = layer_encoding.encoding
    codes, scale, zero = to_codes(
        x.float() if rope is None else rotate_pairs(x.float(), *rope), layer_encoding, nonpadding
    )
    per_block, rows = PACK_BLOCK[encoding.bits]
    row, begun = begin // per_block * rows, begin % per_block
    line = begin // encoding.tokens_per_scale
    if begun:  # pack the partial block again, together with the new codes
        old = unpack_codes(out.codes[:, :, row : row + rows], encoding.bits, begun)
        codes = torch.cat([old, codes], dim=2)
    packed = pack_codes(codes, encoding.bits)
    out.codes[:, :, row : row + packed.shape[2]] = packed
    for old, new in ((out.scale, scale), (out.zero, zero)):
        old[:, :, line : line + new.shape[2]] = new.view(old.dtype)  # fp8 may be stored as bytes


def unpack(
    packed: PackedTensors,
    layer_encoding: LayerEncoding,
    lo: int,
    hi: int,
    dtype: torch.dtype,
    rope: RopeAngles | None = None,
) -> Tensor:
    """Return tokens lo..hi of what `pack` wrote, [B, Hk, hi - lo, D]; rope: rotates them then."""
    encoding = layer_encoding.encoding
    (per_block, rows), each = PACK_BLOCK[encoding.bits], encoding.tokens_per_scale
    unit = math.lcm(each, per_block)
    first, last = lo // unit * unit, -(-hi // each) * each  # whole bytes and groups
    bytes_ = packed.codes[:, :, first // per_block * rows : rows_for(last, encoding.bits)]
    codes = unpack_codes(bytes_, encoding.bits, last - first)
    scale, zero = (
        (x.view(layer_encoding.meta) if x.dtype == torch.uint8 else x)[
            :, :, first // each : last // each
        ]
        for x in (packed.scale, packed.zero)
    )
    x = from_codes(codes, scale, zero, layer_encoding)[:, :, lo - first : hi - first]
    return (x if rope is None else rotate_pairs(x, *rope)).to(dtype)


def to_codes(
    x: Tensor, layer_encoding: LayerEncoding, nonpadding: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize x fp32: codes uint8 [B, Hk, T, D], scale and zero as stored."""
    encoding, meta = layer_encoding.encoding, layer_encoding.meta
    if encoding.rotation == "group":
        codes, scale = quantize_rotated(x, encoding.bits, layer_encoding.group, meta)
        return codes, scale, scale[..., :0]
    if encoding.rotation == "head":
        x = rotate(x)
    if layer_encoding.divisor is not None:
        x = x / layer_encoding.divisor[:, None, :]
    if layer_encoding.static is not None:
        empty = x.new_empty(x.shape[0], 1, x.shape[2], 0, dtype=meta)
        return encode(x, *layer_encoding.static, encoding.bits), empty, empty
    if layer_encoding.group_of is not None:
        groups, alpha = layer_encoding.group_of, layer_encoding.alpha
        return quantize_mapped(x, encoding.bits, groups, meta, alpha)
    return quantize(x, encoding.bits, encoding.axis, layer_encoding.group, meta, nonpadding)


def from_codes(codes: Tensor, scale: Tensor, zero: Tensor, layer_encoding: LayerEncoding) -> Tensor:
    """Invert `to_codes`: fp32 [B, Hk, N, D]."""
    encoding = layer_encoding.encoding
    if encoding.rotation == "group":
        return dequantize_rotated(codes, scale, encoding.bits, layer_encoding.group)
    if layer_encoding.static is not None:
        x = torch.addcmul(layer_encoding.static[1], codes.float(), layer_encoding.static[0])
    elif layer_encoding.group_of is not None:
        x = dequantize_mapped(codes, scale, zero, layer_encoding.group_of)
    else:
        x = dequantize(codes, scale, zero, encoding.axis, layer_encoding.group)
    if encoding.rotation == "head":
        x = unrotate(x)
    return x if layer_encoding.divisor is None else x * layer_encoding.divisor[:, None, :]


def quantize(
    x: Tensor,
    bits: float,
    axis: str,
    group: int,
    meta: torch.dtype,
    nonpadding: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize x [B, Hk, N, D] to (codes uint8 [B, Hk, N, D], scale, zero).

    axis "channel": groups of `group` tokens within a channel, scale and zero [B, Hk, N/G, D].
    axis "token": groups of `group` channels within a token, scale and zero [B, Hk, N, D/G].
    The metadata dtype is `meta`; a value it cannot hold becomes infinity there (fp8: its largest).
    nonpadding: bool [B, 1 or Hk, N], False for padding, which does not enter a group's range.
    """
    grouped, dim = _grouped(x.float(), axis, group)
    low, high = _range(grouped, dim, nonpadding if axis == "channel" else None)
    scale, zero = metadata(low, high, bits, meta)
    codes = encode(grouped, scale, zero, bits)
    return codes.reshape(x.shape), scale.squeeze(dim), zero.squeeze(dim)


def dequantize(codes: Tensor, scale: Tensor, zero: Tensor, axis: str, group: int) -> Tensor:
    """Invert `quantize`: code * scale + zero, fp32 [B, Hk, N, D]."""
    grouped, dim = _grouped(codes.float(), axis, group)
    x = torch.addcmul(zero.float().unsqueeze(dim), grouped, scale.float().unsqueeze(dim))
    return x.reshape(codes.shape)


def quantize_mapped(
    x: Tensor,
    bits: float,
    group_of: Tensor,
    meta: torch.dtype,
    clip: Tensor | float = 1.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize x [B, Hk, N, D] per token in groups of any channels of any heads.

    group_of: int64 [Hk, D], the group of each channel; groups are numbered from 0 and none is
    empty. clip: alpha, one or one a group. Returns (codes uint8 [B, Hk, N, D], scale, zero
    [B, 1, N, groups]).
    """
    b, h, n, d = x.shape
    groups = int(group_of.max()) + 1
    flat = x.float().transpose(1, 2).reshape(b, n, h * d)
    index = group_of.reshape(-1).expand_as(flat)
    low = flat.new_full((b, n, groups), torch.inf).scatter_reduce(-1, index, flat, "amin")
    high = flat.new_full((b, n, groups), -torch.inf).scatter_reduce(-1, index, flat, "amax")
    scale, zero = metadata(low * clip, high * clip, bits, meta)
    scale, zero = scale.unsqueeze(1), zero.unsqueeze(1)
    codes = encode(x.float(), per_channel(scale, group_of), per_channel(zero, group_of), bits)
    return codes, scale, zero


def dequantize_mapped(codes: Tensor, scale: Tensor, zero: Tensor, group_of: Tensor) -> Tensor:
    """Invert `quantize_mapped`: code * scale + zero, fp32 [B, Hk, N, D]."""
    scale, zero = per_channel(scale, group_of), per_channel(zero, group_of)
    return torch.addcmul(zero, codes.float(), scale)


def encode(x: Tensor, scale: Tensor, zero: Tensor, bits: float) -> Tensor:
    """Return codes uint8 of x fp32, given stored scale and zero that broadcast against it."""
    step = scale.float()
    nonzero = step > 0
    codes = (x - zero.float()) / torch.where(nonzero, step, torch.ones_like(step))
    codes = codes.round_().clamp_(0, top(bits))
    return torch.where(nonzero, codes, torch.zeros_like(codes)).to(torch.uint8)


def _range(grouped: Tensor, dim: int, nonpadding: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the least and largest of each group; without padding, 0 where all of it is padding."""
    if nonpadding is None:
        low, high = grouped.aminmax(dim=dim, keepdim=True)
        return low, high
    b, _, blocks, group, _ = grouped.shape
    pad = ~nonpadding.reshape(b, nonpadding.shape[1], blocks, group, 1)
    low = grouped.masked_fill(pad, torch.inf).amin(dim=dim, keepdim=True)
    high = grouped.masked_fill(pad, -torch.inf).amax(dim=dim, keepdim=True)
    empty = pad.all(dim=dim, keepdim=True)
    return low.masked_fill(empty, 0.0), high.masked_fill(empty, 0.0)


def _grouped(x: Tensor, axis: str, group: int) -> tuple[Tensor, int]:
    b, h, n, d = x.shape
    if axis == "channel":
        return x.reshape(b, h, n // group, group, d), 3
    return x.reshape(b, h, n, d // group, group), 4


def pack_codes(codes: Tensor, bits: float) -> Tensor:
    """Pack codes uint8 [..., N, D] into bytes [..., rows_for(N, bits), D], zeros as filler."""
    per_block, _ = PACK_BLOCK[bits]
    *lead, n, d = codes.shape
    if n % per_block:
        filler = codes.new_zeros(*lead, per_block - n % per_block, d)
        codes = torch.cat([codes, filler], dim=-2)
    by_block = codes.reshape(*lead, -1, per_block, d)
    if bits == 3:
        low = by_block & 3
        packed = torch.stack(
            [_join(low[..., :4, :], 2), _join(low[..., 4:, :], 2), _join(by_block >> 2, 1)], dim=-2
        )
        return packed.reshape(*lead, -1, d)
    if bits == 1.5:
        packed = by_block[..., 4, :].clone()
        for t in (3, 2, 1, 0):
            packed.mul_(3).add_(by_block[..., t, :])
        return packed
    return codes if bits == 8 else _join(by_block, int(bits)).reshape(*lead, -1, d)


def unpack_codes(packed: Tensor, bits: float, tokens: int) -> Tensor:
    """Invert `pack_codes`: bytes uint8 [..., rows, D] to the first `tokens` codes [..., N, D]."""
    _, rows = PACK_BLOCK[bits]
    *lead, n_rows, d = packed.shape
    if bits == 8:
        return packed[..., :tokens, :]
    by_block = packed.reshape(*lead, n_rows // rows, rows, d)
    if bits == 3:
        low = torch.cat([_split(by_block[..., 0, :], 2), _split(by_block[..., 1, :], 2)], dim=-2)
        codes = low | (_split(by_block[..., 2, :], 1) << 2)
    elif bits == 1.5:
        codes = torch.stack([by_block[..., 0, :] // 3**t % 3 for t in range(5)], dim=-2)
    else:
        codes = _split(by_block[..., 0, :], int(bits))
    return codes.reshape(*lead, -1, d)[..., :tokens, :]


def _join(codes: Tensor, bits: int) -> Tensor:
    """Join codes [..., per_byte, D] into bytes [..., D], code t at bits t * bits."""
    out = codes[..., 0, :].clone()
    for t in range(1, codes.shape[-2]):
        out |= codes[..., t, :] << (t * bits)
    return out


def _split(packed: Tensor, bits: int) -> Tensor:
    """Split bytes [..., D] into codes [..., 8 / bits, D]."""
    mask = (1 << bits) - 1
    return torch.stack([(packed >> (t * bits)) & mask for t in range(8 // bits)], dim=-2)
