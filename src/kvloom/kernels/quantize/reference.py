"""Asymmetric round-to-nearest quantization and its bit layout, in plain torch.

Decides the arithmetic and the byte layout; knows nothing of when tokens are packed.

For a group x with b bits, that is codes 0 .. top with top = 2^b - 1: zero = min(x),
scale = (max(x) - min(x)) / top, code = clamp(round((x - zero) / scale), 0, top),
x' = code * scale + zero (KIVI, arXiv:2402.02750, section 3.1). "1.5 bit" is three codes, top = 2
(SKVQ, arXiv:2405.06219). Clipping by alpha takes alpha * min(x) and alpha * max(x) for the ends of
a group (SKVQ, section 3.2). Codes are computed with the *stored* (rounded) scale and zero, so
|x - x'| <= scale / 2 holds up to clipping and the rounding of the metadata; a constant group has
scale 0 and comes back as its zero. A scale that fp8 would round to 0 is its least positive number
instead: half of 2^-9 is the most such a group is off.

Layout: tokens share bytes, channels stay contiguous. An *atom* is the least number of tokens that
fills whole bytes; it takes `rows` byte rows of D bytes each:

    bits  atom  rows   byte row r of an atom
    8     1     1      the code
    4     2     1      token t at bits 4t
    3     8     3      rows 0, 1: low two bits of tokens 4r+t at bits 2t; row 2: high bit of t at t
    2     4     1      token t at bits 2t
    1.5   5     1      sum of code t * 3^t: 243 of 256 values, 1.6 bits a code
    1     8     1      token t at bit t
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .spec import PackedTensors, QuantSpec, RopeAngles

ATOM = {8: (1, 1), 4: (2, 1), 3: (8, 3), 2: (4, 1), 1.5: (5, 1), 1: (8, 1)}


def pack(
    x: Tensor,
    spec: QuantSpec,
    out: PackedTensors,
    begin: int,
    real: Tensor | None = None,
    rope: RopeAngles | None = None,
) -> None:
    """Quantize x [B, Hk, T, D] by a spec and write it behind `begin` packed tokens, in place.

    out: storage that has room. Filler codes of the last pack block are 0. real: bool
    [B, 1 or Hk, T], False for padding, which does not enter the range of a group along tokens.
    rope: rotates each token first. Per channel, `begin` and T are multiples of the group.
    """
    if not x.numel():
        return
    codes, scale, zero = _by_spec(
        x.float() if rope is None else rotated(x.float(), rope), spec, real
    )
    atom, rows = ATOM[spec.bits]
    row, begun, line = begin // atom * rows, begin % atom, begin // spec.tokens_per_scale
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
    (atom, rows), each = ATOM[spec.bits], spec.tokens_per_scale
    unit = math.lcm(each, atom)
    first, last = lo // unit * unit, -(-hi // each) * each  # whole bytes and groups
    bytes_ = packed.codes[:, :, first // atom * rows : rows_for(last, spec.bits)]
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


def _by_spec(x: Tensor, spec: QuantSpec, real: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize x fp32 by a spec: codes uint8 [B, Hk, T, D], scale and zero as stored."""
    from .rotated import quantize_rotated

    if spec.rotated:
        codes, scale = quantize_rotated(x, spec.bits, spec.group, spec.meta)
        return codes, scale, scale[..., :0]
    if spec.divisor is not None:
        x = x / spec.divisor[:, None, :]
    if spec.static is not None:
        none = x.new_empty(x.shape[0], 1, x.shape[2], 0, dtype=spec.meta)
        return encode(x, *spec.static, spec.bits), none, none
    if spec.group_of is not None:
        return quantize_mapped(x, spec.bits, spec.group_of, spec.meta, spec.clip)
    return quantize(x, spec.bits, spec.axis, spec.group, spec.meta, real)


def _inverse(codes: Tensor, scale: Tensor, zero: Tensor, spec: QuantSpec) -> Tensor:
    """Invert `_by_spec`: fp32 [B, Hk, N, D]."""
    from .rotated import dequantize_rotated

    if spec.rotated:
        return dequantize_rotated(codes, scale, spec.bits, spec.group, torch.float32)
    if spec.static is not None:
        x = torch.addcmul(spec.static[1], codes.float(), spec.static[0])
    elif spec.group_of is not None:
        x = dequantize_mapped(codes, scale, zero, spec.group_of, torch.float32)
    else:
        x = dequantize(codes, scale, zero, spec.axis, spec.group, torch.float32)
    return x if spec.divisor is None else x * spec.divisor[:, None, :]


def top(bits: float) -> int:
    """The highest code of `bits` bits; 1.5 bits have three codes."""
    return 2 if bits == 1.5 else 2 ** int(bits) - 1


