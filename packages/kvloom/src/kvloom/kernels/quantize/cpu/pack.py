"""Packing and unpacking on CPU tensors: which cases the compiled kernels cover, and their calls.

Importing this does not import Numba; the first call does.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ....encoding import PACK_BLOCK, LayerEncoding, top
from ... import dispatch
from ...arguments import (
    DTYPE_CODES,
    META_CODES,
    DescribedStorage,
    address,
    contiguous_rows,
    on_cpu,
    strides,
)
from ...limits import Coverage, dtype_problem, unread_fields
from .. import hadamard
from ..reference import PackedTensors, RopeAngles
from .arguments import CHANNEL, MAPPED, PACK, ROPE, ROTATED, ROTATION, SPEC, STATIC, TABLES, TOKEN

_NO_ROPE = (0,) * ROPE.numbers
_TILE = 1 << 14  # numbers of a task: their fp32 copies stay in the core's cache
_NUMBERS_PER_THREAD = 1 << 17


COVERAGE = Coverage(
    ("every encoding", unread_fields),
    ("tokens in fp32, fp16, bf16", lambda layer_encoding, dtype: dtype_problem(dtype)),
)


class Packer:
    """Packs one layer's keys or values, step after step.

    Describes the encoding and the storage again only after one of them was replaced.
    """

    def __init__(self, x: Tensor, layer_encoding: LayerEncoding, *_: Any, **__: Any) -> None:
        self._kernel = packing()
        self._layer_encoding = layer_encoding
        self._prepared = _prepared(layer_encoding, x.shape[1], x.shape[3])
        self._storage = DescribedStorage()
        self._numbers: tuple[tuple[int, ...], ...] = ()

    def __call__(
        self,
        x: Tensor,
        layer_encoding: LayerEncoding,
        out: PackedTensors,
        begin: int,
        nonpadding: Tensor | None = None,
        rope: RopeAngles | None = None,
    ) -> None:
        """Write x [B, Hk, T, D] after `begin` packed tokens, into storage that has room.

        Codes, scales and zeros are those of the reference; filler codes of the last pack block are
        0. nonpadding: bool [B, 1 or Hk, T], False for padding, which does not enter the range of a
        group along tokens. rope: rotates each token first. Per channel, `begin` and T are multiples
        of the group. Raises `ValueError` if rows of the storage are not contiguous.
        """
        if not x.numel():
            return
        if layer_encoding is not self._layer_encoding or not self._storage.holds(*out):
            if not all(_contiguous_rows(part) for part in out):
                raise ValueError("rows of codes, scales and zeros must be contiguous to be written")
            self._layer_encoding = layer_encoding
            self._prepared = _prepared(layer_encoding, x.shape[1], x.shape[3])
            self._numbers = _storage(out)
            self._storage.remember(*out)
        mask: tuple[int, ...] = (0, 0, 0)
        if nonpadding is not None and layer_encoding.encoding.axis == "channel":
            nonpadding = contiguous_rows(nonpadding)
            mask = strides(nonpadding, 2)
        prepared = self._prepared
        static = prepared.static_encode
        _run(self._kernel, x, begin, self._numbers, prepared, static, mask, rope)


def unpack(
    packed: PackedTensors,
    layer_encoding: LayerEncoding,
    lo: int,
    hi: int,
    dtype: torch.dtype,
    rope: RopeAngles | None = None,
) -> Tensor:
    """Return tokens lo..hi of what `pack` wrote, [B, Hk, hi - lo, D]; rope: rotates them then."""
    b, h, _, d = packed.codes.shape
    x = packed.codes.new_empty(b, h, hi - lo, d, dtype=dtype)
    if not x.numel():
        return x
    packed = PackedTensors(*(y if _contiguous_rows(y) else y.contiguous() for y in packed))
    prepared = _prepared(layer_encoding, h, d)
    static = prepared.static_decode
    _run(unpacking(), x, lo, _storage(packed), prepared, static, (0, 0, 0), rope)
    return x


@cache
def packing() -> Any:
    """Compile the kernel that packs; it covers every case."""
    with dispatch.loading():
        from . import pack_kernel
    return pack_kernel.packing()


@cache
def unpacking() -> Any:
    """Compile the kernel that unpacks; it covers every case."""
    with dispatch.loading():
        from . import pack_kernel
    return pack_kernel.unpacking()


class _Prepared(NamedTuple):
    """The arguments that follow from an encoding alone, for heads of one size."""

    joint_heads: int
    spec: tuple[int, ...]
    tables: tuple[int, ...]
    static_encode: tuple[int, int]  # addresses of static scales, by which pack divides, and zeros
    static_decode: tuple[int, int]  # the same for unpack, which multiplies by scales
    rotation: tuple[int, ...]
    tensors: tuple[Tensor, ...]  # keeps the addresses valid


def _prepared(layer_encoding: LayerEncoding, heads: int, d: int) -> _Prepared:
    prepared = layer_encoding.prepared.get(("cpu", heads, d))
    if prepared is None:
        prepared = layer_encoding.prepared["cpu", heads, d] = _prepare(layer_encoding, heads, d)
    return prepared


@on_cpu
def _prepare(layer_encoding: LayerEncoding, heads: int, d: int) -> _Prepared:
    encoding = layer_encoding.encoding
    per_block, block_rows = PACK_BLOCK[encoding.bits]
    mapped, in_groups = layer_encoding.group_of is not None, encoding.rotation == "group"
    joint_heads, padded = heads if mapped else 1, -(-d // 16) * 16
    unit = math.lcm(encoding.tokens_per_scale, per_block)
    tile = max(1, _TILE // (joint_heads * padded) // unit) * unit
    tables: dict[str, Tensor] = {}
    groups = padded if encoding.axis == "channel" else d // layer_encoding.group
    sharing = CHANNEL if encoding.axis == "channel" else ROTATED if in_groups else TOKEN
    if mapped:
        assert layer_encoding.group_of is not None
        sharing = MAPPED if layer_encoding.static is None else STATIC
        group_of = layer_encoding.group_of
        groups = int(group_of.max()) + 1
        tables["group_of"] = _padded_rows(group_of.int(), 0)
        slot = torch.arange(heads)[:, None] * padded + torch.arange(d)
        by_group = [slot[group_of == g] for g in range(groups)]
        by_group = [torch.cat([s, s[:1].expand(-len(s) % 16)]) for s in by_group]
        tables["slots"] = torch.cat(by_group).int()
        tables["slot_ends"] = torch.tensor([len(s) for s in by_group]).cumsum(0).int()
        tables["clip"] = (
            torch.as_tensor(layer_encoding.alpha, dtype=torch.float32).expand(groups).clone()
        )
        if layer_encoding.divisor is not None:
            tables["divisor"] = _padded_rows(layer_encoding.divisor.float(), 1)
    addresses = TABLES.pack(**{name: address(tables.get(name)) for name in TABLES.names})
    encode = decode = (0, 0)
    if layer_encoding.static is not None:
        scale, zero = (
            _padded_rows(x.float().expand(1, heads, 1, d)[0, :, 0], 0)
            for x in layer_encoding.static
        )
        step = torch.where(scale > 0, scale, torch.inf)
        tables |= {"scale": scale, "zero": zero, "step": step}
        encode = (step.data_ptr(), zero.data_ptr())
        decode = (scale.data_ptr(), zero.data_ptr())
    rotation: tuple[int, ...] = (0,) * ROTATION.numbers
    if layer_encoding.rotation_size:
        size = layer_encoding.rotation_size
        signs, mix = hadamard.parts(size)
        tensors = {"signs": _padded_rows(signs[None], 0), "mix": mix.contiguous()}
        if in_groups:
            levels = hadamard.levels(encoding.bits)
            tensors |= {"levels": levels, "level_ends": hadamard.ends(levels)}
        tables |= tensors
        where = {name: address(tensors.get(name)) for name in ROTATION.names if name != "size"}
        rotation = ROTATION.pack(size=size // len(mix), **where)
    spec = SPEC.pack(
        tile=tile,
        sharing=sharing,
        group=layer_encoding.group,
        groups=groups,
        bits_x2=int(2 * encoding.bits),
        top=top(encoding.bits),
        per_block=per_block,
        block_rows=block_rows,
        meta=META_CODES[encoding.meta],
    )
    return _Prepared(joint_heads, spec, addresses, encode, decode, rotation, tuple(tables.values()))


def _padded_rows(x: Tensor, filler: int) -> Tensor:
    """Return x [Hk, D] with rows padded to whole vectors of 16."""
    return torch.nn.functional.pad(x, (0, -x.shape[1] % 16), value=filler).contiguous()


def _contiguous_rows(x: Tensor) -> bool:
    """Whether the last two dimensions of x [B, H, N, D] are contiguous in memory."""
    if x.is_contiguous():
        return True
    row = x.shape[3]
    return row == 0 or (x.stride(2) == row and (row == 1 or x.stride(3) == 1))


def _storage(packed: PackedTensors) -> tuple[tuple[int, ...], ...]:
    """Describe codes, scales and zeros to a kernel."""
    return strides(packed.codes, 3), strides(packed.scale, 2), strides(packed.zero, 2)


def _run(
    kernel: Any,
    x: Tensor,
    begin: int,
    storage: tuple[tuple[int, ...], ...],
    prepared: _Prepared,
    static: tuple[int, int],
    nonpadding: tuple[int, ...],
    rope: RopeAngles | None,
) -> None:
    """Run a kernel on tokens x [B, Hk, T, D], read or written, and on their packed storage."""
    b, h, t, d = x.shape
    codes, scale, zero = storage
    angles = _NO_ROPE
    if rope is not None:
        cos, sin = rope.cos.contiguous(), rope.sin.contiguous()
        first, batch, head = strides(cos, 2)
        angles = (first, sin.data_ptr(), batch, head, cos.shape[3], int(rope.interleaved))
    packed = PACK.pack(
        batch=b,
        heads=h,
        joint_heads=prepared.joint_heads,
        head_dim=d,
        begin=begin,
        tokens=t,
        spec=prepared.spec,
        dtype_code=DTYPE_CODES[x.dtype],
        tables=prepared.tables,
        static_scale=static[0],
        static_zero=static[1],
        x=strides(x, 4),
        codes=codes,
        scale=scale,
        zero=zero,
        nonpadding=nonpadding,
        rope=angles,
        rotation=prepared.rotation,
    )
    threads = min(torch.get_num_threads(), 1 + x.numel() // _NUMBERS_PER_THREAD)
    kernel.run(packed, 0, threads)
