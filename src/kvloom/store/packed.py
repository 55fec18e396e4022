"""Packed tokens: codes, scales and zeros that grow together.

Decides when their buffers grow, and how the reference appends codes to a byte that is not full. The
arithmetic, and kernels that write in place, are in `kernels.quantize`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..kernels import ops
from ..kernels.attend.kv_view import Channelwise
from ..kernels.plan import OpPlan
from ..kernels.quantize import reference as ref
from ..kernels.quantize.spec import PackedTensors, RopeAngles
from ..positions.rope import Rope
from .buffer import Buffer
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


class PackedTokens:
    """The packed prefix of keys or values, in kvloom's own quantized format."""

    def __init__(
        self, fmt: Packed, channels: Channels | None = None, rope: Rope | None = None
    ) -> None:
        self.fmt, self.channels = _one(fmt), channels
        self.rope = rope if fmt.pre_rope else None
        self.codec: Codec | None = None
        self.codes, self.scale, self.zero = (Buffer(tight=fmt.in_blocks) for _ in range(3))
        self.count = 0
        self._like: PackedTensors | None = None  # empty: the shapes of codes, scales and zeros
        self.dtype = torch.float32
        self.pack_plan = OpPlan(ops.pack)

    def __len__(self) -> int:
        return self.count

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return self.codes.nbytes + self.scale.nbytes + self.zero.nbytes

    @property
    def mutable(self) -> list[Any]:
        """The objects that a step changes."""
        return [self, self.codes, self.scale, self.zero]

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
            packed = self._extend(x)
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
        assert self.codec is not None, "no tokens yet"
        codes, scale, zero = self.codes.allocation, self.scale.allocation, self.zero.allocation
        assert codes is not None
        assert scale is not None
        assert zero is not None
        tensors = codes.data, scale.data, zero.data  # from token 0 on
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
        ends = self._ends(n)
        buffers = self.codes, self.scale, self.zero
        removed = tuple(x.view()[:, :, :end] for x, end in zip(buffers, ends, strict=True))
        for x, end in zip(buffers, ends, strict=True):
            x.replace(x.view()[:, :, end:])
        self.count -= n
        return removed

    def restore(self, removed: Sequence[Tensor], n: int) -> None:
        """Prepend n offloaded tokens, as `offload` returned them."""
        for x, old in zip((self.codes, self.scale, self.zero), removed, strict=True):
            x.replace(torch.cat([old, x.view()], dim=2))
        self.count += n

    def take(self, blocks: Tensor, unit: int) -> None:
        """Keep only some blocks of `unit` tokens, of whole groups and bytes: see `KVSide.take`."""
        for x in (self.codes, self.scale, self.zero):
            x.replace(take_blocks(x.view(), blocks, self.count // unit))
        self.count = unit * len(blocks)

    def map(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Apply fn to every tensor, along the batch dimension."""
        for buffer in (self.codes, self.scale, self.zero):
            buffer.map(fn)

    def state(self) -> dict[str, Any]:
        """Return the state: codes, scales and zeros, and the number of tokens."""
        buffers = {"codes": self.codes, "scale": self.scale, "zero": self.zero}
        return {"count": self.count, **{name: x.state() for name, x in buffers.items()}}

    def load_state(self, state: dict[str, Any], like: Tensor | None) -> None:
        """Load a state that `state` returned; like: an empty tensor such as the layer's keys."""
        self.count = state["count"]
        for name in ("codes", "scale", "zero"):
            getattr(self, name).load_state(state[name])
        if self.count:
            assert like is not None
            self.codec, self.dtype = codec(self.fmt, self.channels, like), like.dtype

    def _extend(self, x: Tensor) -> PackedTensors:
        """Make room for the tokens of x, not written yet; return the tensors from token 0 on."""
        assert self.codec is not None
        spec, (b, h, t, d) = self.codec.spec, x.shape
        if self._like is None:
            rows, numbers = spec.scales(h, d)
            meta = torch.uint8 if spec.meta == torch.float8_e4m3fn else spec.meta
            scales = x.new_empty(b, rows, 0, numbers, dtype=meta)
            zeros = scales if spec.zeros else scales[..., :0]
            self._like = PackedTensors(
                x.new_empty(b, h, 0, d + spec.boost, dtype=torch.uint8), scales, zeros
            )
        codes, scales, zeros = self._like
        more = ref.rows_for(self.count + t, spec.bits) - self.codes.count
        t //= spec.tokens_per_scale
        return PackedTensors(
            self.codes.extend(more, codes),
            self.scale.extend(t, scales),
            self.zero.extend(t, zeros),
        )

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
        self._append_codes(codes)
        self.scale.append(_plain(scale))
        self.zero.append(_plain(zero))

    def _ends(self, n: int) -> tuple[int, int, int]:
        """Return the rows of codes, scale and zero that the first n tokens have."""
        groups = n // self.fmt.tokens_per_scale
        return ref.rows_for(n, self.fmt.bits), groups, groups

    def _append_codes(self, codes: Tensor) -> None:
        bits = self.fmt.bits
        per_block, rows = ref.PACK_BLOCK[bits]
        n = codes.shape[2]
        begun = self.count % per_block
        if begun:  # the last pack block is not full: pack it again with the new codes
            old = ref.unpack_codes(self.codes.view()[:, :, -rows:], bits, begun)
            self.codes.drop_back(rows)
            codes = torch.cat([old, codes], dim=2)
        self.codes.append(ref.pack_codes(codes, bits))
        self.count += n


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


def _plain(meta: Tensor) -> Tensor:
    """Return scales or zeros as they are stored: fp8 as bytes, which every torch can join."""
    return meta.view(torch.uint8) if meta.dtype == torch.float8_e4m3fn else meta
