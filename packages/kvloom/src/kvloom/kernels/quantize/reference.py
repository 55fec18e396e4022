"""Asymmetric round-to-nearest quantization, in plain torch.

Decides the arithmetic; `byte_layout` decides the bytes. Knows nothing of when tokens are packed.

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

import torch
from torch import Tensor

from .balanced import deviations, stored_factor
from .boosted import dequantize_boosted, quantize_boosted
from .byte_layout import PACK_BLOCK, metadata, pack_codes, rows_for, spread, top, unpack_codes
from .encoding import LayerEncoding, PackedTensors, RopeAngles
from .rotated import dequantize_rotated, quantize_rotated, rotate, unrotate


def pack(
    x: Tensor,
    layer: LayerEncoding,
    out: PackedTensors,
    begin: int,
    nonpadding: Tensor | None = None,
    rope: RopeAngles | None = None,
) -> None:
    """Quantize x [B, Hk, T, D] and write it behind `begin` packed tokens, in place.

    out: storage that has room. Filler codes of the last pack block are 0. nonpadding: bool
    [B, 1 or Hk, T], False for padding, which does not enter the range of a group along tokens.
    rope: rotates each token first. Per channel, `begin` and T are multiples of the group.
    """
    if not x.numel():
        return
    how = layer.encoding
    codes, scale, zero = to_codes(
        x.float() if rope is None else rotated(x.float(), rope), layer, nonpadding
    )
    per_block, rows = PACK_BLOCK[how.bits]
    row, begun, line = begin // per_block * rows, begin % per_block, begin // how.tokens_per_scale
    if begun:  # pack the partial block again, together with the new codes
        old = unpack_codes(out.codes[:, :, row : row + rows], how.bits, begun)
        codes = torch.cat([old, codes], dim=2)
    packed = pack_codes(codes, how.bits)
    out.codes[:, :, row : row + packed.shape[2]] = packed
    for to, new in ((out.scale, scale), (out.zero, zero)):
        to[:, :, line : line + new.shape[2]] = new.view(to.dtype)  # fp8 may be stored as bytes


def unpack(
    packed: PackedTensors,
    layer: LayerEncoding,
    lo: int,
    hi: int,
    dtype: torch.dtype,
    rope: RopeAngles | None = None,
) -> Tensor:
    """Return tokens lo..hi of what `pack` wrote, [B, Hk, hi - lo, D]; rope: rotates them then."""
    how = layer.encoding
    (per_block, rows), each = PACK_BLOCK[how.bits], how.tokens_per_scale
    unit = math.lcm(each, per_block)
    first, last = lo // unit * unit, -(-hi // each) * each  # whole bytes and groups
    bytes_ = packed.codes[:, :, first // per_block * rows : rows_for(last, how.bits)]
    codes = unpack_codes(bytes_, how.bits, last - first)
    scale, zero = (
        (x.view(layer.meta) if x.dtype == torch.uint8 else x)[:, :, first // each : last // each]
        for x in (packed.scale, packed.zero)
    )
    x = from_codes(codes, scale, zero, layer)[:, :, lo - first : hi - first]
    return (x if rope is None else rotated(x, rope)).to(dtype)


def rotated(x: Tensor, rope: RopeAngles) -> Tensor:
    """Rotate the first channels of x fp32 [B, Hk, N, D]; products and sums are rounded apart."""
    dims = 2 * rope.cos.shape[-1]
    part, rest = x[..., :dims], x[..., dims:]
    a, b = part.unflatten(-1, (-1, 2)).unbind(-1) if rope.interleaved else part.chunk(2, dim=-1)
    pair = a * rope.cos - b * rope.sin, b * rope.cos + a * rope.sin
    part = torch.stack(pair, dim=-1).flatten(-2) if rope.interleaved else torch.cat(pair, dim=-1)
    return torch.cat([part, rest], dim=-1)


def to_codes(
    x: Tensor, layer: LayerEncoding, nonpadding: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize x fp32: codes uint8 [B, Hk, T, D + boost], scale and zero as stored."""
    how, meta = layer.encoding, layer.meta
    if how.rotation == "group":
        codes, scale = quantize_rotated(x, how.bits, layer.group, meta)
        return codes, scale, scale[..., :0]
    if how.rotation == "head":
        x = rotate(x)
    if how.balance:
        codes, scale = balanced(x, layer, nonpadding)
        return codes, scale, scale[..., :0]
    if layer.divisor is not None:
        x = x / layer.divisor[:, None, :]
    if layer.static is not None:
        none = x.new_empty(x.shape[0], 1, x.shape[2], 0, dtype=meta)
        return encode(x, *layer.static, how.bits), none, none
    if how.boost:
        return boosted(x, layer.group, how.boost, meta, nonpadding)
    if layer.group_of is not None:
        return quantize_mapped(x, how.bits, layer.group_of, meta, layer.alpha)
    return quantize(x, how.bits, how.axis, layer.group, meta, nonpadding)


