"""Keys or values as a decode step finds them: a packed prefix and an exact tail."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor


class Codes(Protocol):
    """Packed tokens 0 to hi, as `kernels.quant.ref` lays them out.

    codes: uint8 [B, Hk, rows, D]. scale, zero: [B, Hk, N/G, D] or [B, Hk, N, D/G]. codec: what its
    format has beside them, such as the groups of channels (`store.codec`).
    """

    @property
    def codes(self) -> Tensor: ...  # noqa: D102
    @property
    def scale(self) -> Tensor: ...  # noqa: D102
    @property
    def zero(self) -> Tensor: ...  # noqa: D102
    @property
    def hi(self) -> int: ...  # noqa: D102
    @property
    def codec(self) -> Any: ...  # noqa: D102
    def tensor(self) -> Tensor:
        """The tokens, unpacked: [B, Hk, hi, D]."""


class Strand(NamedTuple):
    """Keys or values: a packed prefix in a format, and the exact tokens behind it [B, Hk, N, D].

    packed is None as long as no token is packed; fmt is None where none will ever be.
    """

    packed: Codes | None
    tail: Tensor
    fmt: Any = None

    @property
    def tokens(self) -> int:
        """Tokens of both."""
        return self.tail.shape[2] + (0 if self.packed is None else self.packed.hi)

    def tensor(self) -> Tensor:
        """All tokens [B, Hk, N, D], unpacked."""
        return self.tail if self.packed is None else torch.cat([self.packed.tensor(), self.tail], 2)
