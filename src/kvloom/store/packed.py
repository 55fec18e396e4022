"""Packed tokens: codes, scales and zeros that grow together.

Decides how codes are appended behind codes that share their last byte; the arithmetic is in
`kernels.quant`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ..kernels.attend.strand import Channelwise
from ..kernels.quant import ref
from ..rope import Rope
from .buffer import Buffer
from .codec import Channels, Codec, codec
from .formats import META, Packed

# Tokens quantized at once: bounds the fp32 copies made on the way.
_CHUNK = 4096


class PackedView(NamedTuple):
    """A stretch of packed tokens as kernels see it: storage, token range and format."""

    codes: Tensor  # uint8 [B, Hk, rows, D]
    scale: Tensor  # [B, Hk, N/G, D] or [B, Hk, N, D/G]; with a transform [B, 1, N, groups]
    zero: Tensor
    fmt: Packed
    lo: int
    hi: int
    dtype: torch.dtype
    codec: Codec
    rope: Rope | None = None  # the keys are packed as they were before it
    at: Tensor | None = None  # and stood at these positions, int64 [B or 1, Hk or 1, hi - lo], or
    # the first at this one and each next one further, [B or 1, 1, 1]

    @property
    def channelwise(self) -> Channelwise:
        """What a kernel must be told of the channels."""
        return self.codec.channelwise

    def tensor(self) -> Tensor:
        """Unpacked tokens [B, Hk, hi - lo, D] in the model's dtype."""
        fmt = self.fmt
        atom, rows = ref.ATOM[fmt.bits]
        per_meta = fmt.group if fmt.axis == "channel" else 1  # tokens that share a scale
        unit = math.lcm(per_meta, atom)
        lo = self.lo // unit * unit  # start where both bytes and groups start
        hi = -(-self.hi // per_meta) * per_meta
        codes = ref.unpack_codes(
            self.codes[:, :, lo // atom * rows : ref.rows_for(hi, fmt.bits)], fmt.bits, hi - lo
        )
        meta = slice(lo // per_meta, hi // per_meta)
        scale, zero = self.scale[:, :, meta], self.zero[:, :, meta]
        stretch = slice(self.lo - lo, self.hi - lo)
        if self.rope is None:
            return self.codec.dequantize(codes, scale, zero, self.dtype)[:, :, stretch]
        assert self.at is not None
        raw = self.codec.dequantize(codes, scale, zero, torch.float32)[:, :, stretch]
        at = self.at
        if at.shape[2] == 1:
            at = at + torch.arange(self.hi - self.lo, device=at.device)
        return self.rope.turn(raw, at).to(self.dtype)


class PackedTokens:
    """The packed prefix of a lane."""

    def __init__(
        self, fmt: Packed, channels: Channels | None = None, rope: Rope | None = None
    ) -> None:
        self.fmt, self.channels = fmt, channels
        self.rope = rope if fmt.pre_rope else None
        self.codec: Codec | None = None
        self.codes, self.scale, self.zero = (Buffer(tight=fmt.in_blocks) for _ in range(3))
        self.count = 0
        self.dtype = torch.float32

    def __len__(self) -> int:
        return self.count

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors held."""
        return self.codes.nbytes + self.scale.nbytes + self.zero.nbytes

    def append(self, x: Tensor, real: Tensor | None = None, at: Tensor | None = None) -> None:
        """Quantize and add x [B, Hk, T, D]; per channel, T is a multiple of the group.

        real: bool [B, 1 or Hk, T], False for padding. at: int64 [B or 1, Hk or 1, T], the tokens'
        positions, where keys are packed as they were before RoPE.
        """
        if self.codec is None:
            self.codec = codec(self.fmt, self.channels, x)
        parts = []
        for lo in range(0, x.shape[2], _CHUNK):
            part = slice(lo, lo + _CHUNK)
            here = None if real is None else real[:, :, part]
            tokens = x[:, :, part]
            if self.rope is not None:
                assert at is not None
                tokens = self.rope.turn(tokens.float(), -at[:, :, part])
            found, scale, zero = self.codec.quantize(tokens, here)
            parts.append((found, _plain(scale), _plain(zero)))
        codes, scale, zero = (
            torch.cat(p, dim=2) if len(p) > 1 else p[0] for p in zip(*parts, strict=True)
        )
        self._append_codes(codes)
        self.scale.append(scale)
        self.zero.append(zero)
        self.dtype = x.dtype

    def view(self, lo: int = 0, hi: int | None = None, at: Tensor | None = None) -> PackedView:
        """Tokens lo..hi of this prefix; at: their positions, as in `append`."""
        assert self.codec is not None, "no tokens yet"
        hi = self.count if hi is None else hi
        meta = META[self.fmt.meta]
        held = (self.codes.view(), self.scale.view().view(meta), self.zero.view().view(meta))
        return PackedView(*held, self.fmt, lo, hi, self.dtype, self.codec, self.rope, at)

    def map(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Apply fn to every tensor held, along the batch dimension."""
        for buffer in (self.codes, self.scale, self.zero):
            buffer.map(fn)

    def _append_codes(self, codes: Tensor) -> None:
        bits = self.fmt.bits
        atom, rows = ref.ATOM[bits]
        n = codes.shape[2]
        begun = self.count % atom
        if begun:  # the last atom is not full: pack it again together with the new codes
            old = ref.unpack_codes(self.codes.view()[:, :, -rows:], bits, begun)
            self.codes.drop_back(rows)
            codes = torch.cat([old, codes], dim=2)
        self.codes.append(ref.pack_codes(codes, bits))
        self.count += n


def _plain(meta: Tensor) -> Tensor:
    """Scales and zeros as they are held: fp8 as bytes, which every torch can join and reorder."""
    return meta.view(torch.uint8) if meta.dtype == torch.float8_e4m3fn else meta
