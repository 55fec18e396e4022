"""How tokens become bytes: the one description that recipes, sizes and kernels share.

An `Encoding` is plain data, part of a recipe. A layer binds it to its heads and to the calibrated
numbers of its channels, as a `LayerEncoding`; kernels read that. The arithmetic is in
`kernels.quantize.reference`. SKVQ's reorder (arXiv:2405.06219, section 3.1) permutes channels so
that those of one group are adjacent. Here each channel has the number of its group instead, and
nothing is permuted, neither the cache nor the weights.

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

import math
from collections.abc import Collection
from dataclasses import MISSING, dataclass, field, fields
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from .errors import RecipeError
from .registry.fields import check_choice, check_fields

PACK_BLOCK = {8: (1, 1), 4: (2, 1), 3: (8, 3), 2: (4, 1), 1.5: (5, 1), 1: (8, 1)}
META = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp8": torch.float8_e4m3fn,
}
GROUP_SIZES = (16, 32, 64, 128)
AXES = ("channel", "token")
SPANS = ("head", "layer")
CLIPS = ("group", "layer")
ROTATIONS = ("none", "group", "head")


def top(bits: float) -> int:
    """Return the highest code of `bits` bits; 1.5 bits have three codes."""
    return 2 if bits == 1.5 else 2 ** int(bits) - 1


def rows_for(tokens: int, bits: float) -> int:
    """Return the byte rows that hold `tokens` codes of `bits` bits."""
    per_block, rows = PACK_BLOCK[bits]
    return -(-tokens // per_block) * rows


@dataclass(frozen=True)
class Encoding:
    """n-bit codes, and a scale and a zero for each group of tokens or channels.

    Attributes:
        bits: 1, 1.5 (three levels, packed at 1.6 bits), 2, 3, 4 or 8.
        axis: "channel" groups tokens of one channel; "token" groups channels of one token.
        group: Tokens or channels in a group: 16, 32, 64 or 128; 0: all channels of a head, for
            axis="token".
        meta: dtype of scale and zero: "fp32", "fp16", "bf16" or "fp8" (e4m3, up to 448). A scale of
            less than 3e-8 is 0 in "fp16", and its group one number: use "bf16" for such small keys
            or values.
        span: A group of channels has channels of one "head", or of the "layer", all key/value heads
            together.
        reorder: Channels that are alike in calibration form a group; sizes differ, `group` is their
            average.
        clip: Groups reach from alpha * min to alpha * max; a number, or calibrated for each "group"
            or for the "layer" (SKVQ, arXiv:2405.06219, equation 3).
        smooth: Channels are divided by their calibrated largest magnitude.
        static: A group's range is that of calibration, so no scale and zero are stored.
        rotation: "head" rotates each head at random before its ranges are taken; "group" rotates
            each group and rounds it to the levels of a normal distribution, with a scale and no
            zero (see `kernels.quantize.hadamard`); or "none".
        pre_rope: Keys are packed before RoPE, which each step applies at their positions.
    """

    bits: int | float
    axis: str
    group: int = 32
    meta: str = "fp16"
    span: str = "head"
    reorder: bool = False
    clip: float | str = 1.0
    smooth: bool = False
    static: bool = False
    rotation: str = "none"
    pre_rope: bool = False

    def __post_init__(self) -> None:
        check_fields(self, "reorder", "smooth", "static", "pre_rope")
        check_choice("bits", self.bits, sorted(PACK_BLOCK))
        check_choice("axis", self.axis, AXES)
        sizes = GROUP_SIZES if self.axis == "channel" else (*GROUP_SIZES, 0)
        check_choice("group", self.group, sizes)
        check_choice("meta", self.meta, META)
        check_choice("span", self.span, SPANS)
        check_choice("rotation", self.rotation, ROTATIONS)
        if isinstance(self.clip, str):
            check_choice("clip", self.clip, CLIPS)
        elif type(self.clip) not in (int, float) or not 0 < self.clip <= 1:
            raise RecipeError(
                f"clip={self.clip!r} must be above 0 and at most 1, or calibrated: "
                f"{' or '.join(CLIPS)}"
            )
        if self.static and self.clip != 1.0:
            raise RecipeError(
                f"clip={self.clip!r} clips a token's own range; leave it out with static=True"
            )
        if not self.group and self.span == "layer":
            raise RecipeError(
                f'group=0 is one head; span="layer" takes {", ".join(map(str, GROUP_SIZES))}'
            )
        if self.regroups and self.axis == "channel":
            raise RecipeError(
                "span, reorder, clip, smooth and static are of the channels of a token; use "
                'axis="token", or leave them out'
            )
        if self.rotation != "none" and self.regroups:
            raise RecipeError(
                f'rotation="{self.rotation}" stands alone: leave out span, reorder, clip, smooth '
                "and static"
            )
        if self.rotation == "group" and self.axis == "channel":
            raise RecipeError(
                'rotation="group" rotates the channels of a token; use axis="token", or '
                'rotation="head", which takes both axes'
            )

    @property
    def regroups(self) -> bool:
        """Whether the channels of a token are regrouped, scaled or clipped first."""
        return self.calibrated or self.span == "layer" or self.clip != 1.0

    @property
    def plain(self) -> bool:
        """Whether code * scale + zero of a head's own groups is the token itself."""
        mixed = self.regroups or self.rotation != "none"
        return not (mixed or self.pre_rope)

    @property
    def calibrated(self) -> bool:
        """Whether a calibration of the model is needed."""
        return self.reorder or self.smooth or self.static or isinstance(self.clip, str)

    @property
    def own_space(self) -> bool:
        """Whether packed tokens are in another space than exact ones: divided or rotated.

        Queries are transformed into the space of packed keys, and sums of packed values are
        transformed back. Static scales absorb the divisor instead.
        """
        return self.rotation != "none" or (self.smooth and not self.static)

    @property
    def zeros(self) -> bool:
        """Whether zeros are stored, in a tensor of their own."""
        return self.rotation != "group"

    @cached_property
    def tokens_per_scale(self) -> int:
        """Tokens that share metadata."""
        return self.group if self.axis == "channel" else 1

    @property
    def block_tokens(self) -> int:
        """Tokens whose bytes and metadata are shared with no others."""
        return math.lcm(PACK_BLOCK[self.bits][0], self.tokens_per_scale)

    @cached_property
    def max_abs(self) -> float:
        """The largest magnitude whose scale and zero can be stored."""
        most = torch.finfo(torch.float32).max / 2
        if self.static:
            return most
        limit = torch.finfo(META[self.meta]).max
        if self.rotation == "group":  # squares are summed in fp32
            return min(limit, 1e17)
        # a scale may be up to twice that over the highest code; ranges are taken in fp32
        limit *= min(1.0, top(self.bits) / 2)
        limit /= 1.5 if self.pre_rope else 1.0  # rotating a pair adds up to a factor of sqrt(2)
        if self.rotation == "head" and self.meta != "fp8":
            limit /= 32  # rotating a head of up to 512 channels; fp8 stores its largest instead
        return min(limit, most)

    def groups(self, heads: int, head_dim: int) -> int:
        """Return the groups of one token (of `group` tokens, per channel) in `heads` heads."""
        if self.axis == "channel":
            return heads * head_dim
        if self.span == "layer":
            return max(1, heads * head_dim // self.group)
        return heads * (head_dim // (self.group or head_dim))

    def groups_read(self, heads: int, head_dim: int) -> int:
        """Return how many scales of a token a head reads, in an encoding per token."""
        return self.groups(heads if self.span == "layer" else 1, head_dim)

    def nbytes(self, tokens: int, head_dim: int, heads: int = 1) -> int:
        """Return the bytes of `tokens` packed tokens of `heads` heads: codes, scale and zero."""
        blocks = tokens // self.tokens_per_scale
        meta = blocks * self.groups(heads, head_dim) * self._group_nbytes
        return rows_for(tokens, self.bits) * head_dim * heads + meta

    def bits_per_value(self, head_dim: int = 0) -> float:
        """Return the effective bits of a packed value: codes + 2 * metadata bits / group.

        head_dim: the channels of a head; needed where the group is a whole head (group=0).
        """
        if not head_dim and not self.group:
            raise RecipeError("group=0 is all channels of a head: give bits_per_value its head_dim")
        per_block, rows = PACK_BLOCK[self.bits]
        return 8 * rows / per_block + 8 * self._group_nbytes / (self.group or head_dim)

    def problems(self, head_dim: int, heads: int = 1) -> list[str]:
        """Return why this encoding does not fit a layer, one sentence each; empty if it does."""
        if self.axis == "channel" or not self.group:
            return []
        whole, what = head_dim, "head_dim"
        if self.span == "layer":
            whole, what = heads * head_dim, "the layer's channels"
        unequal = self.span == "layer" and self.reorder
        if whole % self.group == 0 or (unequal and self.group <= whole):
            return []
        fits = [str(g) for g in GROUP_SIZES if whole % g == 0]
        remedy = f"use {' or '.join(fits)}" if fits else "no group fits; store values exact"
        return [f"group={self.group} does not divide {what}={whole}; {remedy}"]

    def bind(self, heads: int, head_dim: int) -> LayerEncoding:
        """Return the encoding of a layer's keys or values, for one that needs no calibration."""
        group_of = self.consecutive(heads, head_dim) if self.regroups else None
        return LayerEncoding(self, heads, head_dim, group_of)

    def consecutive(self, heads: int, head_dim: int) -> Tensor:
        """Return the group of each channel, consecutive ones together: int64 [heads, head_dim]."""
        group = self.group or head_dim
        if self.span == "layer":
            return (torch.arange(heads * head_dim) // group).view(heads, head_dim)
        each = torch.arange(head_dim) // group
        return each + torch.arange(heads)[:, None] * (head_dim // group)

    @property
    def _group_nbytes(self) -> int:
        """Bytes of a group's scale and zero."""
        return (0 if self.static else 2 if self.zeros else 1) * META[self.meta].itemsize


@dataclass(frozen=True, eq=False)
class LayerEncoding:
    """An encoding bound to the keys or values of one layer.

    group_of: int64 [Hk, D], the group of each channel, for an encoding that regroups channels.
    Calibrated: clip, fp32 [groups] or [1], alpha; divisor, fp32 [Hk, D], by which channels are
    divided first; low, high, fp32 [groups], static ranges.
    """

    encoding: Encoding
    heads: int
    head_dim: int
    group_of: Tensor | None = None
    clip: Tensor | None = None
    divisor: Tensor | None = None
    low: Tensor | None = None
    high: Tensor | None = None
    prepared: dict[Any, Any] = field(default_factory=dict, init=False, repr=False)
    """Tables that backends made of it, with memory addresses; a copy starts empty."""

    def __getstate__(self) -> dict[str, Any]:
        return {**{x.name: self.__dict__[x.name] for x in fields(self)}, "prepared": {}}

    def to(self, device: torch.device) -> LayerEncoding:
        """Return it with its tensors on a device."""
        if all(x.device == device for x in self.tensors.values()):
            return self
        moved = (None if x is None else x.to(device) for x in map(self.tensors.get, TENSORS))
        return LayerEncoding(self.encoding, self.heads, self.head_dim, *moved)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The tensors that are given, by name."""
        named = {name: getattr(self, name) for name in TENSORS}
        return {name: x for name, x in named.items() if x is not None}

    @cached_property
    def group(self) -> int:
        """Tokens or channels in a group."""
        return self.encoding.group or self.head_dim

    @cached_property
    def meta(self) -> torch.dtype:
        """The dtype of scale and zero."""
        return META[self.encoding.meta]

    @cached_property
    def alpha(self) -> Tensor | float:
        """The clip factor: a number, or fp32 [groups] or [1]."""
        if self.clip is not None:
            return self.clip
        assert not isinstance(self.encoding.clip, str), "calibration gives the clip factors"
        return self.encoding.clip

    @cached_property
    def rotation_size(self) -> int:
        """Channels that are rotated together, or 0."""
        return {"none": 0, "group": self.group, "head": self.head_dim}[self.encoding.rotation]

    @property
    def scales(self) -> tuple[int, int]:
        """The rows, and the numbers per row, of the scales of all heads."""
        encoding = self.encoding
        if encoding.static:
            return 1, 0
        if self.group_of is not None:
            return 1, int(self.group_of.max()) + 1
        return self.heads, self.head_dim // (1 if encoding.axis == "channel" else self.group)

    @cached_property
    def static(self) -> tuple[Tensor, Tensor] | None:
        """Scale and zero of all tokens, fp32 [1, Hk, 1, D]; None where tokens have their own."""
        if not self.encoding.static:
            return None
        assert self.low is not None
        assert self.high is not None
        assert self.group_of is not None
        meta = metadata(self.low, self.high, self.encoding.bits, self.meta)
        scale, zero = (per_channel(x.view(1, 1, 1, -1), self.group_of) for x in meta)
        return scale, zero

    @cached_property
    def by_layer(self) -> tuple[Tensor, Tensor]:
        """group_of as int32 [Hk, D], and where each head begins to count, int64 [Hk]: at 0."""
        assert self.group_of is not None
        begin = torch.zeros(self.heads, dtype=torch.long, device=self.group_of.device)
        return self.group_of.int().contiguous(), begin

    @cached_property
    def by_head(self) -> tuple[Tensor, Tensor]:
        """The same, where each head counts from its first group."""
        assert self.group_of is not None
        first = self.group_of.amin(dim=1)
        return (self.group_of - first[:, None]).int().contiguous(), first.contiguous()

    @cached_property
    def multiplied(self) -> tuple[Tensor, Tensor]:
        """Static scale and zero times the divisor: fp32 [1, Hk, 1, D]."""
        assert self.static is not None
        times = 1.0 if self.divisor is None else self.divisor[:, None]
        return (self.static[0] * times).contiguous(), (self.static[1] * times).contiguous()


TENSORS = ("group_of", "clip", "divisor", "low", "high")


def stored_scale(scale: Tensor, meta: torch.dtype) -> Tensor:
    """Return a scale, 0 or more, as stored: fp8 neither rounds it to 0 nor lets it overflow."""
    if meta == torch.float8_e4m3fn:
        scale = torch.where(scale > 0, scale.clamp(2.0**-9, torch.finfo(meta).max), scale)
    return scale.to(meta)


def metadata(low: Tensor, high: Tensor, bits: float, meta: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return scale and zero, as stored, of groups from `low` to `high` (fp32, any shape).

    Which of 0 and -0 is the less depends on the order in which they are compared: 0 it is.
    """
    scale, zero = stored_scale((high - low) / top(bits) + 0.0, meta), low + 0.0
    if meta == torch.float8_e4m3fn:
        most = torch.finfo(meta).max
        zero = zero.clamp(-most, most)
    return scale, zero.to(meta)


def per_channel(meta: Tensor, group_of: Tensor) -> Tensor:
    """Spread numbers of groups [B, 1, N, groups] over their channels: fp32 [B, Hk, N, D]."""
    by_channel = meta[:, 0].float().index_select(-1, group_of.reshape(-1))  # [B, N, Hk * D]
    return by_channel.unflatten(-1, group_of.shape).transpose(1, 2)


def unknown_fields(encoding: Any, known: Collection[str]) -> list[str]:
    """Return a sentence for each field of an encoding that is set and not among the known ones.

    So a backend refuses by name what was added after it was written. Anything that lacks a known
    field is refused by the name of its type.
    """
    every = fields(encoding) if isinstance(encoding, Encoding) else ()
    if not {field.name for field in every}.issuperset(known):
        return [f"{type(encoding).__name__} is not supported"]
    return [
        f"{field.name}={getattr(encoding, field.name)} is not supported"
        for field in every
        if field.name not in known
        and (field.default is MISSING or getattr(encoding, field.name) != field.default)
    ]
