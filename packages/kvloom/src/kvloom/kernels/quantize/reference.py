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
from .byte_layout import PACK_BLOCK, pack_codes, rows_for, stored_scale, top, unpack_codes
from .rotated import dequantize_rotated, quantize_rotated, rotate, unrotate
from .spec import PackedTensors, QuantSpec, RopeAngles


def pack(
    x: Tensor,
    spec: QuantSpec,
    out: PackedTensors,
    begin: int,
    nonpadding: Tensor | None = None,
    rope: RopeAngles | None = None,
) -> None:
    """Quantize x [B, Hk, T, D] by a spec and write it behind `begin` packed tokens, in place.

    out: storage that has room. Filler codes of the last pack block are 0. nonpadding: bool
    [B, 1 or Hk, T], False for padding, which does not enter the range of a group along tokens.
    rope: rotates each token first. Per channel, `begin` and T are multiples of the group.
    """
    if not x.numel():
        return
    codes, scale, zero = _by_spec(
        x.float() if rope is None else rotated(x.float(), rope), spec, nonpadding
    )
    per_block, rows = PACK_BLOCK[spec.bits]
    row, begun, line = begin // per_block * rows, begin % per_block, begin // spec.tokens_per_scale
    if begun:  # pack the partial block again, together with the new codes
        old = unpack_codes(out.codes[:, :, row : row + rows], spec.bits, begun)
        codes = torch.cat([old, codes], dim=2)
    packed = pack_codes(codes, spec.bits)
    out.codes[:, :, row : row + packed.shape[2]] = packed
    for to, new in ((out.scale, scale), (out.zero, zero)):
        to[:, :, line : line + new.shape[2]] = new.view(to.dtype)  # fp8 may be stored as bytes


