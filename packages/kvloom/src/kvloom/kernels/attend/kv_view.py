"""Keys or values as kernels read them: a packed prefix and an exact tail.

Decides the form of this view only; when tokens are packed is decided in `store`.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ...positions.rope import Rope
from ..quantize.encoding import Encoding, LayerEncoding


class PackedPrefix(Protocol):
    """Packed tokens 0 to hi, in the layout of `kernels.quantize.reference`.

    codes: uint8 [B, Hk, rows, D]. scale, zero: [B, Hk, N/G, D] or [B, Hk, N, D/G], by map
    [B, 1, N, groups]. rope: set if keys are packed before RoPE; at: their positions, int64
    [B or 1, 1, hi], or [B or 1, 1, 1], that of the first token if the others follow it.
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
    def layer(self) -> LayerEncoding: ...  # noqa: D102
    @property
    def rope(self) -> Rope | None: ...  # noqa: D102
    @property
    def at(self) -> Tensor | None: ...  # noqa: D102
    def tensor(self) -> Tensor:
        """The tokens, unpacked: [B, Hk, hi, D]."""


class KVView(NamedTuple):
    """Keys or values: an encoded prefix, and the exact tokens behind it.

    packed is None while no token is packed; encoding is None if none ever will be. exact:
    [B, Hk, any, D], of which the `length` tokens from `first` on follow the prefix (None: all).
    """

    packed: PackedPrefix | None
    exact: Tensor
    encoding: Encoding | None = None
    first: int = 0
    length: int | None = None

    @property
    def tail(self) -> Tensor:
        """The exact tokens behind the prefix, [B, Hk, N, D]."""
        if self.length is None:
            return self.exact
        return self.exact[:, :, self.first : self.first + self.length]

    @property
    def tokens(self) -> int:
        """Tokens of both."""
        exact = self.exact.shape[2] if self.length is None else self.length
        return exact if self.packed is None else exact + self.packed.hi

    def tensor(self) -> Tensor:
        """All tokens [B, Hk, N, D], unpacked."""
        return self.tail if self.packed is None else torch.cat([self.packed.tensor(), self.tail], 2)
