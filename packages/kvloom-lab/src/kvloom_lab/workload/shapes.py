"""The shape of a benchmark: heads, head dimension, batch and dtype of a layer; sizes of a model.

Decides which shapes are refused, before anything is allocated.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvloom.errors import InputError
from kvloom.recipe import Geometry

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclass(frozen=True)
class LayerShape:
    """The attention of one layer. Raises `InputError` for an impossible shape."""

    q_heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    batch: int = 1
    dtype: torch.dtype = torch.bfloat16

    def __post_init__(self) -> None:
        for name in ("q_heads", "kv_heads", "head_dim", "batch"):
            if getattr(self, name) < 1:
                raise InputError(f"{name}={getattr(self, name)} must be 1 or more")
        if self.head_dim % 2:
            raise InputError(
                f"head_dim={self.head_dim} is odd, and RoPE rotates pairs of channels; use "
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
        """The geometry of a model with one such layer."""
        return Geometry(1, self.q_heads, self.kv_heads, self.head_dim, self.dtype)


@dataclass(frozen=True)
class ModelShape(LayerShape):
    """A Llama with such layers."""

    head_dim: int = 64
    layers: int = 8
    hidden: int = 2048
    intermediate: int = 8192
    vocabulary: int = 32000

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("layers", "hidden", "intermediate", "vocabulary"):
            if getattr(self, name) < 1:
                raise InputError(f"{name}={getattr(self, name)} must be 1 or more")
        if self.hidden % self.q_heads:
            raise InputError(
                f"hidden={self.hidden} is not a multiple of {self.q_heads} query heads, as Llama "
                f"requires; use {self.q_heads * max(1, self.hidden // self.q_heads)}"
            )

    def __str__(self) -> str:
        return f"{self.layers} layers, hidden {self.hidden}, {super().__str__()}"

    @property
    def geometry(self) -> Geometry:
        """The geometry of the model."""
        return Geometry(self.layers, self.q_heads, self.kv_heads, self.head_dim, self.dtype)


def short_name(dtype: torch.dtype) -> str:
    """Return a dtype's name in tables: bf16, fp16 or fp32."""
    return {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}[dtype]