def from_codes(codes: Tensor, scale: Tensor, zero: Tensor, layer: LayerEncoding) -> Tensor:
    """Invert `to_codes`: fp32 [B, Hk, N, D]."""
    how = layer.encoding
    if how.rotation == "group":
        return dequantize_rotated(codes, scale, how.bits, layer.group, torch.float32)
    if how.boost:
        x = unboosted(codes, scale, zero, layer.group, how.boost)
    elif how.balance:
        x = unbalanced(codes, scale, layer)
    elif layer.static is not None:
        x = torch.addcmul(layer.static[1], codes.float(), layer.static[0])
    elif layer.group_of is not None:
        x = dequantize_mapped(codes, scale, zero, layer.group_of, torch.float32)
    else:
        x = dequantize(codes, scale, zero, how.axis, layer.group, torch.float32)
    if how.rotation == "head":
        x = unrotate(x)
    return x if layer.divisor is None else x * layer.divisor[:, None, :]


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


def dequantize(
    codes: Tensor, scale: Tensor, zero: Tensor, axis: str, group: int, dtype: torch.dtype
) -> Tensor:
    """Invert `quantize`: code * scale + zero in fp32, cast to `dtype`, [B, Hk, N, D]."""
    grouped, dim = _grouped(codes.float(), axis, group)
    x = torch.addcmul(zero.float().unsqueeze(dim), grouped, scale.float().unsqueeze(dim))
    return x.reshape(codes.shape).to(dtype)


