"""Groups of tokens of which some channels have two more bits, in plain torch.

Kitty (arXiv:2511.18643), mixed precision within keys: in each group of tokens of a head, the
`boost` channels with the largest range (of equal ones the first) are quantized at 4 bit, all others
at 2. A 4-bit code is two 2-bit codes: its high bits take the channel's place among the codes, its
low bits one of `boost` columns behind the last channel, in the order of channels. So all codes have
2 bits: x' = high * scale + low * scale / 4 + zero.

A boosted channel has a negative scale, its sign is not part of the number: which channels are
boosted takes no bytes. A channel whose scale is stored as 0 is constant and never boosted.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .byte_layout import stored_scale

BITS = 2
TOPS = (3.0, 3.75)
"""A range over a scale: the highest code, and that of 4 bit over 4."""


def quantize_boosted(
    low: Tensor, high: Tensor, x: Tensor, boost: int, meta: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize x fp32 [..., tokens, D] by groups that reach from low to high [..., 1, D].

    Returns codes uint8 [..., tokens, D + boost], 0 to 3, and signed scale and zero [..., 1, D].
    """
    largest = (high - low).sort(dim=-1, descending=True, stable=True).indices[..., :boost]
    chosen = torch.zeros_like(low, dtype=torch.bool).scatter(-1, largest, True)
    zero = low + 0.0  # -0 to 0
    scale = stored_scale((high - zero) / torch.where(chosen, TOPS[1], TOPS[0]) + 0.0, meta).float()
    if meta == torch.float8_e4m3fn:
        most = torch.finfo(meta).max
        zero = zero.clamp(-most, most)
    zero = zero.to(meta)
    chosen &= scale > 0
    step = torch.where(chosen, scale / 4, scale)
    codes = (x - zero.float()) / torch.where(step > 0, step, torch.inf)
    codes = codes.round().clamp_min(0).minimum(torch.where(chosen, 15.0, 3.0)).to(torch.uint8)
    at, filled = _places(chosen, boost)
    extra = codes.gather(-1, at.expand(*codes.shape[:-1], boost)) & 3
    codes = torch.cat([torch.where(chosen, codes >> 2, codes), extra * filled], dim=-1)
    return codes, torch.where(chosen, -scale, scale).to(meta), zero


def dequantize_boosted(codes: Tensor, scale: Tensor, zero: Tensor, boost: int) -> Tensor:
    """Invert `quantize_boosted`: fp32 [..., tokens, D]."""
    scale, d = scale.float(), codes.shape[-1] - boost
    chosen = scale < 0
    at, _ = _places(chosen, boost)
    whole = torch.where(chosen, codes[..., :d] << 2, codes[..., :d])
    whole = whole.scatter_add(-1, at.expand(*codes.shape[:-1], boost), codes[..., d:])
    return torch.addcmul(zero.float(), whole.float(), torch.where(chosen, -scale / 4, scale))


def _places(chosen: Tensor, boost: int) -> tuple[Tensor, Tensor]:
    """Return the channel of each column, int64 [..., 1, boost], and whether it has one, bool."""
    at = chosen.to(torch.uint8).sort(dim=-1, descending=True, stable=True).indices[..., :boost]
    return at, chosen.gather(-1, at)
