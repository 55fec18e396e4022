"""Tokens packed in a format of another distribution, by its own `pack` and `unpack`.

Decides how the tensors of such a format grow and which tokens are unpacked together; the format
decides what is in them. Its own kernel attends to them; without one, each step unpacks them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..errors import RecipeError
from ..state import Stateful
from .buffer import Buffer
from .formats import Format, FormatView


class FormatTokens(Stateful):
    """The packed prefix of keys or values in any format."""

    counters = ("count",)
    children = ("buffers",)
    rope = None  # such a format packs keys after RoPE

    def __init__(self, fmt: Format) -> None:
        self.fmt = fmt
        self.buffers: list[Buffer] = []
        self.count = 0
        self.dtype = torch.float32

    def __len__(self) -> int:
        return self.count

    def empty(self) -> FormatTokens:
        """Return a prefix of this format without tokens."""
        return FormatTokens(self.fmt)

    def append(
        self, x: Tensor, nonpadding: Tensor | None = None, positions: Tensor | None = None
    ) -> None:
        """Pack and add x [B, Hk, T, D], whole units. Raises `RecipeError` for unfit tensors."""
        packed = self.fmt.pack(x, nonpadding)
        units = x.shape[2] // self.fmt.unit
        for tensor in packed:
            fits = tensor.dim() >= 3 and tensor.shape[:2] == x.shape[:2]
            if not fits or tensor.shape[2] % units or tensor.device != x.device:
                raise RecipeError(
                    f"format {self.fmt.kind!r} packed tokens {tuple(x.shape)} into a tensor "
                    f"{tuple(tensor.shape)} on {tensor.device}; pack must return tensors "
                    f"[B, Hk, n * {units}, ...] on {x.device}"
                )
        if not self.buffers:
            self.buffers = [Buffer(tight=True) for _ in packed]
        for buffer, tensor in zip(self.buffers, packed, strict=True):
            buffer.append(tensor)
        self.count += x.shape[2]
        self.dtype = x.dtype

    def view(
        self, lo: int = 0, hi: int | None = None, positions: Tensor | None = None
    ) -> FormatView:
        """Return tokens lo to hi."""
        tensors = tuple(buffer.view() for buffer in self.buffers)
        whole = FormatView(tensors, self.fmt, 0, self.count, self.dtype)
        return whole.cut(lo, self.count if hi is None else hi)

    def load_state(self, state: dict[str, Any], like: Tensor | None) -> None:
        """Load a state that `state` returned; like: an empty tensor such as the layer's keys."""
        self.buffers = [Buffer(tight=True) for _ in state["buffers"]]
        super().load_state(state, like)
        if like is not None:
            self.dtype = like.dtype