def boosted(
    x: Tensor, group: int, boost: int, meta: torch.dtype, nonpadding: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize x [B, Hk, N, D] per channel at 2 bit, `boost` channels of each group at 4.

    Returns (codes uint8 [B, Hk, N, D + boost], scale, zero [B, Hk, N/G, D]). nonpadding: as in
    `quantize`.
    """
    grouped, dim = _grouped(x.float(), "channel", group)
    low, high = _range(grouped, dim, nonpadding)
    codes, scale, zero = quantize_boosted(low, high, grouped, boost, meta)
    return codes.flatten(2, 3), scale.squeeze(dim), zero.squeeze(dim)


def unboosted(codes: Tensor, scale: Tensor, zero: Tensor, group: int, boost: int) -> Tensor:
    """Invert `boosted`: fp32 [B, Hk, N, D]."""
    grouped, dim = _grouped(codes, "channel", group)
    x = dequantize_boosted(grouped, scale.unsqueeze(dim), zero.unsqueeze(dim), boost)
    return x.flatten(2, 3)


def balanced(
    x: Tensor, layer: LayerEncoding, nonpadding: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Quantize x [B, Hk, N, D] by range after each tile is normalized (see `balanced`).

    Per channel, a token is divided by its standard deviation, per token a channel of the tile.
    Returns (codes uint8 [B, Hk, N, D], rows of scales, zeros and factors [B, Hk, N/T, numbers]).
    nonpadding: as in `quantize`; padding enters no standard deviation either.
    """
    how, meta, live = layer.encoding, layer.meta, None
    tiles = x.float().unflatten(2, (-1, how.balance))  # [B, Hk, N/T, T, D]
    if nonpadding is not None:
        live = nonpadding.unflatten(2, (-1, how.balance)).unsqueeze(-1)
        tiles = torch.where(live, tiles, 0.0)
    (tokens, channels), channel = deviations(tiles, live), how.axis == "channel"
    factor = stored_factor(tokens if channel else channels, meta)
    divisor = factor.float()
    tiles = tiles / torch.where(divisor > 0, divisor, torch.inf)
    low, high = _range(tiles, 3 if channel else 4, nonpadding if channel else None)
    scale, zero = metadata(low, high, how.bits, meta)
    row = torch.cat([part.flatten(3) for part in (scale, zero, factor)], dim=-1)
    return encode(tiles, scale, zero, how.bits).flatten(2, 3), row


def unbalanced(codes: Tensor, row: Tensor, layer: LayerEncoding) -> Tensor:
    """Invert `balanced`: (code * scale + zero) * factor, fp32 [B, Hk, N, D]."""
    how = layer.encoding
    tiles = codes.unflatten(2, (-1, how.balance))
    sizes, dims = (codes.shape[3], how.balance), (-2, -1)
    if how.axis == "token":
        sizes, dims = sizes[::-1], dims[::-1]
    scale, zero, factor = row.float().split([sizes[0], sizes[0], sizes[1]], dim=-1)
    x = torch.addcmul(zero.unsqueeze(dims[0]), tiles.float(), scale.unsqueeze(dims[0]))
    return (x * factor.unsqueeze(dims[1])).flatten(2, 3)


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
    codes = encode(x.float(), spread(scale, group_of), spread(zero, group_of), bits)
    return codes, scale, zero


def dequantize_mapped(
    codes: Tensor, scale: Tensor, zero: Tensor, group_of: Tensor, dtype: torch.dtype
) -> Tensor:
    """Invert `quantize_mapped`: code * scale + zero in fp32, cast to `dtype`, [B, Hk, N, D]."""
    scale, zero = spread(scale, group_of), spread(zero, group_of)
    return torch.addcmul(zero, codes.float(), scale).to(dtype)


def encode(x: Tensor, scale: Tensor, zero: Tensor, bits: float) -> Tensor:
    """Codes uint8 of x fp32, given stored scale and zero that broadcast against it."""
    step = scale.float()
    some = step > 0
    codes = (x - zero.float()) / torch.where(some, step, torch.ones_like(step))
    codes = codes.round_().clamp_(0, top(bits))
    return torch.where(some, codes, torch.zeros_like(codes)).to(torch.uint8)


def _range(grouped: Tensor, dim: int, nonpadding: Tensor | None) -> tuple[Tensor, Tensor]:
    """Minimum and maximum of each group; without padding, 0 where a group has no other token."""
    if nonpadding is None:
        low, high = grouped.aminmax(dim=dim, keepdim=True)
        return low, high
    b, _, blocks, group, _ = grouped.shape
    pad = ~nonpadding.reshape(b, nonpadding.shape[1], blocks, group, 1)
    low = grouped.masked_fill(pad, torch.inf).amin(dim=dim, keepdim=True)
    high = grouped.masked_fill(pad, -torch.inf).amax(dim=dim, keepdim=True)
    none = pad.all(dim=dim, keepdim=True)
    return low.masked_fill(none, 0.0), high.masked_fill(none, 0.0)


def _grouped(x: Tensor, axis: str, group: int) -> tuple[Tensor, int]:
    b, h, n, d = x.shape
    if axis == "channel":
        return x.reshape(b, h, n // group, group, d), 3
    return x.reshape(b, h, n, d // group, group), 4
