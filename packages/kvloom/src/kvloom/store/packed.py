"""Packed tokens: codes, scales and zeros that grow together.

Decides when these tensors grow, and how the reference appends codes to a byte that is not full. The
arithmetic, and kernels that write in place, are in `kernels.quantize`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..kernels import ops
from ..kernels.attend.kv_view import Channelwise
from ..kernels.plan import OpPlan
from ..kernels.quantize import reference as ref
from ..kernels.quantize.spec import PackedTensors, QuantSpec, RopeAngles
from ..positions.rope import Rope
from .buffer import grown_capacity
from .codec import Channels, Codec, codec
from .formats import META, Packed

# Tokens quantized at once, which bounds the temporary fp32 copies and angles.
_CHUNK = 4096


class PackedView(NamedTuple):
    """A range of packed tokens as kernels read them: storage, token range and format."""

    codes: Tensor  # uint8 [B, Hk, rows, D + boost]; spare room at the end, as the next two
    scale: Tensor  # [B, Hk, N/G, D] or [B, Hk, N, D/G]; by map [B, 1, N, groups]; see `spec`
    zero: Tensor
    fmt: Packed
    lo: int
    hi: int
    dtype: torch.dtype
    codec: Codec
    rope: Rope | None = None  # for keys that are packed before RoPE
    at: Tensor | None = None  # positions of these keys, int64 [B or 1, Hk or 1, hi - lo], or that
    # of the first key, where positions are consecutive, [B or 1, 1, 1]

    @property
    def channelwise(self) -> Channelwise:
        """What a kernel needs beside the format."""
        return self.codec.channelwise

    def tensor(self) -> Tensor:
        """Return the unpacked tokens [B, Hk, hi - lo, D] in the model's dtype."""
        codec, fmt, rope, at = self.codec, self.fmt, self.rope, self.at
        if at is not None and at.shape[2] == 1:
            at = at + torch.arange(self.hi - self.lo, device=at.device)
        packed, angles = PackedTensors(self.codes, self.scale, self.zero), None
        unpack = ops.unpack.bind(packed, codec.spec, self.lo, self.hi, self.dtype).run
        if unpack is not None:
            if rope is not None:
                assert at is not None
                angles = RopeAngles(*rope.angles(at), rope.interleaved)
            return unpack(packed, codec.spec, self.lo, self.hi, self.dtype, angles)
        per_block, rows = ref.PACK_BLOCK[fmt.bits]
        per_meta = codec.spec.tokens_per_scale
        unit = math.lcm(per_meta, per_block)
        lo = self.lo // unit * unit  # start where both bytes and groups start
        hi = -(-self.hi // per_meta) * per_meta
        codes = ref.unpack_codes(
            self.codes[:, :, lo // per_block * rows : ref.rows_for(hi, fmt.bits)], fmt.bits, hi - lo
        )
        meta = slice(lo // per_meta, hi // per_meta)
        scale, zero = self.scale[:, :, meta], self.zero[:, :, meta]
        wanted = slice(self.lo - lo, self.hi - lo)
        if rope is None:
            return codec.dequantize(codes, scale, zero, self.dtype)[:, :, wanted]
        assert at is not None
        raw = codec.dequantize(codes, scale, zero, torch.float32)[:, :, wanted]
        return rope.rotate(raw, at).to(self.dtype)


@dataclass(slots=True)
class PackedAllocation:
    """Codes, scales and zeros from token 0 on, and how many tokens fit in them.

    As in `buffer.Allocation`: tokens that are added may replace the tensors in an allocation; every
    other change makes a new allocation.
    """

    tensors: PackedTensors
    capacity: int


class PackedTokens:
    """The packed prefix of keys or values, in kvloom's own quantized format."""

    def __init__(
        self, fmt: Packed, channels: Channels | None = None, rope: Rope | None = None
    ) -> None:
        self.fmt, self.channels = _one(fmt), channels
        self.rope = rope if fmt.pre_rope else None
        self.codec: Codec | None = None
        self.allocation: PackedAllocation | None = None  # None before the first token
        self.count = 0
        self.dtype = torch.float32
        self.pack_plan = OpPlan(ops.pack)

    def __len__(self) -> int:
        return self.count

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return 0 if self.allocation is None else sum(x.nbytes for x in self.allocation.tensors)

    @property
    def mutable(self) -> list[Any]:
        """The objects that a step changes."""
        return [self]

    @property
    def live(self) -> PackedTensors:
        """Codes, scales and zeros of all tokens, without spare room; views."""
        assert self.allocation is not None, "no tokens yet"
        pairs = zip(self.allocation.tensors, self._rows(self.count), strict=True)
        return PackedTensors(*(x[:, :, :n] for x, n in pairs))

    def append(self, x: Tensor, nonpadding: Tensor | None = None, at: Tensor | None = None) -> None:
        """Quantize and add x [B, Hk, T, D]; per channel, T is a multiple of the group.

        nonpadding: bool [B, 1 or Hk, T], False for padding. at: int64 [B or 1, Hk or 1, T], the
        tokens' positions, for keys that are packed before RoPE.
        """
        if self.codec is None:
            self.codec = codec(self.fmt, self.channels, x)
        pack = self.pack_plan.bind(x, self.codec.spec)
        if pack is None:
            self._append(x, nonpadding, at)
        else:
            packed = self._with_room(x)
            whole = ((x, nonpadding, at),)
            chunks = whole if x.shape[2] <= _CHUNK else _chunks(x, nonpadding, at)
            for tokens, mask, positions in chunks:
                angles = None
                if self.rope is not None:
                    assert positions is not None
                    angles = RopeAngles(*self.rope.angles(-positions), self.rope.interleaved)
                pack(tokens, self.codec.spec, packed, self.count, mask, angles)
                self.count += tokens.shape[2]
        self.dtype = x.dtype

    def view(self, lo: int = 0, hi: int | None = None, at: Tensor | None = None) -> PackedView:
        """Return tokens lo..hi of this prefix; at: their positions, as in `append`."""
        assert self.codec is not None and self.allocation is not None, "no tokens yet"  # noqa: PT018
        tensors = self.allocation.tensors
        hi = self.count if hi is None else hi
        if self.fmt.meta == "fp8":  # stored as bytes
            return self.wrap(tensors, lo, hi, at)
        return PackedView(
            *tensors, self.fmt, lo, hi, self.dtype, self.codec, self.rope, at,
        )  # fmt: skip

    def wrap(
        self, tensors: Sequence[Tensor], lo: int, hi: int, at: Tensor | None = None
    ) -> PackedView:
        """Return tokens lo..hi of tensors such as this prefix's; at: as in `append`."""
        assert self.codec is not None, "no tokens yet"
        codes, scale, zero = tensors
        if self.fmt.meta == "fp8":  # stored as bytes
            scale, zero = scale.view(META["fp8"]), zero.view(META["fp8"])
        return PackedView(
            codes, scale, zero, self.fmt, lo, hi, self.dtype, self.codec, self.rope, at
        )

    def offload(self, n: int) -> Sequence[Tensor]:
        """Remove and return codes, scales and zeros of the n oldest tokens: whole groups."""
        live, ends = self.live, self._rows(n)
        removed = tuple(x[:, :, :end] for x, end in zip(live, ends, strict=True))
        self._replace((x[:, :, end:] for x, end in zip(live, ends, strict=True)), self.count - n)
        return removed

    def restore(self, removed: Sequence[Tensor], n: int) -> None:
        """Prepend n offloaded tokens, as `offload` returned them."""
        pairs = zip(removed, self.live, strict=True)
        self._replace((torch.cat(pair, dim=2) for pair in pairs), self.count + n)

    def take(self, blocks: Tensor, unit: int) -> None:
        """Keep only some blocks of `unit` tokens, of whole groups and bytes: see `KVSide.take`."""
        stored = self.count // unit
        self._replace((take_blocks(x, blocks, stored) for x in self.live), unit * len(blocks))

    def map(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Apply fn to every tensor, along the batch dimension."""
        if self.allocation is not None:
            self._allocate(fn(x).contiguous() for x in self.allocation.tensors)

    def state(self) -> dict[str, Any]:
        """Return the state: codes, scales and zeros, and the number of tokens."""
        state: dict[str, Any] = {"count": self.count, **dict.fromkeys(PackedTensors._fields)}
        if self.allocation is not None:
            rooms = (x.shape[2] for x in self.allocation.tensors)
            for (name, live), room in zip(self.live._asdict().items(), rooms, strict=True):
                state[name] = {"live": live, "start": 0, "room": room}
        return state

    def load_state(self, state: dict[str, Any], like: Tensor | None) -> None:
        """Load a state that `state` returned; like: an empty tensor such as the layer's keys."""
        self.count = state["count"]
        if self.count:
            assert like is not None
            self.codec, self.dtype = codec(self.fmt, self.channels, like), like.dtype
            sides = (state[name] for name in PackedTensors._fields)
            self._allocate(_with_rows(side["live"], side["room"]) for side in sides)

    def _with_room(self, x: Tensor) -> PackedTensors:
        """Return codes, scales and zeros from token 0 on, with room for the tokens of x."""
        own, tokens = self.allocation, self.count + x.shape[2]
        if own is not None and tokens <= own.capacity:
            return own.tensors
        assert self.codec is not None
        needed = self._rows(tokens)
        if own is None:
            empty = _empty(x, self.codec.spec)
            own = self._allocate(_with_rows(y, n) for y, n in zip(empty, needed, strict=True))
            return own.tensors
        tight = self.fmt.in_blocks
        grown = (
            stored if n <= stored.shape[2] else _with_rows(live, grown_capacity(n, tight))
            for stored, live, n in zip(own.tensors, self.live, needed, strict=True)
        )
        own.tensors = PackedTensors(*grown)
        own.capacity = self._capacity(own.tensors)
        return own.tensors

    def _replace(self, tensors: Iterable[Tensor], count: int) -> None:
        """Store a copy of codes, scales and zeros of `count` tokens, without spare room."""
        self._allocate(x.clone(memory_format=torch.contiguous_format) for x in tensors)
        self.count = count

    def _allocate(self, tensors: Iterable[Tensor]) -> PackedAllocation:
        stored = PackedTensors(*tensors)
        self.allocation = PackedAllocation(stored, self._capacity(stored))
        return self.allocation

    def _capacity(self, tensors: PackedTensors) -> int:
        """Return how many tokens fit in tensors."""
        per_block, rows = ref.PACK_BLOCK[self.fmt.bits]
        codes, scale, zero = (x.shape[2] for x in tensors)
        return min(codes // rows * per_block, min(scale, zero) * self.fmt.tokens_per_scale)

    def _rows(self, tokens: int) -> tuple[int, int, int]:
        """Return the rows of codes, scales and zeros that the first tokens have."""
        groups = tokens // self.fmt.tokens_per_scale
        return ref.rows_for(tokens, self.fmt.bits), groups, groups

    def _append(self, x: Tensor, nonpadding: Tensor | None, at: Tensor | None) -> None:
        """Quantize and append x by the reference; nonpadding, at: as in `append`."""
        assert self.codec is not None
        chunks = []
        for tokens, mask, positions in _chunks(x, nonpadding, at):
            if self.rope is not None:
                assert positions is not None
                tokens = self.rope.rotate(tokens.float(), -positions)
            chunks.append(self.codec.quantize(tokens, mask))
        codes, scale, zero = (
            torch.cat(p, dim=2) if len(p) > 1 else p[0] for p in zip(*chunks, strict=True)
        )
        tensors, bits = self._with_room(x), self.fmt.bits
        per_block, rows = ref.PACK_BLOCK[bits]
        at_row, group, _ = self._rows(self.count)
        begun = self.count % per_block
        if begun:  # the last pack block is not full: pack it again with the new codes
            at_row -= rows
            old = ref.unpack_codes(tensors.codes[:, :, at_row : at_row + rows], bits, begun)
            codes = torch.cat([old, codes], dim=2)
        for stored, new, row in (
            (tensors.codes, ref.pack_codes(codes, bits), at_row),
            (tensors.scale, _plain(scale), group),
            (tensors.zero, _plain(zero), group),
        ):
            stored[:, :, row : row + new.shape[2]] = new
        self.count += x.shape[2]


def take_blocks(x: Tensor, blocks: Tensor, stored: int) -> Tensor:
    """Return x [B, Hk, N, D], of `stored` equal blocks along N, with only these blocks, in order.

    blocks: int64 [M], which may name a block several times.
    """
    if x.shape[2] == 0:
        return x
    return x.unflatten(2, (stored, -1)).index_select(2, blocks).flatten(2, 3)


@cache
def _one(fmt: Packed) -> Packed:
    """Return one object for all equal formats: bindings of kernels are keyed by it."""
    return fmt


def _chunks(x: Tensor, *along: Tensor | None) -> Iterator[tuple[Any, ...]]:
    """Yield x [B, Hk, N, D] and tensors [., ., N] along its tokens, a chunk at a time."""
    if x.shape[2] <= _CHUNK:
        yield x, *along
        return
    for lo in range(0, x.shape[2], _CHUNK):
        part = slice(lo, lo + _CHUNK)
        yield x[:, :, part], *(None if y is None else y[:, :, part] for y in along)


def _empty(x: Tensor, spec: QuantSpec) -> PackedTensors:
    """Return codes, scales and zeros of no tokens, for tokens like x [B, Hk, any, D]."""
    b, h, _, d = x.shape
    rows, numbers = spec.scales(h, d)
    meta = torch.uint8 if spec.meta == torch.float8_e4m3fn else spec.meta
    codes = x.new_empty(b, h, 0, d + spec.boost, dtype=torch.uint8)
    scales = x.new_empty(b, rows, 0, numbers, dtype=meta)
    return PackedTensors(codes, scales, scales if spec.zeros else scales[..., :0])


def _with_rows(live: Tensor, rows: int) -> Tensor:
    """Return `live` [., ., n, .] in a new tensor of `rows` rows."""
    b, h, n, d = live.shape
    wider = live.new_empty(b, h, rows, d)
    wider[:, :, :n] = live
    return wider


def _plain(meta: Tensor) -> Tensor:
    """Return scales or zeros as they are stored: fp8 as bytes, which every torch can join."""
    return meta.view(torch.uint8) if meta.dtype == torch.float8_e4m3fn else meta
