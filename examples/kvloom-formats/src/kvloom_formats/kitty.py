"""Kitty: 2-bit KV cache quantization with dynamic channel-wise precision boost (arXiv:2511.18643).

Keys are quantized per channel as by KIVI, but `boost` channels of each group of tokens of a head
have 4 bits and all others 2. Values have 2 bits per token. The first tokens stay exact.

A 4-bit code is two 2-bit codes: its high bits take the channel's place among the codes, its low
bits one of `boost` columns after the last channel, in the order of channels. A boosted channel has
a negative scale, whose sign is not part of the number: which channels are boosted takes no bytes.

README.md has the departures from the paper.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from numba import njit
from torch import Tensor

import kvloom
from kvloom import Packed, Protect, Recipe, Store
from kvloom.errors import RecipeError
from kvloom.kernels import AttentionState, pack_codes, unpack_codes
from kvloom.store import Format, FormatView, PackedView

from . import tiles

BITS = 2
TOPS = (3.0, 3.75)
"""A range over a scale: the highest code, and that of 4 bits over 4."""


@kvloom.register_format
@dataclass(frozen=True)
class Kitty(Format):
    """Keys per channel at 2 bits, the channels with the largest range at 4.

    Attributes:
        boost: The number of channels of a head that have 4 bits, fewer than its channels.
        unit: The number of tokens in a group, a multiple of 4.
        residual: Decoding packs when so many exact tokens have gathered, a multiple of `unit`.
    """

    boost: int = 16
    unit: int = 64
    residual: int = 128
    kind: ClassVar[str] = "kitty"

    def __post_init__(self) -> None:
        if self.unit < 4 or self.unit % 4 or self.residual % self.unit or self.residual < self.unit:
            raise RecipeError(
                f"unit={self.unit} must be a multiple of 4 tokens, and residual={self.residual} a "
                "multiple of unit"
            )

    def to_pack(self, tokens: int, recent: int, prompt: bool = True) -> int:
        """Return how many of `tokens` exact tokens to pack."""
        return max(0, tokens - recent) // self.residual * self.residual

    def problems(self, head_dim: int, heads: int = 1) -> list[str]:
        """Return why this format does not fit a layer."""
        if 0 <= self.boost < head_dim:
            return []
        return [f"boost={self.boost} is not from 0 to {head_dim - 1}, fewer than head_dim"]

    @property
    def max_abs(self) -> float:
        """The largest magnitude whose scale and zero 16 bits can store."""
        return torch.finfo(torch.float16).max

    def nbytes(self, tokens: int, head_dim: int, heads: int = 1) -> int:
        """Return the bytes of codes, and of 16-bit scales and zeros."""
        codes = tokens // 4 * (head_dim + self.boost)
        return heads * (codes + 4 * tokens // self.unit * head_dim)

    def pack(self, x: Tensor, nonpadding: Tensor | None = None) -> tuple[Tensor, ...]:
        """Return codes uint8 [B, Hk, T / 4, D + boost], scales and zeros [B, Hk, T / unit, D]."""
        groups = x.float().unflatten(2, (-1, self.unit))  # [B, Hk, groups, unit, D]
        low, high = groups.aminmax(dim=-2, keepdim=True)
        if nonpadding is not None:
            live = nonpadding.unflatten(2, (-1, self.unit)).unsqueeze(-1)
            low = torch.where(live, groups, torch.inf).amin(-2, keepdim=True)
            high = torch.where(live, groups, -torch.inf).amax(-2, keepdim=True)
            low, high = (torch.where(low <= high, bound, 0.0) for bound in (low, high))
        widest = (high - low).sort(dim=-1, descending=True, stable=True).indices[..., : self.boost]
        boosted = torch.zeros_like(low, dtype=torch.bool).scatter(-1, widest, True)
        scale = ((high - low) / torch.where(boosted, TOPS[1], TOPS[0])).half()
        zero = low.half()
        boosted &= scale > 0  # a constant channel needs no bits
        step = torch.where(boosted, scale.float() / 4, scale.float())
        codes = (groups - zero.float()) / torch.where(step > 0, step, torch.inf)
        codes = codes.round().clamp_min(0).minimum(torch.where(boosted, 15.0, 3.0)).to(torch.uint8)
        channels, filled = _columns(boosted, self.boost)
        low_bits = codes.gather(-1, channels.expand(*codes.shape[:-1], -1)) & 3
        codes = torch.cat([torch.where(boosted, codes >> 2, codes), low_bits * filled], dim=-1)
        scale = torch.where(boosted, -scale, scale)
        return pack_codes(codes.flatten(2, 3), BITS), scale.squeeze(-2), zero.squeeze(-2)

    def unpack(self, tensors: tuple[Tensor, ...], dtype: torch.dtype) -> Tensor:
        """Return tokens [B, Hk, T, D]."""
        packed, scale, zero = tensors
        codes = unpack_codes(packed, BITS, scale.shape[2] * self.unit)
        codes = codes.unflatten(2, (-1, self.unit))
        scale, zero, d = scale.float().unsqueeze(-2), zero.float().unsqueeze(-2), scale.shape[3]
        boosted = scale < 0
        channels, _ = _columns(boosted, self.boost)
        whole = torch.where(boosted, codes[..., :d] << 2, codes[..., :d])
        whole = whole.scatter_add(-1, channels.expand(*codes.shape[:-1], -1), codes[..., d:])
        x = whole * torch.where(boosted, -scale / 4, scale) + zero
        return x.flatten(2, 3).to(dtype)

    def attend_problems(
        self, q: Tensor, keys: Tensor | FormatView | PackedView,
        values: Tensor | FormatView | PackedView, *, visible: Tensor | None = None,
        bias: Tensor | None = None, softcap: float | None = None,
    ) -> list[str]:  # fmt: skip
        """Return why no kernel attends to these tokens; empty if one does."""
        reasons = tiles.problems(q, bias, softcap)
        if not isinstance(keys, FormatView) or not isinstance(keys.fmt, Kitty):
            reasons.append("keys are not packed in it")
        return reasons

    def attend(
        self, q: Tensor, keys: Tensor | FormatView | PackedView,
        values: Tensor | FormatView | PackedView, scale: float, *, visible: Tensor | None = None,
        bias: Tensor | None = None, softcap: float | None = None,
    ) -> AttentionState:  # fmt: skip
        """Attend to packed keys on the CPU; values that are packed are unpacked first."""
        codes, scales, zeros = map(tiles.heads_first, keys.tensors)
        k = tiles.Side(read_keys, (codes, scales, zeros), keys.lo % keys.fmt.unit)
        v = tiles.exact(values if isinstance(values, Tensor) else values.tensor())
        return tiles.attend(q.float(), keys.hi - keys.lo, k, v, scale, visible)


def _columns(boosted: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the channel of each column of low bits, int64 [..., count], and whether it has one."""
    channels = boosted.to(torch.uint8).sort(dim=-1, descending=True, stable=True).indices
    channels = channels[..., :count]
    return channels, boosted.gather(-1, channels)


