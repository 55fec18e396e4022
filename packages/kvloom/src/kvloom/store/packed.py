"""Packed tokens: codes, scales and zeros that grow together.

Decides when these tensors grow. The arithmetic is in `kernels.quantize`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..encoding import PACK_BLOCK, LayerEncoding, rows_for
from ..errors import CacheMisuse
from ..kernels import ops
from ..kernels.plan import OpPlan
from ..kernels.quantize.packed_view import PackedView
from ..kernels.quantize.reference import PackedTensors, RopeAngles
from ..positions.rope import Rope
from .buffer import grown_capacity
from .formats import Packed
from .prefix import PackedPrefix

# Tokens quantized at once, which bounds the temporary fp32 copies and angles.
_CHUNK = 4096


@dataclass(slots=True)
class PackedAllocation:
    """Codes, scales and zeros from token 0 on, and how many tokens fit in them.

    As in `buffer.Allocation`: tokens that are added may replace the tensors in an allocation; every
    other change makes a new allocation.
    """

    tensors: PackedTensors
    capacity: int


class PackedTokens(PackedPrefix):
    """The packed prefix of keys or values, in kvloom's own quantized format."""

    fmt: Packed

    def __init__(
        self, fmt: Packed, calibrated: LayerEncoding | None = None, rope: Rope | None = None
    ) -> None:
        super().__init__(fmt)
        self.calibrated = calibrated
        self.rope = rope if fmt.pre_rope else None
        self.layer_encoding: LayerEncoding | None = None  # bound by the first token
        self.allocation: PackedAllocation | None = None  # None before the first token
        self.pack_plan = OpPlan(ops.pack)

    def held(self) -> Iterator[Tensor]:
        """Yield codes, scales and zeros, spare room included."""
        if self.allocation is not None:
            yield from self.allocation.tensors

    def empty(self) -> PackedTokens:
        """Return a prefix of this format without tokens."""
        return PackedTokens(self.fmt, self.calibrated, self.rope)

    @property
    def live(self) -> PackedTensors:
        """Codes, scales and zeros of all tokens, without spare room; views."""
        assert self.allocation is not None, "no tokens yet"
        pairs = zip(self.allocation.tensors, self._rows(self.count), strict=True)
        return PackedTensors(*(x[:, :, :n] for x, n in pairs))

    def append(
        self, x: Tensor, nonpadding: Tensor | None = None, positions: Tensor | None = None
    ) -> None:
        """Quantize and add x [B, Hk, T, D]; per channel, T is a multiple of the group."""
        layer_encoding = self._bind(x)
        packed = self._with_room(x)
        one = x.shape[2] <= _CHUNK  # as in most steps: a generator costs more than its token
        chunks = [(x, nonpadding, positions)] if one else _chunks(x, nonpadding, positions)
        for tokens, mask, chunk_positions in chunks:
            angles = None
            if self.rope is not None:
                assert chunk_positions is not None
                angles = RopeAngles(*self.rope.angles(-chunk_positions), self.rope.interleaved)
            self.pack_plan(tokens, layer_encoding, packed, self.count, mask, angles)
            self.count += tokens.shape[2]
        self.dtype = x.dtype

    def view(
        self,
        lo: int = 0,
        hi: int | None = None,
        positions: Tensor | None = None,
        offloaded: Sequence[Tensor] | None = None,
    ) -> PackedView:
        """Return tokens lo to hi, as kernels read them."""
        assert self.allocation is not None, "no tokens yet"
        assert self.layer_encoding is not None, "no tokens yet"
        codes, scale, zero = self.allocation.tensors if offloaded is None else offloaded
        if scale.dtype == torch.uint8:  # fp8 is stored as bytes
            scale, zero = scale.view(self.layer_encoding.meta), zero.view(self.layer_encoding.meta)
        return PackedView(
            codes, scale, zero, self.layer_encoding, lo, self.count if hi is None else hi,
            self.dtype, self.rope, positions,
        )  # fmt: skip

    def drop_back(self, n: int) -> None:
        """Drop the n newest tokens, of a format that packs each token by itself."""
        assert self.fmt.tokens_per_scale == 1
        self.count -= n

    def clear(self) -> None:
        """Drop all tokens and the storage."""
        self.allocation, self.count = None, 0

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
        if state["codes"] is not None:  # it may have no token left, all others being in a tier
            assert like is not None
            _, heads, _, width = state["codes"]["live"].shape  # those of keys may differ
            self._bind(like.new_empty(len(like), heads, 0, width))
            self.dtype = like.dtype
            sides = (state[name] for name in PackedTensors._fields)
            self._allocate(_with_rows(side["live"], side["room"]) for side in sides)

    def _with_room(self, x: Tensor) -> PackedTensors:
        """Return codes, scales and zeros from token 0 on, with room for the tokens of x."""
        allocation, tokens = self.allocation, self.count + x.shape[2]
        if allocation is not None and tokens <= allocation.capacity:
            return allocation.tensors
        assert self.layer_encoding is not None
        needed = self._rows(tokens)
        if allocation is None:
            empty = _empty(x, self.layer_encoding)
            allocation = self._allocate(
                _with_rows(y, n) for y, n in zip(empty, needed, strict=True)
            )
            return allocation.tensors
        tight = self.fmt.packs_rarely
        grown = (
            stored if n <= stored.shape[2] else _with_rows(live, grown_capacity(n, tight))
            for stored, live, n in zip(allocation.tensors, self.live, needed, strict=True)
        )
        allocation.tensors = PackedTensors(*grown)
        allocation.capacity = self._capacity(allocation.tensors)
        return allocation.tensors

    def _replace(self, tensors: Iterable[Tensor], count: int) -> None:
        """Store a copy of codes, scales and zeros of `count` tokens."""
        self._allocate(x.clone(memory_format=torch.contiguous_format) for x in tensors)
        self.count = count

    def _allocate(self, tensors: Iterable[Tensor]) -> PackedAllocation:
        stored = PackedTensors(*tensors)
        self.allocation = PackedAllocation(stored, self._capacity(stored))
        return self.allocation

    def _capacity(self, tensors: PackedTensors) -> int:
        """Return how many tokens fit in tensors."""
        per_block, rows = PACK_BLOCK[self.fmt.bits]
        codes, scale, zero = (x.shape[2] for x in tensors)
        return min(codes // rows * per_block, min(scale, zero) * self.fmt.tokens_per_scale)

    def _rows(self, tokens: int) -> tuple[int, int, int]:
        """Return the rows of codes, scales and zeros of the first tokens."""
        groups = tokens // self.fmt.tokens_per_scale
        return rows_for(tokens, self.fmt.bits), groups, groups

    def _bind(self, x: Tensor) -> LayerEncoding:
        """Return the encoding of tokens like x [B, Hk, any, D], on its device.

        Raises `CacheMisuse` for a calibrated format without calibration.
        """
        if self.layer_encoding is None:
            layer_encoding = self.calibrated
            if layer_encoding is None:
                if self.fmt.calibrated:
                    raise CacheMisuse(
                        "a calibrated format needs the calibration of its layer; give it as facts"
                    )
                layer_encoding = self.fmt.encoding.bind(x.shape[1], x.shape[3])
            assert layer_encoding.encoding == self.fmt.encoding, "calibrated for another encoding"
            self.layer_encoding = layer_encoding.to(x.device)
        return self.layer_encoding


def _chunks(x: Tensor, *along: Tensor | None) -> Iterator[tuple[Any, ...]]:
    """Yield x [B, Hk, N, D] and tensors [., ., N] along its tokens, a chunk at a time."""
    for lo in range(0, x.shape[2], _CHUNK):
        part = slice(lo, lo + _CHUNK)
        yield x[:, :, part], *(None if y is None else y[:, :, part] for y in along)


def _empty(x: Tensor, layer_encoding: LayerEncoding) -> PackedTensors:
    """Return codes, scales and zeros of no tokens, for tokens like x [B, Hk, any, D]."""
    b, h, _, d = x.shape
    rows, numbers = layer_encoding.scales
    meta = torch.uint8 if layer_encoding.meta == torch.float8_e4m3fn else layer_encoding.meta
    codes = x.new_empty(b, h, 0, d, dtype=torch.uint8)
    scales = x.new_empty(b, rows, 0, numbers, dtype=meta)
    return PackedTensors(
        codes, scales, scales if layer_encoding.encoding.zeros else scales[..., :0]
    )


def _with_rows(live: Tensor, rows: int) -> Tensor:
    """Return `live` [., ., n, .] in a new tensor of `rows` rows."""
    b, h, n, d = live.shape
    wider = live.new_empty(b, h, rows, d)
    wider[:, :, :n] = live
    return wider