def rows_for(tokens: int, bits: float) -> int:
    """Byte rows that hold `tokens` codes of `bits` bits."""
    atom, rows = ATOM[bits]
    return -(-tokens // atom) * rows


def pack_codes(codes: Tensor, bits: float) -> Tensor:
    """Pack codes uint8 [..., N, D] into bytes [..., rows_for(N, bits), D], zeros as filler."""
    atom, _ = ATOM[bits]
    *lead, n, d = codes.shape
    if n % atom:
        filler = codes.new_zeros(*lead, atom - n % atom, d)
        codes = torch.cat([codes, filler], dim=-2)
    by_atom = codes.reshape(*lead, -1, atom, d)
    if bits == 3:
        low = by_atom & 3
        packed = torch.stack(
            [_join(low[..., :4, :], 2), _join(low[..., 4:, :], 2), _join(by_atom >> 2, 1)], dim=-2
        )
        return packed.reshape(*lead, -1, d)
    if bits == 1.5:
        packed = by_atom[..., 4, :].clone()
        for t in (3, 2, 1, 0):
            packed.mul_(3).add_(by_atom[..., t, :])
        return packed
    return codes if bits == 8 else _join(by_atom, int(bits)).reshape(*lead, -1, d)


def unpack_codes(packed: Tensor, bits: float, tokens: int) -> Tensor:
    """Invert `pack_codes`: bytes uint8 [..., rows, D] to the first `tokens` codes [..., N, D]."""
    _, rows = ATOM[bits]
    *lead, n_rows, d = packed.shape
    if bits == 8:
        return packed[..., :tokens, :]
    by_atom = packed.reshape(*lead, n_rows // rows, rows, d)
    if bits == 3:
        low = torch.cat([_split(by_atom[..., 0, :], 2), _split(by_atom[..., 1, :], 2)], dim=-2)
        codes = low | (_split(by_atom[..., 2, :], 1) << 2)
    elif bits == 1.5:
        codes = torch.stack([by_atom[..., 0, :] // 3**t % 3 for t in range(5)], dim=-2)
    else:
        codes = _split(by_atom[..., 0, :], int(bits))
    return codes.reshape(*lead, -1, d)[..., :tokens, :]


def quantize(
    x: Tensor,
    bits: float,
    axis: str,
    group: int,
    meta: torch.dtype,
    real: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize x [B, Hk, N, D] to (codes uint8 [B, Hk, N, D], scale, zero).

    axis "channel": groups of `group` tokens within a channel, scale and zero [B, Hk, N/G, D].
    axis "token": groups of `group` channels within a token, scale and zero [B, Hk, N, D/G].
    The metadata dtype is `meta`; a value it cannot hold becomes infinity there (fp8: its largest).
    real: bool [B, 1 or Hk, N], False for padding, which does not enter a group's range.
    """
    grouped, dim = _grouped(x.float(), axis, group)
    low, high = _range(grouped, dim, real if axis == "channel" else None)
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
    scale, zero = held_scale((high - low) / top(bits) + 0.0, meta), low + 0.0
    if meta == torch.float8_e4m3fn:
        most = torch.finfo(meta).max
        zero = zero.clamp(-most, most)
    return scale, zero.to(meta)


def held_scale(scale: Tensor, meta: torch.dtype) -> Tensor:
    """A scale, 0 or more, as stored: in fp8 neither rounded to 0 nor beyond the largest."""
    if meta == torch.float8_e4m3fn:
        scale = torch.where(scale > 0, scale.clamp(2.0**-9, torch.finfo(meta).max), scale)
    return scale.to(meta)


def encode(x: Tensor, scale: Tensor, zero: Tensor, bits: float) -> Tensor:
    """Codes uint8 of x fp32, given stored scale and zero that broadcast against it."""
    step = scale.float()
    some = step > 0
    codes = (x - zero.float()) / torch.where(some, step, torch.ones_like(step))
    codes = codes.round_().clamp_(0, top(bits))
    return torch.where(some, codes, torch.zeros_like(codes)).to(torch.uint8)


def _range(grouped: Tensor, dim: int, real: Tensor | None) -> tuple[Tensor, Tensor]:
    """Minimum and maximum of each group; of the real tokens only, 0 where a group has none."""
    if real is None:
        low, high = grouped.aminmax(dim=dim, keepdim=True)
        return low, high
    b, _, blocks, group, _ = grouped.shape
    pad = ~real.reshape(b, real.shape[1], blocks, group, 1)
    low = grouped.masked_fill(pad, torch.inf).amin(dim=dim, keepdim=True)
    high = grouped.masked_fill(pad, -torch.inf).amax(dim=dim, keepdim=True)
    none = pad.all(dim=dim, keepdim=True)
    return low.masked_fill(none, 0.0), high.masked_fill(none, 0.0)


def _grouped(x: Tensor, axis: str, group: int) -> tuple[Tensor, int]:
    b, h, n, d = x.shape
    if axis == "channel":
        return x.reshape(b, h, n // group, group, d), 3
    return x.reshape(b, h, n, d // group, group), 4


def _join(codes: Tensor, bits: int) -> Tensor:
    """[..., per_byte, D] to bytes [..., D], code t at bits t * bits."""
    out = codes[..., 0, :].clone()
    for t in range(1, codes.shape[-2]):
        out |= codes[..., t, :] << (t * bits)
    return out


def _split(packed: Tensor, bits: int) -> Tensor:
    """Bytes [..., D] to codes [..., 8 / bits, D]."""
    mask = (1 << bits) - 1
    return torch.stack([(packed >> (t * bits)) & mask for t in range(8 // bits)], dim=-2)
