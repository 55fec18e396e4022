"""What a side asks of its packed tokens, whatever their format.

Decides how tokens leave and return. `packed` and `format_tokens` decide how they are added.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..positions.rope import Rope
from ..state import Stateful
from .buffer import take_units
from .formats import Format


class PackedPrefix(Stateful):
    """The packed prefix of keys or values: tensors whose dimension 2 grows with the tokens.

    Tokens enter and leave in whole units of the format.

    Attributes:
        count: The tokens.
        dtype: Of the tokens before they were packed.
        rope: The model's rotary embedding, for keys that are packed before RoPE.
    """

    rope: Rope | None = None

    def __init__(self, fmt: Format) -> None:
        self.fmt = fmt
        self.count = 0
        self.dtype = torch.float32

    def __len__(self) -> int:
        return self.count

    def empty(self) -> PackedPrefix:
        """Return a prefix of this format without tokens."""
        raise NotImplementedError

    def append(
        self, x: Tensor, nonpadding: Tensor | None = None, positions: Tensor | None = None
    ) -> None:
        """Pack and add x [B, Hk, T, D], whole units.

        nonpadding: bool [B, 1 or Hk, T], False for padding. positions: int64 [B or 1, Hk or 1, T],
        of the tokens, for keys that are packed before RoPE.
        """
        raise NotImplementedError

    def view(
        self,
        lo: int = 0,
        hi: int | None = None,
        positions: Tensor | None = None,
        offloaded: Sequence[Tensor] | None = None,
    ) -> Any:
        """Return tokens lo to hi of this prefix, or of the tensors that `offload` returned.

        positions: of these tokens, as in `append`.
        """
        raise NotImplementedError

    def offload(self, n: int) -> Sequence[Tensor]:
        """Remove the n oldest tokens; return the tensors in which they are packed."""
        removed = tuple(x[:, :, :end] for x, end in zip(self.live, self._rows(n), strict=True))
        self.drop_front(n)
        return removed

    def restore(self, removed: Sequence[Tensor], n: int) -> None:
        """Prepend n offloaded tokens, as `offload` returned them."""
        pairs = zip(removed, self.live, strict=True)
        self._replace((torch.cat(pair, dim=2) for pair in pairs), self.count + n)

    def drop_front(self, n: int) -> None:
        """Drop the n oldest tokens."""
        pairs = zip(self.live, self._rows(n), strict=True)
        self._replace((x[:, :, end:] for x, end in pairs), self.count - n)

    def take(self, units: Tensor, unit: int) -> None:
        """Keep only some units of `unit` tokens, in a new order: see `KVSide.take`."""
        stored = self.count // unit
        self._replace((take_units(x, units, stored) for x in self.live), unit * len(units))

    @property
    def live(self) -> Sequence[Tensor]:
        """The tensors of all tokens, without spare room; views."""
        raise NotImplementedError

    def _rows(self, tokens: int) -> Sequence[int]:
        """Return how much of dimension 2 the first `tokens` tokens have, 1 or more."""
        raise NotImplementedError

    def _replace(self, tensors: Iterable[Tensor], count: int) -> None:
        """Store a copy of the tensors of `count` tokens, without spare room."""
        raise NotImplementedError
