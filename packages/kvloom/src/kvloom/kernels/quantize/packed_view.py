"""A range of packed tokens, as attention and formats receive it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...encoding import LayerEncoding
from ...positions.rope import Rope
from .operations import unpack
from .reference import PackedTensors, RopeAngles


class PackedView(NamedTuple):
    """A range of packed tokens as kernels read them: storage, token range and encoding."""

    codes: Tensor  # uint8 [B, Hk, rows, D]; spare room at the end, as the next two
    scale: Tensor  # [B, Hk, N/G, D] or [B, Hk, N, D/G]; by map [B, 1, N, groups]; see `encoding`
    zero: Tensor
    layer_encoding: LayerEncoding
    lo: int
    hi: int
    dtype: torch.dtype
    rope: Rope | None = None  # for keys that are packed before RoPE
    # Of these keys, int64 [B or 1, Hk or 1, hi - lo]; or of the first, [B or 1, 1, 1], if the
    # others follow it.
    positions: Tensor | None = None

    def cut(self, lo: int, hi: int) -> PackedView:
        """Return tokens lo to hi of these."""
        positions = self.positions
        if positions is not None:
            first_only = positions.shape[2] == 1 and self.hi - self.lo != 1
            positions = positions + lo if first_only else positions[:, :, lo:hi]
        return self._replace(lo=self.lo + lo, hi=self.lo + hi, positions=positions)

    def tensor(self) -> Tensor:
        """Return the unpacked tokens [B, Hk, hi - lo, D] in the model's dtype."""
        positions, angles = self.positions, None
        if self.rope is not None:
            assert positions is not None
            if positions.shape[2] == 1:
                positions = positions + torch.arange(self.hi - self.lo, device=positions.device)
            angles = RopeAngles(*self.rope.angles(positions), self.rope.interleaved)
        packed = PackedTensors(self.codes, self.scale, self.zero)
        return unpack(packed, self.layer_encoding, self.lo, self.hi, self.dtype, angles)
