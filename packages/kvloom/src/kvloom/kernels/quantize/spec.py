"""How tokens become codes: what a kernel needs of a format and of a layer's channels.

Decides nothing about when tokens are packed. `unknown_spec` names what a kernel cannot know, so
that a spec with a new field or value is refused rather than packed wrongly.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import balanced
from .byte_layout import PACK_BLOCK

METAS = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float8_e4m3fn: "fp8",
}


@dataclass(frozen=True, eq=False)
class QuantSpec:
    """What shares a scale, how it is found and how it is stored.

    axis: "channel" for groups of `group` tokens of one channel, "token" for groups of `group`
    channels of one token. group_of: int64 [Hk, D], replaces these groups by any channels of all
    heads of a token. With group_of: clip, alpha, one for all or one per group; and divisor,
    fp32 [Hk, D], by which channels are divided first. static: scale and zero fp32 [1, Hk, 1, D],
    the same for all tokens and not stored. rotated: see `rotated`. hadamard: whole heads are
    rotated first, as in `rotated`, and their ranges are those of the rotated channels. boost: so
    many channels of each group of tokens have two more bits (see `boosted`). balance: with
    hadamard, tiles of so many tokens are normalized before (see `balanced`).
    """

    bits: float
    axis: str
    group: int
    meta: torch.dtype
    group_of: Tensor | None = None
    clip: Tensor | float = 1.0
    divisor: Tensor | None = None
    static: tuple[Tensor, Tensor] | None = None
    rotated: bool = False
    hadamard: bool = False
    boost: int = 0
    balance: int = 0
    prepared: dict[Any, Any] = field(default_factory=dict, repr=False)
    """Tables that backends made of it, with memory addresses; a copy starts empty."""

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "prepared": {}}

    @cached_property
    def tokens_per_scale(self) -> int:
        """Tokens that share a scale."""
        return self.balance or (self.group if self.axis == "channel" else 1)

    @property
    def zeros(self) -> bool:
        """Whether zeros are stored, in a tensor of their own."""
        return not (self.rotated or self.balance)

    @cached_property
    def kind(self) -> Hashable:
        """Everything of it that decides whether a kernel covers it."""
        how = self.rotated, self.hadamard, self.boost, self.balance
        return self.bits, self.axis, self.meta, how, tuple(unknown_spec(self))

    def scales(self, heads: int, d: int) -> tuple[int, int]:
        """Return the rows, and the numbers per row, of the scales of `heads` heads."""
        if self.static is not None:
            return 1, 0
        if self.group_of is not None:
            return 1, int(self.group_of.max()) + 1
        if self.balance:
            return heads, balanced.numbers(self.axis, self.balance, d)
        return heads, d if self.axis == "channel" else d // self.group


class PackedTensors(NamedTuple):
    """Storage of packed tokens, token 0 first.

    codes: uint8 [B, Hk, rows, D + boost]. scale, zero: [B, Hk, N/G, D], [B, Hk, N, D/G] or, with
    groups of all heads, [B, 1, N, groups]; fp8 as bytes or as numbers. Rotated groups have no
    zeros. A row of scales of a tile has its scales, its zeros and its factors, and `zero` is empty.
    """

    codes: Tensor
    scale: Tensor
    zero: Tensor


class RopeAngles(NamedTuple):
    """The rotation of tokens before they are packed, or after they are unpacked (see `rope`).

    cos, sin: fp32 [B or 1, Hk or 1, N, dims / 2]; (a, b) becomes (a cos - b sin, b cos + a sin),
    where a pair is channels (2i, 2i + 1) if interleaved, else (i, i + dims / 2).
    """

    cos: Tensor
    sin: Tensor
    interleaved: bool = False


_FIELDS = {one.name for one in fields(QuantSpec)}


def kind_of(spec: Any) -> Hashable:
    """Return `QuantSpec.kind`, or the name of another type, which no kernel covers."""
    return spec.kind if isinstance(spec, QuantSpec) else type(spec).__qualname__


def unknown_spec(spec: QuantSpec) -> list[str]:
    """Return why no kernel may pack by a spec: a field or a value that kernels do not know."""
    if not isinstance(spec, QuantSpec):
        return [f"{type(spec).__name__} is not a QuantSpec"]
    found = unknown_fields(spec, _FIELDS)
    if spec.bits not in PACK_BLOCK:
        found.append(f"bits={spec.bits} is none of {', '.join(map(str, PACK_BLOCK))}")
    if spec.axis not in ("channel", "token"):
        found.append(f"axis={spec.axis!r} is neither 'channel' nor 'token'")
    if spec.meta not in METAS:
        found.append(f"meta={spec.meta} is none of {', '.join(METAS.values())}")
    return found


def unknown_fields(x: Any, known: Collection[str]) -> list[str]:
    """Return a sentence for each field of a dataclass that is set and not among the known ones.

    Anything that lacks a known field is refused by the name of its type.
    """
    every = fields(x) if is_dataclass(x) else ()
    if not {one.name for one in every}.issuperset(known):
        return [f"{type(x).__name__} is not supported"]
    found = []
    for one in every:
        if one.name not in known:
            value = getattr(x, one.name)
            if one.default is MISSING or value != one.default:
                found.append(f"{one.name}={value} is not supported")
    return found