def unpack(
    packed: PackedTensors,
    spec: QuantSpec,
    lo: int,
    hi: int,
    dtype: torch.dtype,
    rope: RopeAngles | None = None,
) -> Tensor:
    """Return tokens lo..hi of what `pack` wrote, [B, Hk, hi - lo, D]; rope: rotates them then."""
    (per_block, rows), each = PACK_BLOCK[spec.bits], spec.tokens_per_scale
    unit = math.lcm(each, per_block)
    first, last = lo // unit * unit, -(-hi // each) * each  # whole bytes and groups
    bytes_ = packed.codes[:, :, first // per_block * rows : rows_for(last, spec.bits)]
    codes = unpack_codes(bytes_, spec.bits, last - first)
    scale, zero = (
        (x.view(spec.meta) if x.dtype == torch.uint8 else x)[:, :, first // each : last // each]
        for x in (packed.scale, packed.zero)
    )
    x = _inverse(codes, scale, zero, spec)[:, :, lo - first : hi - first]
    return (x if rope is None else rotated(x, rope)).to(dtype)


def rotated(x: Tensor, rope: RopeAngles) -> Tensor:
    """Rotate the first channels of x fp32 [B, Hk, N, D]; products and sums are rounded apart."""
    dims = 2 * rope.cos.shape[-1]
    part, rest = x[..., :dims], x[..., dims:]
    a, b = part.unflatten(-1, (-1, 2)).unbind(-1) if rope.interleaved else part.chunk(2, dim=-1)
    pair = a * rope.cos - b * rope.sin, b * rope.cos + a * rope.sin
    part = torch.stack(pair, dim=-1).flatten(-2) if rope.interleaved else torch.cat(pair, dim=-1)
    return torch.cat([part, rest], dim=-1)


def _by_spec(
    x: Tensor, spec: QuantSpec, nonpadding: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize x fp32 by a spec: codes uint8 [B, Hk, T, D], scale and zero as stored."""
    if spec.rotated:
        codes, scale = quantize_rotated(x, spec.bits, spec.group, spec.meta)
        return codes, scale, scale[..., :0]
    if spec.hadamard:
        x = rotate(x)
    if spec.balance:
        codes, scale = balanced(x, spec, nonpadding)
        return codes, scale, scale[..., :0]
    if spec.divisor is not None:
        x = x / spec.divisor[:, None, :]
    if spec.static is not None:
        none = x.new_empty(x.shape[0], 1, x.shape[2], 0, dtype=spec.meta)
        return encode(x, *spec.static, spec.bits), none, none
    if spec.boost:
        return boosted(x, spec.group, spec.boost, spec.meta, nonpadding)
    if spec.group_of is not None:
        return quantize_mapped(x, spec.bits, spec.group_of, spec.meta, spec.clip)
    return quantize(x, spec.bits, spec.axis, spec.group, spec.meta, nonpadding)


def _inverse(codes: Tensor, scale: Tensor, zero: Tensor, spec: QuantSpec) -> Tensor:
    """Invert `_by_spec`: fp32 [B, Hk, N, D]."""
    if spec.rotated:
        return dequantize_rotated(codes, scale, spec.bits, spec.group, torch.float32)
    if spec.boost:
        x = unboosted(codes, scale, zero, spec.group, spec.boost)
    elif spec.balance:
        x = unbalanced(codes, scale, spec)
    elif spec.static is not None:
        x = torch.addcmul(spec.static[1], codes.float(), spec.static[0])
    elif spec.group_of is not None:
        x = dequantize_mapped(codes, scale, zero, spec.group_of, torch.float32)
    else:
        x = dequantize(codes, scale, zero, spec.axis, spec.group, torch.float32)
    if spec.hadamard:
        x = unrotate(x)
    return x if spec.divisor is None else x * spec.divisor[:, None, :]


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


def balanced(x: Tensor, spec: QuantSpec, nonpadding: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Quantize x [B, Hk, N, D] by range after each tile is normalized (see `balanced`).

    Per channel, a token is divided by its standard deviation, per token a channel of the tile.
    Returns (codes uint8 [B, Hk, N, D], rows of scales, zeros and factors [B, Hk, N/T, numbers]).
    nonpadding: as in `quantize`; padding enters no standard deviation either.
    """
    tiles = x.float().unflatten(2, (-1, spec.balance))  # [B, Hk, N/T, T, D]
    live = None if nonpadding is None else nonpadding.unflatten(2, (-1, spec.balance)).unsqueeze(-1)
    if live is not None:
        tiles = torch.where(live, tiles, 0.0)
    (tokens, channels), channel = deviations(tiles, live), spec.axis == "channel"
    factor = stored_factor(tokens if channel else channels, spec.meta)
    divisor = factor.float()
    tiles = tiles / torch.where(divisor > 0, divisor, torch.inf)
    low, high = _range(tiles, 3 if channel else 4, nonpadding if channel else None)
    scale, zero = metadata(low, high, spec.bits, spec.meta)
    row = torch.cat([part.flatten(3) for part in (scale, zero, factor)], dim=-1)
    return encode(tiles, scale, zero, spec.bits).flatten(2, 3), row


def unbalanced(codes: Tensor, row: Tensor, spec: QuantSpec) -> Tensor:
    """Invert `balanced`: (code * scale + zero) * factor, fp32 [B, Hk, N, D]."""
    tiles = codes.unflatten(2, (-1, spec.balance))
    sizes, dims = (codes.shape[3], spec.balance), (-2, -1)
    if spec.axis == "token":
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


def spread(meta: Tensor, group_of: Tensor) -> Tensor:
    """Numbers of groups [B, 1, N, groups] to those of their channels, fp32 [B, Hk, N, D]."""
    by_channel = meta[:, 0].float().index_select(-1, group_of.reshape(-1))  # [B, N, Hk * D]
    return by_channel.unflatten(-1, group_of.shape).transpose(1, 2)


def metadata(low: Tensor, high: Tensor, bits: float, meta: torch.dtype) -> tuple[Tensor, Tensor]:
    """Scale and zero, as stored, of groups that reach from `low` to `high` (fp32, any shape).

    Which of 0 and -0 is the less depends on the order in which they are compared: 0 it is.
    """
    scale, zero = stored_scale((high - low) / top(bits) + 0.0, meta), low + 0.0
    if meta == torch.float8_e4m3fn:
        most = torch.finfo(meta).max
        zero = zero.clamp(-most, most)
    return scale, zero.to(meta)


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
