"""Formats of the store: their options, the checks of these, and their exact size.

The arithmetic of the built-in quantizer is in `kernels.quantize`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, TypeVar

import torch
from torch import Tensor

from ..errors import RecipeError
from ..kernels.quantize import balanced, boosted
from ..kernels.quantize import reference as ref
from ..registry import Registry
from ..registry.fields import check_fields
from .transform import Transform, choice

F = TypeVar("F", bound="Format")

META = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp8": torch.float8_e4m3fn,
}
GROUP_SIZES = (16, 32, 64, 128)
AXES = ("channel", "token")
BOOSTS = (0, 8, 16, 32, 64)
BALANCES = (0, 16, 32, 64, 128)


@dataclass(frozen=True)
class Format:
    """Base class of formats; derive a frozen dataclass whose fields are the format's options.

    A format of another distribution defines `pack`, `unpack` and `nbytes`, for exact tokens x [B,
    Hk, T, D] in the model's dtype, after RoPE; T is a multiple of `unit`. The built-in quantizer
    `Packed` is packed and unpacked by kvloom's kernels instead.

    Attributes:
        kind: The name in recipes.
        unit: Tokens that are packed together; a class attribute or a field.
    """

    kind: ClassVar[str] = ""
    unit = 1  # not annotated: a field of a derived class keeps its place among the others

    def pack(self, x: Tensor) -> tuple[Tensor, ...]:
        """Pack x [B, Hk, T, D] into tensors [B, Hk, n * T / unit, ...], n constant for each."""
        raise NotImplementedError

    def unpack(self, tensors: tuple[Tensor, ...], dtype: torch.dtype) -> Tensor:
        """Return the tokens [B, Hk, T, D] of packed tensors, in dtype."""
        raise NotImplementedError

    def nbytes(self, tokens: int, head_dim: int, heads: int = 1) -> int:
        """Return the bytes of `tokens` packed tokens of `heads` key/value heads, batch 1."""
        raise NotImplementedError

    def problems(self, head_dim: int, heads: int = 1) -> list[str]:
        """Return why this format does not fit a layer, one sentence each; empty if it does."""
        return []

    def to_pack(self, tokens: int, recent: int, prompt: bool = True) -> int:
        """Return how many of `tokens` exact tokens to pack; the newest `recent` stay exact.

        prompt: whether these tokens are a prompt, which some formats pack at once.
        """
        return max(0, tokens - recent) // self.unit * self.unit

    def bits_a_value(self, head_dim: int = 0) -> float:
        """Return the effective bits of a packed value, metadata included."""
        if not head_dim:
            raise RecipeError(f"give bits_a_value of format {self.kind!r} its head_dim")
        return 8 * self.nbytes(self.whole, head_dim) / (self.whole * head_dim)

    @property
    def whole(self) -> int:
        """Tokens whose bytes and metadata are shared with no others."""
        return self.unit

    @property
    def calibrated(self) -> bool:
        """Whether a calibration of the model is needed."""
        return False

    @property
    def largest(self) -> float:
        """The largest magnitude of a value that can be packed."""
        return math.inf


@dataclass(frozen=True)
class Packed(Format):
    """Asymmetric n-bit codes with one scale and zero a group (see `kernels.quantize.reference`).

    Attributes:
        bits: 1, 1.5 (three levels, packed at 1.6 bits), 2, 3, 4 or 8.
        axis: "channel" groups tokens of one channel; "token" groups channels of one token,
            consecutive ones unless a transform regroups them.
        group: Tokens or channels in a group: 16, 32, 64 or 128; 0: all channels of a head, for
            axis="token".
        meta: dtype of scale and zero: "fp32", "fp16", "bf16" or "fp8" (e4m3, up to 448).
        residual: Decoding packs when this many exact tokens have gathered; per channel a multiple
            of `group`.
        unit: The number of tokens that are packed at once is a multiple of this. None: `residual`,
            as in KIVI.
        transform: How channels are grouped and scaled before they are quantized.
        pre_rope: Keys are packed before RoPE, which each step applies at their positions.
        boost: The number of channels of a head that have 4 bits: 0, 8, 16, 32 or 64, those with the
            largest range in a group of tokens (keys with 2 bits per channel).
        balance: The number of tokens of a rotated head in a tile, whose tokens and channels are
            divided by their standard deviations in turns (see `kernels.quantize.balanced`). Then
            `group` must equal `balance` per channel, and 0 per token. 0: no tiles.
    """

    bits: int | float
    axis: str
    group: int = 32
    meta: str = "fp16"
    residual: int = 1
    unit: int | None = None  # type: ignore[assignment]
    transform: Transform | None = None
    pre_rope: bool = False
    boost: int = 0
    balance: int = 0
    kind: ClassVar[str] = "packed"

    def __post_init__(self) -> None:
        check_fields(self, "unit", "transform", "pre_rope")
        choice("bits", self.bits, tuple(sorted(ref.PACK_BLOCK)))
        choice("axis", self.axis, AXES)
        choice("group", self.group, GROUP_SIZES if self.axis == "channel" else (*GROUP_SIZES, 0))
        if not self.group and self.transform is not None and self.transform.span == "layer":
            raise RecipeError(
                f'group=0 is one head; span="layer" takes {", ".join(map(str, GROUP_SIZES))}'
            )
        choice("meta", self.meta, tuple(META))
        if type(self.residual) is not int or self.residual < 1:
            raise RecipeError(
                f"residual={self.residual!r} must be a whole number of tokens, 1 or more"
            )
        if self.axis == "channel" and self.residual % self.group:
            raise RecipeError(
                f"residual={self.residual} is not a multiple of group={self.group}: per channel, "
                f"whole groups of tokens are packed; use {self.group} or {4 * self.group}"
            )
        if self.unit is not None and (self.unit < 1 or self.residual % self.unit):
            raise RecipeError(
                f"unit={self.unit} does not divide residual={self.residual}; use a unit that does"
            )
        if self.axis == "channel" and self.unit is not None and self.unit % self.group:
            raise RecipeError(
                f"unit={self.unit} is not a multiple of group={self.group}: per channel, whole "
                f"groups of tokens are packed; use {self.group}"
            )
        choice("boost", self.boost, BOOSTS)
        if self.boost and (self.bits != boosted.BITS or self.axis != "channel"):
            raise RecipeError(
                f"boost={self.boost} gives channels of 2 bits two more; use bits=2 and "
                'axis="channel", or leave boost out'
            )
        if self.boost and self.transform is not None:
            raise RecipeError(
                f"boost={self.boost} finds channels that stand out, and a transform removes them; "
                "leave one of them out"
            )
        if self.axis == "channel" and self.transform is not None and not self.transform.hadamard:
            raise RecipeError(
                'a transform regroups the channels of a token; use axis="token", or '
                "Transform(hadamard=True), which takes both axes"
            )
        choice("balance", self.balance, BALANCES)
        if self.balance:
            self._check_balance()

    def _check_balance(self) -> None:
        """Raise `RecipeError` unless tiles fit the rest."""
        if self.transform is None or not self.transform.hadamard:
            raise RecipeError(
                f"balance={self.balance} needs channels that are alike; use "
                "transform=Transform(hadamard=True), or leave balance out"
            )
        group = self.balance if self.axis == "channel" else 0
        if self.group != group:
            what = "a tile is a group" if group else "a token of a tile is a group"
            raise RecipeError(
                f"balance={self.balance} does not combine with group={self.group}: per "
                f"{self.axis}, {what}; use group={group}"
            )
        if (self.unit or self.residual) % self.balance:
            raise RecipeError(
                f"unit={self.unit} and residual={self.residual} pack no whole tiles of "
                f"balance={self.balance} tokens; use residual={self.balance}"
            )

    @property
    def calibrated(self) -> bool:
        """Whether a calibration of the model is needed."""
        return self.transform is not None and self.transform.calibrated

    @cached_property
    def largest(self) -> float:
        """The largest magnitude whose scale and zero can be stored."""
        if self.transform is not None and self.transform.static:
            return torch.finfo(torch.float32).max / 2
        if self.transform is not None and self.transform.rotate:  # squares are summed in fp32
            return min(torch.finfo(META[self.meta]).max, 1e17)
        # a scale may be up to twice that over the highest code; ranges are taken in fp32
        largest = torch.finfo(META[self.meta]).max * min(1.0, ref.top(self.bits) / 2)
        largest /= 1.5 if self.pre_rope else 1.0  # rotating a pair adds up to a factor of sqrt(2)
        if self.transform is not None and self.transform.hadamard and self.meta != "fp8":
            largest /= 32  # rotating a head of up to 512 channels; fp8 stores its largest instead
        if self.balance:  # squares of a tile are summed in fp32
            largest = min(largest, 1e16)
        return min(largest, torch.finfo(torch.float32).max / 2)

    @property
    def in_blocks(self) -> bool:
        """Whether tokens are packed so rarely that copying them each time costs little."""
        return self.residual >= 32

    def to_pack(self, tokens: int, recent: int, prompt: bool = True) -> int:
        """Return how many of `tokens` exact tokens to pack; the newest `recent` stay exact."""
        due, unit = max(0, tokens - recent), self.unit or self.residual
        return due // unit * unit if prompt or due >= self.residual else 0

    def groups(self, heads: int, head_dim: int) -> int:
        """Return the groups of one token (of `group` tokens, per channel) in `heads` heads."""
        if self.axis == "channel":
            return heads * head_dim
        if self.transform is not None and self.transform.span == "layer":
            return max(1, heads * head_dim // self.group)
        return heads * (head_dim // (self.group or head_dim))

    def bits_a_value(self, head_dim: int = 0) -> float:
        """Return the effective bits of a packed value: codes + 2 * metadata bits / group.

        head_dim: the channels of a head; needed where the group is a whole head (group=0), with
        boost and with balance.
        """
        if not self.group and not head_dim:
            raise RecipeError("group=0 is one head: give bits_a_value its head_dim")
        per_block, rows = ref.PACK_BLOCK[self.bits]
        if self.boost and not head_dim:
            raise RecipeError("boost counts channels of a head: give bits_a_value its head_dim")
        if self.balance:
            if not head_dim:
                raise RecipeError(
                    "balance scales channels of a head: give bits_a_value its head_dim"
                )
            return 8 * self.nbytes(self.whole, head_dim) / (self.whole * head_dim)
        wider = 1 + self.boost / head_dim if self.boost else 1
        return 8 * rows / per_block * wider + 8 * self._group_nbytes / (self.group or head_dim)

    def nbytes(self, tokens: int, head_dim: int, heads: int = 1) -> int:
        """Return the bytes of `tokens` packed tokens of `heads` heads: codes, scale and zero."""
        blocks = tokens // self.tokens_per_scale
        if self.balance:
            numbers = balanced.numbers(self.axis, self.balance, head_dim)
            meta = blocks * heads * numbers * META[self.meta].itemsize
        else:
            meta = blocks * self.groups(heads, head_dim) * self._group_nbytes
        return ref.rows_for(tokens, self.bits) * (head_dim + self.boost) * heads + meta

    @property
    def tokens_per_scale(self) -> int:
        """Tokens that share metadata."""
        return self.balance or (self.group if self.axis == "channel" else 1)

    @property
    def whole(self) -> int:
        """Tokens whose bytes and metadata are shared with no others."""
        return math.lcm(ref.PACK_BLOCK[self.bits][0], self.tokens_per_scale)

    def problems(self, head_dim: int, heads: int = 1) -> list[str]:
        """Return why this format does not fit a layer, one sentence each; empty if it does."""
        if self.boost >= head_dim:
            fits = [str(n) for n in BOOSTS if n < head_dim]
            return [
                f"boost={self.boost} leaves no channel of head_dim={head_dim} at 2 bits; use "
                f"{' or '.join(fits)}"
            ]
        if self.axis == "channel" or not self.group:
            return []
        whole, what = head_dim, "head_dim"
        if self.transform is not None and self.transform.span == "layer":
            whole, what = heads * head_dim, "the layer's channels"
        unequal = whole != head_dim and self.transform is not None and self.transform.reorder
        if whole % self.group == 0 or (unequal and self.group <= whole):
            return []
        fits = [str(g) for g in GROUP_SIZES if whole % g == 0]
        remedy = f"use {' or '.join(fits)}" if fits else "no group fits; store values exact"
        return [f"group={self.group} does not divide {what}={whole}; {remedy}"]

    @property
    def _group_nbytes(self) -> int:
        """Bytes of a group's scale and zero."""
        numbers = 2
        if self.transform is not None:
            numbers = 0 if self.transform.static else 1 if self.transform.rotate else 2
        return numbers * META[self.meta].itemsize


