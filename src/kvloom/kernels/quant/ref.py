"""Asymmetric round-to-nearest quantization and its bit layout, in plain torch.

Decides the arithmetic and the byte layout; knows nothing of when tokens are packed.

For a group x with b bits: zero = min(x), scale = (max(x) - min(x)) / (2^b - 1),
code = clamp(round((x - zero) / scale), 0, 2^b - 1), x' = code * scale + zero
(KIVI, arXiv:2402.02750, section 3.1). Codes are computed with the *stored* (rounded) scale and
zero, so |x - x'| <= scale / 2 holds up to the rounding of the metadata; a constant group has
scale 0 and comes back as its zero.

Layout: tokens share bytes, channels stay contiguous. An *atom* is the least number of tokens that
fills whole bytes; it takes `rows` byte rows of D bytes each:

    bits  atom  rows   byte row r of an atom
    8     1     1      the code
    4     2     1      token t at bits 4t
    3     8     3      rows 0, 1: low two bits of tokens 4r+t at bits 2t; row 2: high bit of t at t
    2     4     1      token t at bits 2t
"""

from __future__ import annotations

import torch
from torch import Tensor

ATOM = {8: (1, 1), 4: (2, 1), 3: (8, 3), 2: (4, 1)}


def rows_for(tokens: int, bits: int) -> int:
    """Byte rows that hold `tokens` codes of `bits` bits."""
    atom, rows = ATOM[bits]
    return -(-tokens // atom) * rows


def pack_codes(codes: Tensor, bits: int) -> Tensor:
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
    return codes if bits == 8 else _join(by_atom, bits).reshape(*lead, -1, d)


def unpack_codes(packed: Tensor, bits: int, tokens: int) -> Tensor:
    """Invert `pack_codes`: bytes uint8 [..., rows, D] to the first `tokens` codes [..., N, D]."""
    _, rows = ATOM[bits]
    *lead, n_rows, d = packed.shape
    if bits == 8:
        return packed[..., :tokens, :]
    by_atom = packed.reshape(*lead, n_rows // rows, rows, d)
    if bits == 3:
        low = torch.cat([_split(by_atom[..., 0, :], 2), _split(by_atom[..., 1, :], 2)], dim=-2)
        codes = low | (_split(by_atom[..., 2, :], 1) << 2)
    else:
        codes = _split(by_atom[..., 0, :], bits)
    return codes.reshape(*lead, -1, d)[..., :tokens, :]


def quantize(
    x: Tensor, bits: int, axis: str, group: int, meta: torch.dtype, real: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize x [B, Hk, N, D] to (codes uint8 [B, Hk, N, D], scale, zero).

    axis "channel": groups of `group` tokens within a channel, scale and zero [B, Hk, N/G, D].
    axis "token": groups of `group` channels within a token, scale and zero [B, Hk, N, D/G].
    The metadata dtype is `meta`; a value it cannot hold becomes infinity there. real: bool
    [B, 1 or Hk, N], False for padding, which does not enter a group's range.
    """
    grouped, dim = _grouped(x.float(), axis, group)
    low, high = _range(grouped, dim, real if axis == "channel" else None)
    zero = low.to(meta)
    scale = ((high - low) / (2**bits - 1)).to(meta)
    step = scale.float()
    step = torch.where(step > 0, step, torch.ones_like(step))
    codes = ((grouped - zero.float()) / step).round_().clamp_(0, 2**bits - 1)
    codes = torch.where(scale > 0, codes, torch.zeros_like(codes)).to(torch.uint8)
    return codes.reshape(x.shape), scale.squeeze(dim), zero.squeeze(dim)


def dequantize(
    codes: Tensor, scale: Tensor, zero: Tensor, axis: str, group: int, dtype: torch.dtype
) -> Tensor:
    """Invert `quantize`: code * scale + zero in fp32, cast to `dtype`, [B, Hk, N, D]."""
    grouped, dim = _grouped(codes.float(), axis, group)
    x = torch.addcmul(zero.float().unsqueeze(dim), grouped, scale.float().unsqueeze(dim))
    return x.reshape(codes.shape).to(dtype)


def _range(grouped: Tensor, dim: int, real: Tensor | None) -> tuple[Tensor, Tensor]:
    """Minimum and maximum of each group; of the real tokens only, 0 where a group has none."""
    if real is None:
        low, high = grouped.aminmax(dim=dim, keepdim=True)
        return low, high
    b, _, blocks, group, _ = grouped.shape
    pad = ~real.reshape(b, -1, blocks, group, 1)
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
