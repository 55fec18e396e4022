"""What is measured: heads, head dimension, batch and dtype of a layer, and the sizes of a model.

Decides what is refused before anything is built.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..errors import InputError
from ..recipe.geometry import Geometry

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclass(frozen=True)
class Shape:
    """One layer's attention; raises `InputError` for what cannot be."""

    q_heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    batch: int = 1
    dtype: torch.dtype = torch.bfloat16

    def __post_init__(self) -> None:
        for what in ("q_heads", "kv_heads", "head_dim", "batch"):
            if getattr(self, what) < 1:
                raise InputError(f"{what}={getattr(self, what)} must be 1 or more")
        if self.head_dim % 2:
            raise InputError(
                f"head_dim={self.head_dim} is odd, and RoPE turns pairs of numbers; use "
                f"{self.head_dim + 1}"
            )
        if self.q_heads % self.kv_heads:
            raise InputError(
                f"{self.q_heads} query heads cannot share {self.kv_heads} key/value heads; give "
                "a multiple, such as --heads 32/8"
            )

    def __str__(self) -> str:
        return f"{self.q_heads}q/{self.kv_heads}kv x {self.head_dim}"

    @property
    def geometry(self) -> Geometry:
        """As recipes know a model of one such layer."""
        return Geometry(1, self.q_heads, self.kv_heads, self.head_dim, self.dtype)


@dataclass(frozen=True)
class ModelShape(Shape):
    """A Llama of such layers."""

    head_dim: int = 64
    layers: int = 8
    hidden: int = 2048
    intermediate: int = 8192
    vocabulary: int = 32000

    def __post_init__(self) -> None:
        super().__post_init__()
        for what in ("layers", "hidden", "intermediate", "vocabulary"):
            if getattr(self, what) < 1:
                raise InputError(f"{what}={getattr(self, what)} must be 1 or more")
        if self.hidden % self.q_heads:
            raise InputError(
                f"hidden={self.hidden} is not a multiple of {self.q_heads} query heads, as Llama's "
                f"must be; use {self.q_heads * max(1, self.hidden // self.q_heads)}"
            )

    def __str__(self) -> str:
        return f"{self.layers} layers, hidden {self.hidden}, {super().__str__()}"

    @property
    def geometry(self) -> Geometry:
        """As recipes know the model."""
        return Geometry(self.layers, self.q_heads, self.kv_heads, self.head_dim, self.dtype)


def heads(text: str) -> tuple[int, int]:
    """Read "32/8" (query heads, key/value heads) or "8" (as many of both)."""
    parts = text.split("/")
    if len(parts) > 2 or not all(part.strip().isdecimal() for part in parts):
        raise InputError(f"--heads {text!r} is not query heads/key-value heads, such as 32/8")
    return int(parts[0]), int(parts[-1])


def contexts(text: str) -> list[int]:
    """Read "8192,32768"."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts or not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise InputError(
            f"--context {text!r} is not a list of token counts, 1 or more, such as 8192,32768"
        )
    return [int(part) for part in parts]


def dtype(text: str) -> torch.dtype:
    """Read "bfloat16", "float16" or "float32"."""
    if text not in DTYPES:
        raise InputError(f"--dtype {text!r} is not one of {', '.join(DTYPES)}")
    return DTYPES[text]


def short(of: torch.dtype) -> str:
    """A dtype as tables have it: bf16, fp16, fp32."""
    return {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}[of]
