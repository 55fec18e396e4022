"""The operations `pack` and `unpack`, which `ops` lists with the others.

They are here because `PackedView`, which `ops.attend` reads, unpacks itself.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor

from ...encoding import LayerEncoding
from ..dispatch import Backend, Binding, Op
from . import reference
from .cpu import pack as pack_cpu
from .reference import PackedTensors
from .triton import pack as pack_triton


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
    return packed.codes, (layer_encoding.encoding, dtype)


pack = Op(
    "pack",
    reference.pack,
    lambda x, layer_encoding, *_, **__: (x, (layer_encoding.encoding, x.dtype)),
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
