"""A format: int8 codes, with one fp32 scale for `unit` tokens of a head."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

import kvloom
from kvloom.store import Format


@kvloom.register_format
@dataclass(frozen=True)
class Int8(Format):
    """Symmetric 8-bit codes; unit: tokens that share a scale."""

    unit: int = 4
    kind: ClassVar[str] = "int8"

    def pack(self, x: Tensor, nonpadding: Tensor | None = None) -> tuple[Tensor, ...]:
        """Return codes [B, Hk, T, D] and scales [B, Hk, T / unit, 1]."""
        blocks = x.float().unflatten(2, (-1, self.unit))
        scale = (blocks.abs().amax(dim=(3, 4)) / 127).clamp_min(1e-30)
        codes = (blocks / scale[..., None, None]).round().to(torch.int8)
        return codes.flatten(2, 3), scale.unsqueeze(-1)

    def unpack(self, tensors: tuple[Tensor, ...], dtype: torch.dtype) -> Tensor:
        """Return tokens [B, Hk, T, D]."""
        codes, scale = tensors
        return (codes * scale.repeat_interleave(self.unit, dim=2)).to(dtype)

    def nbytes(self, tokens: int, head_dim: int, heads: int = 1) -> int:
        """One byte a number, and a scale."""
        return heads * (tokens * head_dim + 4 * tokens // self.unit)
