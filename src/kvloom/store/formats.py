"""Formats of the store: what a recipe may ask of keys and values, and its exact size.

Decides validity and byte counts; the arithmetic is in `kernels.quant`, the containers in `lane`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..errors import RecipeError
from ..kernels.quant import ref

META = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
GROUPS = (16, 32, 64, 128)
AXES = ("channel", "token")


@dataclass(frozen=True)
class Packed:
    """Asymmetric n-bit codes with one scale and zero a group (see `kernels.quant.ref`).

    bits: 2, 3, 4 or 8. axis: "channel" groups `group` consecutive tokens of one channel, "token"
    groups `group` consecutive channels of one token. meta: dtype of scale and zero. residual: so
    many exact tokens are gathered before any is packed; up to residual - 1 wait. unit: multiples
    of it are packed, and a prompt at once (default: the residual, as KIVI; MiniKV: the group).
    """

    bits: int
    axis: str
    group: int = 32
    meta: str = "fp16"
    residual: int = 1
    unit: int | None = None

    def __post_init__(self) -> None:
        _choice("bits", self.bits, tuple(sorted(ref.ATOM)))
        _choice("axis", self.axis, AXES)
        _choice("group", self.group, GROUPS)
        _choice("meta", self.meta, tuple(META))
        if type(self.residual) is not int or self.residual < 1:
            raise RecipeError(
                f"residual={self.residual!r} must be a whole number of tokens, 1 or more"
            )
        if self.unit is not None and (self.unit < 1 or self.residual % self.unit):
            raise RecipeError(f"unit={self.unit} does not divide residual={self.residual}")
        if self.axis == "channel" and (self.unit or self.residual) % self.group:
            raise RecipeError(
                f"residual={self.residual} is not a multiple of group={self.group}: per channel, "
                f"whole groups of tokens are packed; use {self.group} or {4 * self.group}"
            )

    @property
    def in_blocks(self) -> bool:
        """Whether tokens are packed so rarely that a copy each time is little beside their use."""
        return self.residual >= 32

    def to_pack(self, tokens: int, recent: int, prompt: bool = True) -> int:
        """How many of `tokens` exact tokens are packed when the newest `recent` stay exact."""
        due, unit = max(0, tokens - recent), self.unit or self.residual
        return due // unit * unit if prompt or due >= self.residual else 0

    def bits_a_value(self) -> float:
        """Bits a packed value costs, scale and zero included: b + 2 * metadata bits / G."""
        return self.bits + 2 * 8 * META[self.meta].itemsize / self.group

    def nbytes(self, tokens: int, head_dim: int) -> int:
        """Bytes of `tokens` packed tokens of one head: codes, scale and zero."""
        groups = tokens * head_dim // self.group
        return ref.rows_for(tokens, self.bits) * head_dim + 2 * groups * META[self.meta].itemsize

    def problems(self, head_dim: int) -> list[str]:
        """Why this format does not fit a head dimension; empty if it does."""
        if self.axis == "token" and head_dim % self.group:
            fits = [str(g) for g in GROUPS if head_dim % g == 0]
            remedy = f"use {' or '.join(fits)}" if fits else "no group fits; store values exact"
            return [f"group={self.group} does not divide head_dim={head_dim}; {remedy}"]
        return []


@dataclass(frozen=True)
class Store:
    """Formats of keys and values; None keeps them exact in the model's dtype."""

    keys: Packed | None = None
    values: Packed | None = None

    @property
    def exact(self) -> bool:
        """Whether nothing is packed."""
        return self.keys is None and self.values is None

    def problems(self, head_dim: int) -> list[str]:
        """Why these formats do not fit a head dimension."""
        return [
            f"{side}: {problem}"
            for side, fmt in (("keys", self.keys), ("values", self.values))
            if fmt is not None
            for problem in fmt.problems(head_dim)
        ]


def _choice(name: str, value: object, allowed: tuple) -> None:
    if value not in allowed or type(value) is not type(allowed[0]):
        choices = ", ".join(map(str, allowed))
        raise RecipeError(f"{name}={value!r} is not one of {choices}")
