"""Tokens packed in a format of another distribution, by its own `pack` and `unpack`.

Decides how the tensors of such a format grow and which tokens are unpacked together; the format
decides what is in them. Its own kernel attends to them; without one, each step unpacks them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor

from ..errors import RecipeError
from .buffer import Buffer
from .formats import Format, FormatView
from .prefix import PackedPrefix


class FormatTokens(PackedPrefix):
    """The packed prefix of keys or values in any format; keys are packed after RoPE."""

    counters = ("count",)
    children = ("buffers",)

    def __init__(self, fmt: Format) -> None:
        super().__init__(fmt)
        self.buffers: list[Buffer] = []  # one for each tensor that the format packs

    def empty(self) -> FormatTokens:
        """Return a prefix of this format without tokens."""
        return FormatTokens(self.fmt)

    def append(
        self, x: Tensor, nonpadding: Tensor | None = None, positions: Tensor | None = None
    ) -> None:
        """Pack and add x [B, Hk, T, D]. Raises `RecipeError` for unfit tensors."""
        if not x.shape[2]:
            return
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
        self,
        lo: int = 0,
        hi: int | None = None,
        positions: Tensor | None = None,
        offloaded: Sequence[Tensor] | None = None,
    ) -> FormatView:
        """Return tokens lo to hi, as the format's kernel reads them."""
        end = self.count if hi is None else hi
        tensors, stored = (self.live, self.count) if offloaded is None else (offloaded, end)
        return FormatView(tuple(tensors), self.fmt, 0, stored, self.dtype).cut(lo, end)

    @property
    def live(self) -> tuple[Tensor, ...]:
        """The tensors that the format packed, without spare room; views."""
        return tuple(buffer.view() for buffer in self.buffers)

    def _rows(self, tokens: int) -> list[int]:
        """Return how much of dimension 2 the first tokens have in each tensor."""
        return [len(buffer) * tokens // self.count for buffer in self.buffers]

    def _replace(self, tensors: Iterable[Tensor], count: int) -> None:
        """Store a copy of the tensors of `count` tokens."""
        for buffer, x in zip(self.buffers, tensors, strict=True):
            buffer.replace(x)
        self.count = count

    def load_state(self, state: dict[str, Any], like: Tensor | None) -> None:
        """Load a state that `state` returned; like: an empty tensor such as the layer's keys."""
        self.buffers = [Buffer(tight=True) for _ in state["buffers"]]
        super().load_state(state, like)
        if like is not None:
            self.dtype = like.dtype
