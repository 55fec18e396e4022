"""The operations `pack` and `unpack`, and a range of packed tokens, which unpacks itself.

`ops` lists the operations with the others; `ops.attend` reads ranges of packed tokens.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...encoding import LayerEncoding
from ...positions.rope import Rope
from ..dispatch import Backend, Binding, Op
from . import reference
from . import triton as pack_triton
from .cpu import pack as pack_cpu
from .reference import PackedTensors, RopeAngles


def _to_pack(
    x: Tensor, layer_encoding: LayerEncoding, *_: Any, **__: Any
) -> tuple[LayerEncoding, torch.dtype]:
    """Return the encoding, and the dtype of exact tokens."""
    return layer_encoding, x.dtype


def _to_unpack(
    packed: PackedTensors,
    layer_encoding: LayerEncoding,
    lo: int,
    hi: int,
    dtype: torch.dtype,
    *_: Any,
    **__: Any,
) -> tuple[LayerEncoding, torch.dtype]:
    return layer_encoding, dtype


def _unpack_case(packed: PackedTensors, *args: Any, **options: Any) -> tuple[Tensor, Hashable]:
    layer_encoding, dtype = _to_unpack(packed, *args, **options)
    return packed.codes, (layer_encoding.encoding, dtype, packed.codes.shape[3])


pack = Op(
    "pack",
    reference.pack,
    lambda x, layer_encoding, *_, **__: (x, (layer_encoding.encoding, x.dtype, x.shape[3])),
    cpu=Backend(pack_cpu.Packer, pack_cpu.COVERAGE.of(_to_pack), keeps=True, bit_exact=True),
    gpu=Backend(Binding(pack_triton.pack, pack_triton.kernels), pack_triton.COVERAGE.of(_to_pack)),
)
unpack = Op(
    "unpack",
    reference.unpack,
    _unpack_case,
    cpu=Backend(
        Binding(pack_cpu.unpack, pack_cpu.unpacking),
        pack_cpu.COVERAGE.of(_to_unpack),
        bit_exact=True,
    ),
    gpu=Backend(
        Binding(pack_triton.unpack, pack_triton.kernels), pack_triton.COVERAGE.of(_to_unpack)
    ),
)


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