@dataclass(frozen=True)
class Store:
    """Formats of keys and values.

    Attributes:
        keys: None: exact, in the model's dtype.
        values: None: exact, in the model's dtype.
        calibration: The file that `kvloom calibrate` wrote, for formats that need one; None: the
            file in the folder of the model's weights.
    """

    keys: Format | None = None
    values: Format | None = None
    calibration: str | None = None

    def __post_init__(self) -> None:
        check_fields(self, "keys", "values", "calibration")
        if isinstance(self.values, Packed) and self.values.pre_rope:
            raise RecipeError("values have no rotary embedding; use pre_rope for keys alone")
        if isinstance(self.values, Packed) and self.values.boost:
            raise RecipeError("values have no channels that stand out; use boost for keys alone")

    @property
    def exact(self) -> bool:
        """Whether nothing is packed."""
        return self.keys is None and self.values is None

    @property
    def fixed_buffers(self) -> bool:
        """Whether all buffers exist before the first token; other formats make theirs later."""
        return all(fmt is None or isinstance(fmt, Packed) for fmt in (self.keys, self.values))

    @property
    def sides(self) -> dict[str, Format]:
        """The formats of the sides that are packed, by "keys" and "values"."""
        both = {"keys": self.keys, "values": self.values}
        return {side: fmt for side, fmt in both.items() if fmt is not None}

    @property
    def quantized(self) -> dict[str, Packed]:
        """The formats of kvloom's own quantizer, by "keys" and "values"."""
        return {side: fmt for side, fmt in self.sides.items() if isinstance(fmt, Packed)}

    @property
    def block_tokens(self) -> int:
        """Tokens of the smallest block that shares no byte or scale with others, on both sides."""
        return math.lcm(*(fmt.whole for fmt in self.sides.values()))

    @property
    def pre_rope(self) -> bool:
        """Whether the model's rotary embedding is needed."""
        return isinstance(self.keys, Packed) and self.keys.pre_rope

    @property
    def calibrated(self) -> bool:
        """Whether a calibration of the model is needed."""
        return any(fmt.calibrated for fmt in self.sides.values())

    def problems(self, head_dim: int, heads: int = 1) -> list[str]:
        """Return why these formats do not fit a layer, one sentence each."""
        return [
            f"{side}: {problem}"
            for side, fmt in self.sides.items()
            for problem in fmt.problems(head_dim, heads)
        ]


FORMATS: Registry[type[Format]] = Registry(
    "format", {Packed.kind: Packed}, Format, ("pack", "unpack", "nbytes")
)


def register_format(cls: type[F]) -> type[F]:
    """Make a format available to recipes by its `kind`; usable as a decorator.

    Args:
        cls: A frozen dataclass derived from `Format`.

    Raises:
        RecipeError: It is another class, or its name is taken.
    """
    FORMATS.register(cls)
    return cls