@njit(nogil=True, fastmath=True, cache=True)
def read_keys(arrays, head, begin, count, out):
    """Write keys of which boosted channels have low bits in columns after the last channel."""
    codes, scales, zeros = arrays
    d, unit = scales.shape[2], codes.shape[1] * 4 // scales.shape[1]
    for t in range(count):
        row, shift, group = (begin + t) // 4, (begin + t) % 4 * 2, (begin + t) // unit
        for c in range(d):
            code = np.float32((codes[head, row, c] >> shift) & 3)
            out[t, c] = code * abs(scales[head, group, c]) + zeros[head, group, c]
        column = d
        for c in range(d):
            if scales[head, group, c] < 0:
                low = np.float32((codes[head, row, column] >> shift) & 3)
                out[t, c] -= low * scales[head, group, c] * np.float32(0.25)
                column += 1


@kvloom.register_recipe("kitty")
def kitty(
    boost: int = 16, group: int = 64, residual: int = 128, sinks: int = 32, rotate: bool = False
) -> Recipe:
    """Kitty (arXiv:2511.18643): keys per channel, a few at 4 bits, all else 2 bits.

    rotate: values are rotated and rounded as by `turbo`, which the paper does not do.
    """
    values = Packed(2, "token", 32)
    if rotate:
        values = Packed(2, "token", 0, rotation="group")
    return Recipe(
        store=Store(keys=Kitty(boost, group, residual), values=values),
        protect=Protect(sinks, (0, residual)),
        name="kitty",
    )
