"""Quantize tokens to codes and back, with the calibrated numbers of a layer's channels.

Decides which channels share a scale, and how they are transformed first; the arithmetic is in
`kernels.quantize`. SKVQ's reorder (arXiv:2405.06219, section 3.1) permutes channels so that those
of one group are adjacent. Here each channel has the number of its group instead, and nothing is
permuted, neither the cache nor the weights.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ..errors import CacheMisuse
from ..kernels.attend.kv_view import Channelwise
from ..kernels.quantize import reference as ref
from ..kernels.quantize.rotated import dequantize_rotated, quantize_rotated, rotate, unrotate
from ..kernels.quantize.spec import QuantSpec
from ..positions.rope import Rope
from .formats import META, Packed
from .transform import Transform


class Channels(NamedTuple):
    """Calibrated numbers of the channels of one layer's keys or values.

    group_of: int64 [Hk, D], each channel's group (None: consecutive channels). clip: fp32 [groups]
    or [1], alpha. divisor: fp32 [Hk, D]. low, high: fp32 [groups], static ranges.
    """

    group_of: Tensor | None = None
    clip: Tensor | None = None
    divisor: Tensor | None = None
    low: Tensor | None = None
    high: Tensor | None = None


class LayerMetadata(NamedTuple):
    """What a layer needs of its model before its first token: calibrated channels, and the rope.

    head: the model's number of the first key/value head, where this process holds a part of them.
    """

    keys: Channels | None = None
    values: Channels | None = None
    rope: Rope | None = None
    head: int = 0


class Codec(Protocol):
    """One way from tokens [B, Hk, N, D] to (codes uint8, scale, zero) and back.

    channelwise: what a kernel needs beside the format. spec: what a quantizing kernel needs.
    """

    @property
    def channelwise(self) -> Channelwise: ...  # noqa: D102

    @property
    def spec(self) -> QuantSpec:
        """The codec as kernels read it."""

    def quantize(self, x: Tensor, nonpadding: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Return codes, scale and zero; nonpadding: bool [B, 1 or Hk, N], False for padding."""

    def dequantize(self, codes: Tensor, scale: Tensor, zero: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the tokens [B, Hk, N, D] of codes, in dtype."""


class Plain:
    """Groups of consecutive tokens or channels of one head."""

    def __init__(self, fmt: Packed, head_dim: int) -> None:
        self.fmt, self.group = fmt, fmt.group or head_dim
        self.spec = QuantSpec(fmt.bits, fmt.axis, self.group, META[fmt.meta])
        self.channelwise = Channelwise()

    def quantize(self, x: Tensor, nonpadding: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Return codes, scale and zero; nonpadding: bool [B, 1 or Hk, N], False for padding."""
        fmt = self.fmt
        return ref.quantize(x, fmt.bits, fmt.axis, self.group, META[fmt.meta], nonpadding)

    def dequantize(self, codes: Tensor, scale: Tensor, zero: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the tokens [B, Hk, N, D] of codes, in dtype."""
        return ref.dequantize(codes, scale, zero, self.fmt.axis, self.group, dtype)


class Boosted(Plain):
    """The same with two more bits for some channels; codes have columns for these behind D."""

    def __init__(self, fmt: Packed, head_dim: int) -> None:
        super().__init__(fmt, head_dim)
        self.spec = replace(self.spec, boost=fmt.boost)

    def quantize(self, x: Tensor, nonpadding: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Return codes, scale and zero; nonpadding: bool [B, 1 or Hk, N], False for padding."""
        return ref.boosted(x, self.group, self.fmt.boost, META[self.fmt.meta], nonpadding)

    def dequantize(self, codes: Tensor, scale: Tensor, zero: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the tokens [B, Hk, N, D] of codes, in dtype."""
        return ref.unboosted(codes, scale, zero, self.group, self.fmt.boost).to(dtype)


class Hadamard(Plain):
    """The same of heads that are rotated first; scales and zeros are those of rotated channels."""

    def __init__(self, fmt: Packed, head_dim: int) -> None:
        super().__init__(fmt, head_dim)
        self.spec = replace(self.spec, hadamard=True)
        self.channelwise = Channelwise(rotated=head_dim)

    def quantize(self, x: Tensor, nonpadding: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Return codes, scale and zero; nonpadding: bool [B, 1 or Hk, N], False for padding."""
        return super().quantize(rotate(x.float()), nonpadding)

    def dequantize(self, codes: Tensor, scale: Tensor, zero: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the tokens [B, Hk, N, D] of codes, in dtype."""
        return unrotate(super().dequantize(codes, scale, zero, torch.float32)).to(dtype)


class Balanced(Hadamard):
    """The same in tiles that are normalized first; a tile has one row of scales, with zeros."""

    def __init__(self, fmt: Packed, head_dim: int) -> None:
        super().__init__(fmt, head_dim)
        self.spec = replace(self.spec, balance=fmt.balance)

    def quantize(self, x: Tensor, nonpadding: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Return codes, scales [B, Hk, N/T, ...] and an empty zero; nonpadding: as in `Plain`."""
        codes, scale = ref.balanced(rotate(x.float()), self.spec, nonpadding)
        return codes, scale, scale[..., :0]

    def dequantize(self, codes: Tensor, scale: Tensor, zero: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the tokens [B, Hk, N, D] of codes, in dtype."""
        return unrotate(ref.unbalanced(codes, scale, self.spec)).to(dtype)


class Mapped:
    """Groups of any channels of a token; scale and zero [B, 1, N, groups], or none if static."""

    def __init__(self, fmt: Packed, group_of: Tensor, channels: Channels) -> None:
        assert fmt.transform is not None
        self.fmt, self.group_of = fmt, group_of
        clip = fmt.transform.clip if channels.clip is None else channels.clip
        assert not isinstance(clip, str), "calibration gives the clip factors"
        self.clip = clip
        self.divisor = None if channels.divisor is None else channels.divisor[:, None, :]
        self.static: tuple[Tensor, Tensor] | None = None
        if fmt.transform.static:
            assert channels.low is not None
            assert channels.high is not None
            meta = ref.metadata(channels.low, channels.high, fmt.bits, META[fmt.meta])
            scale, zero = (ref.spread(m.view(1, 1, 1, -1), group_of) for m in meta)
            self.static = scale, zero
        self.spec = QuantSpec(
            fmt.bits, "token", 0, META[fmt.meta], group_of, clip, channels.divisor, self.static
        )
        mapped = None if self.static else group_of
        self.channelwise = Channelwise(mapped, self.static, self.divisor)

    def quantize(self, x: Tensor, nonpadding: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Return codes, scale and zero; padding needs no mask, as tokens share no group."""
        fmt = self.fmt
        x = x.float() if self.divisor is None else x.float() / self.divisor
        if self.static is None:
            return ref.quantize_mapped(x, fmt.bits, self.group_of, META[fmt.meta], self.clip)
        none = x.new_empty(x.shape[0], 1, x.shape[2], 0, dtype=META[fmt.meta])
        return ref.encode(x, *self.static, fmt.bits), none, none

    def dequantize(self, codes: Tensor, scale: Tensor, zero: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the tokens [B, Hk, N, D] of codes, in dtype."""
        if self.static is None:
            x = ref.dequantize_mapped(codes, scale, zero, self.group_of, torch.float32)
        else:
            x = torch.addcmul(self.static[1], codes.float(), self.static[0])
        return (x if self.divisor is None else x * self.divisor).to(dtype)


class Rotated:
    """Rotated groups of one head with a scale [B, Hk, N, D/G] and no zero."""

    def __init__(self, fmt: Packed, head_dim: int) -> None:
        self.fmt, self.group = fmt, fmt.group or head_dim
        self.spec = QuantSpec(fmt.bits, "token", self.group, META[fmt.meta], rotated=True)
        self.channelwise = Channelwise(rotated=self.group)

    def quantize(self, x: Tensor, nonpadding: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Return codes, scale and an empty zero; tokens are independent: padding needs no mask."""
        fmt = self.fmt
        codes, scale = quantize_rotated(x, fmt.bits, self.group, META[fmt.meta])
        return codes, scale, scale[..., :0]

    def dequantize(self, codes: Tensor, scale: Tensor, zero: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the tokens [B, Hk, N, D] of codes, in dtype."""
        return dequantize_rotated(codes, scale, self.fmt.bits, self.group, dtype)


def codec(fmt: Packed, channels: Channels | None, like: Tensor) -> Codec:
    """Return the codec of a format for tokens shaped as `like` [B, Hk, N, D], on its device.

    Raises `CacheMisuse` for a calibrated format without channels.
    """
    transform = fmt.transform
    if transform is None:
        return (Boosted if fmt.boost else Plain)(fmt, like.shape[3])
    if transform.rotate:
        return Rotated(fmt, like.shape[3])
    if transform.hadamard:
        return (Balanced if fmt.balance else Hadamard)(fmt, like.shape[3])
    if channels is None:
        if transform.calibrated:
            raise CacheMisuse(
                "a calibrated format needs the calibration of its layer; give it as channels"
            )
        channels = Channels()
    channels = Channels(*(None if x is None else x.to(like.device) for x in channels))
    group_of = channels.group_of
    if group_of is None:
        group = fmt.group or like.shape[3]
        group_of = consecutive(group, transform, like.shape[1], like.shape[3]).to(like.device)
    return Mapped(fmt, group_of, channels)


def consecutive(group: int, transform: Transform, heads: int, dim: int) -> Tensor:
    """Return the group of each channel, consecutive ones together: int64 [heads, dim]."""
    if transform.span == "layer":
        return (torch.arange(heads * dim) // group).view(heads, dim)
    each = torch.arange(dim) // group
    return each + torch.arange(heads)[:, None] * (dim // group)
