"""How codes lie in bytes, and how scales are stored, in plain torch.

Layout: tokens share bytes, channels stay contiguous. A *pack block* is the least number of tokens
that fills whole bytes; it takes `rows` byte rows of D bytes each:

    bits  tokens  rows   byte row r of a pack block
    8     1       1      the code
    4     2       1      token t at bits 4t
    3     8       3      rows 0, 1: low two bits of tokens 4r+t at bits 2t; row 2: high bits
    2     4       1      token t at bits 2t
    1.5   5       1      sum of code t * 3^t: 243 of 256 values, 1.6 bits a code
    1     8       1      token t at bit t
"""

from __future__ import annotations

import torch
from torch import Tensor

PACK_BLOCK = {8: (1, 1), 4: (2, 1), 3: (8, 3), 2: (4, 1), 1.5: (5, 1), 1: (8, 1)}


def top(bits: float) -> int:
    """The highest code of `bits` bits; 1.5 bits have three codes."""
    return 2 if bits == 1.5 else 2 ** int(bits) - 1


def rows_for(tokens: int, bits: float) -> int:
    """Byte rows that hold `tokens` codes of `bits` bits."""
    per_block, rows = PACK_BLOCK[bits]
    return -(-tokens // per_block) * rows


def stored_scale(scale: Tensor, meta: torch.dtype) -> Tensor:
    """Return a scale, 0 or more, as stored: fp8 neither rounds it to 0 nor lets it overflow."""
    if meta == torch.float8_e4m3fn:
        scale = torch.where(scale > 0, scale.clamp(2.0**-9, torch.finfo(meta).max), scale)
    return scale.to(meta)


def metadata(low: Tensor, high: Tensor, bits: float, meta: torch.dtype) -> tuple[Tensor, Tensor]:
    """Scale and zero, as stored, of groups that reach from `low` to `high` (fp32, any shape).

    Which of 0 and -0 is the less depends on the order in which they are compared: 0 it is.
    """
    scale, zero = stored_scale((high - low) / top(bits) + 0.0, meta), low + 0.0
    if meta == torch.float8_e4m3fn:
        most = torch.finfo(meta).max
        zero = zero.clamp(-most, most)
    return scale, zero.to(meta)


def per_channel(meta: Tensor, group_of: Tensor) -> Tensor:
    """Numbers of groups [B, 1, N, groups] to those of their channels, fp32 [B, Hk, N, D]."""
    by_channel = meta[:, 0].float().index_select(-1, group_of.reshape(-1))  # [B, N, Hk * D]
    return by_channel.unflatten(-1, group_of.shape).transpose(1, 2)


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
    """[..., per_byte, D] to bytes [..., D], code t at bits t * bits."""
    out = codes[..., 0, :].clone()
    for t in range(1, codes.shape[-2]):
        out |= codes[..., t, :] << (t * bits)
    return out


def _split(packed: Tensor, bits: int) -> Tensor:
    """Bytes [..., D] to codes [..., 8 / bits, D]."""
    mask = (1 << bits) - 1
    return torch.stack([(packed >> (t * bits)) & mask for t in range(8 // bits)], dim=-2)
