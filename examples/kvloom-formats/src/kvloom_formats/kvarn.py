"""KVarN: variance-normalized KV cache quantization (arXiv:2606.03458).

Each head is rotated by a Hadamard matrix. A tile of `unit` tokens of a head is then divided by the
standard deviations of its tokens and of its channels in turns, 16 times, and the turn is kept after
which they differ least. Keys are quantized by range per channel, values per token.

A side stores the factors of one axis, as those of the other only scale its ranges. Codes are
computed with the stored, rounded numbers. README.md has the departures from the paper.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from numba import njit
from torch import Tensor

import kvloom
from kvloom import Protect, Recipe, Store
from kvloom.errors import RecipeError
from kvloom.kernels import AttentionState, pack_codes, rotate, unpack_codes, unrotate
from kvloom.store import Format, FormatView, PackedView

from . import tiles

TURNS = 16
LEAST, MOST = 0.75, 2.0**14
"""Limits of what channels are divided by, and tokens in units of the tile's root mean square."""
META = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


@kvloom.register_format
@dataclass(frozen=True)
class KVarN(Format):
    """Rotated tiles, normalized over tokens and channels, and rounded to 1, 2, 3, 4 or 8 bits.

    Attributes:
        bits: 1, 2, 3, 4 or 8; the kernel does not read 3.
        axis: "channel" has a scale and a zero for each channel of a tile and a factor for each
            token (keys); "token" the other way round (values).
        unit: The number of tokens of a tile, a multiple of 8.
        meta: dtype of scales, zeros and factors: "fp32", "fp16" or "bf16".
    """

    bits: int = 2
    axis: str = "channel"
    unit: int = 128
    meta: str = "fp16"
    kind: ClassVar[str] = "kvarn"

    def __post_init__(self) -> None:
        choices = {"bits": (1, 2, 3, 4, 8), "axis": ("channel", "token"), "meta": tuple(META)}
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                shown = ", ".join(map(str, allowed))
                raise RecipeError(f"{name}={getattr(self, name)!r} is not one of {shown}")
        if self.unit < 8 or self.unit % 8:
            raise RecipeError(f"unit={self.unit} must be a multiple of 8 tokens")

    def pack(self, x: Tensor, nonpadding: Tensor | None = None) -> tuple[Tensor, ...]:
        """Return codes uint8 [B, Hk, T * bits / 8, D], and scales, zeros and factors by tile."""
        rotated = rotate(x.float()).unflatten(2, (-1, self.unit))  # [B, Hk, tiles, unit, D]
        live = None
        if nonpadding is not None:
            live = nonpadding.unflatten(2, (-1, self.unit)).unsqueeze(-1)
            rotated = torch.where(live, rotated, 0.0)
        tokens, channels = (fast_deviations if x.is_cpu else deviations)(rotated, live)
        by_channel, dtype = self.axis == "channel", META[self.meta]
        factor = (tokens if by_channel else channels).clamp_max(torch.finfo(dtype).max).to(dtype)
        normalized = rotated / torch.where(factor > 0, factor.float(), torch.inf)
        low, high = _range(normalized, -2 if by_channel else -1, live if by_channel else None)
        top = 2**self.bits - 1
        scale, zero = ((high - low) / top).to(dtype), low.to(dtype)
        step = torch.where(scale > 0, scale.float(), torch.inf)
        codes = ((normalized - zero.float()) / step).round().clamp(0, top).to(torch.uint8)
        numbers = torch.cat([part.flatten(3) for part in (scale, zero, factor)], dim=-1)
        return pack_codes(codes.flatten(2, 3), self.bits), numbers

    def unpack(self, tensors: tuple[Tensor, ...], dtype: torch.dtype) -> Tensor:
        """Return tokens [B, Hk, T, D]: (code * scale + zero) * factor, rotated back."""
        codes, numbers = tensors
        tokens, d = numbers.shape[2] * self.unit, codes.shape[3]
        blocks = unpack_codes(codes, self.bits, tokens).unflatten(2, (-1, self.unit)).float()
        sizes, dims = (d, d, self.unit), (-2, -2, -1)
        if self.axis == "token":
            sizes, dims = (self.unit, self.unit, d), (-1, -1, -2)
        parts = numbers.float().split(sizes, dim=-1)
        scale, zero, factor = (x.unsqueeze(dim) for x, dim in zip(parts, dims, strict=True))
        return unrotate(((blocks * scale + zero) * factor).flatten(2, 3)).to(dtype)

    @property
    def max_abs(self) -> float:
        """The largest magnitude whose scale, zero and factor can be stored."""
        stored = torch.finfo(META[self.meta]).max
        most = stored * min(1.0, (2**self.bits - 1) / 2) / 32  # rotation of up to 512 channels
        most *= stored if self.axis == "channel" else LEAST  # by how much a number is divided
        return min(most, 1e15)  # squares are summed in fp32

    def nbytes(self, tokens: int, head_dim: int, heads: int = 1) -> int:
        """Return the bytes of codes, scales, zeros and factors."""
        ranges, factors = head_dim, self.unit
        if self.axis == "token":
            ranges, factors = factors, ranges
        numbers = tokens // self.unit * (2 * ranges + factors)
        return heads * (tokens * head_dim * self.bits // 8 + numbers * META[self.meta].itemsize)

    # --8<-- [start:kernel]
    def attend_problems(
        self, q: Tensor, keys: Tensor | FormatView | PackedView,
        values: Tensor | FormatView | PackedView, *, visible: Tensor | None = None,
        bias: Tensor | None = None, softcap: float | None = None,
    ) -> list[str]:  # fmt: skip
        """Return why no kernel attends to these tokens; empty if one does."""
        reasons = tiles.problems(q, bias, softcap)
        formats = [x.fmt for x in (keys, values) if isinstance(x, FormatView)]
        ours = [fmt for fmt in formats if isinstance(fmt, KVarN)]
        if len(ours) < 2:
            reasons.append("keys and values are not both packed in it")
        if any(fmt.bits == 3 for fmt in ours):
            reasons.append("it does not read 3 bits")
        return reasons

    def attend(
        self, q: Tensor, keys: Tensor | FormatView | PackedView,
        values: Tensor | FormatView | PackedView, scale: float, *, visible: Tensor | None = None,
        bias: Tensor | None = None, softcap: float | None = None,
    ) -> AttentionState:  # fmt: skip
        """Attend to keys and values that are both packed in this format, on the CPU."""
        sides = (
            tiles.Side(reader(x.fmt.axis), _arrays(x), x.lo % x.fmt.unit) for x in (keys, values)
        )
        state = tiles.attend(rotate(q.float()), keys.hi - keys.lo, *sides, scale, visible)
        return state._replace(out=unrotate(state.out))

    # --8<-- [end:kernel]


def deviations(x: Tensor, live: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return what tokens [..., T, 1] and channels [..., 1, D] of tiles x are divided by.

    x: fp32 [..., T, D], 0 where live, bool [..., T, 1], is False: padding, which is not counted.
    """
    count = torch.full_like(x[..., :1, :1], x.shape[-2])
    if live is not None:
        count = live.sum(-2, keepdim=True).float().expand_as(count)
    d = torch.full_like(count, x.shape[-1])
    size = (x.square().sum((-2, -1), keepdim=True) / (count * d).clamp_min(1)).sqrt()
    size = torch.where(size > 0, size, 1.0)
    by_token, best = _deviation(x, d, -1), torch.full_like(size, torch.inf)
    tokens, channels = torch.ones_like(x[..., :1]), torch.ones_like(x[..., :1, :])
    for _ in range(TURNS):
        new_tokens = by_token.maximum(size * LEAST).minimum(size * MOST)
        by_channel = _deviation(x / new_tokens, count, -2)
        new_channels = by_channel.clamp(LEAST, MOST)
        by_token = _deviation(x / new_channels, d, -1)
        imbalance = _imbalance(by_token / new_tokens, -2)
        imbalance = imbalance + _imbalance(by_channel / new_channels, -1)
        better = imbalance < best
        best = torch.where(better, imbalance, best)
        tokens = torch.where(better, new_tokens, tokens)
        channels = torch.where(better, new_channels, channels)
    return tokens, channels


def fast_deviations(x: Tensor, live: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return `deviations` of tiles on the CPU, by a compiled kernel."""
    lead, (t, d) = x.shape[:-2], x.shape[-2:]
    flat = x.reshape(-1, t, d).contiguous()
    mask = torch.ones(1, t, dtype=torch.bool)  # one for all tiles
    if live is not None:
        mask = live.expand(*lead, t, 1).reshape(-1, t)
    tokens, channels = flat.new_empty(len(flat), t, 1), flat.new_empty(len(flat), 1, d)
    arrays = [part.numpy() for part in (flat, mask, tokens[..., 0], channels[:, 0])]
    tiles.in_threads(len(flat), lambda first, last: normalize_tiles(*arrays, first, last))
    return tokens.view(*lead, t, 1), channels.view(*lead, 1, d)


@njit(nogil=True, fastmath={"reassoc", "contract", "nsz"}, cache=True)
def normalize_tiles(x, live, tokens, channels, first, last):
    """Write what tokens and channels of tiles first to last are divided by; see `deviations`."""
    t, d = x.shape[1:]
    by_token, by_channel = np.empty(t, np.float32), np.empty(d, np.float32)
    new_tokens, new_channels = np.empty(t, np.float32), np.ones(d, np.float32)
    total, squares = np.empty(d, np.float32), np.empty(d, np.float32)
    for i in range(first, last):
        count = live[i % len(live)].sum()
        size = np.sqrt(np.square(x[i]).sum() / max(count * d, 1))
        size = size if size > 0 else np.float32(1.0)
        best = np.float32(np.inf)
        tokens[i], channels[i], new_channels[:] = 1.0, 1.0, 1.0
        for turn in range(TURNS + 1):
            for j in range(t):  # the deviations of tokens
                one = one_square = np.float32(0.0)
                for c in range(d):
                    value = x[i, j, c] / new_channels[c]
                    one += value
                    one_square += value * value
                by_token[j] = np.sqrt(max(one_square - one * one / d, 0) / max(d - 1, 1))
            if turn:
                imbalance = ratio(by_token, new_tokens) + ratio(by_channel, new_channels)
                if imbalance < best:
                    best = imbalance
                    tokens[i], channels[i] = new_tokens, new_channels
            if turn == TURNS:
                break
            total[:], squares[:] = 0.0, 0.0
            for j in range(t):
                new_tokens[j] = min(max(by_token[j], size * LEAST), size * MOST)
                for c in range(d):
                    value = x[i, j, c] / new_tokens[j]
                    total[c] += value
                    squares[c] += value * value
            for c in range(d):
                left = squares[c] - total[c] * total[c] / max(count, 1)
                by_channel[c] = np.sqrt(max(left, 0) / max(count - 1, 1))
                new_channels[c] = min(max(by_channel[c], LEAST), MOST)


@njit(nogil=True, cache=True)
def ratio(deviation, divisor):
    """Return the largest over the smallest quotient that is not 0."""
    low, high = np.float32(np.inf), np.float32(0.0)
    for i in range(len(deviation)):
        quotient = deviation[i] / divisor[i]
        high = max(high, quotient)
        if quotient > 0:
            low = min(low, quotient)
    return high / low


def _deviation(x: Tensor, count: Tensor, dim: int) -> Tensor:
    """Return the sample standard deviation of `count` numbers along a dimension, the others 0."""
    total = x.sum(dim, keepdim=True)
    squares = x.square().sum(dim, keepdim=True) - total * total / count.clamp_min(1)
    return (squares.clamp_min(0) / (count - 1).clamp_min(1)).sqrt()


def _imbalance(deviation: Tensor, dim: int) -> Tensor:
    """Return the largest over the smallest that is not 0."""
    positive = torch.where(deviation > 0, deviation, torch.inf)
    return deviation.amax(dim, keepdim=True) / positive.amin(dim, keepdim=True)


def _range(x: Tensor, dim: int, live: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the least and the largest of live numbers along a dimension; 0 where none is live."""
    if live is None:
        return x.amin(dim, keepdim=True), x.amax(dim, keepdim=True)
    low = torch.where(live, x, torch.inf).amin(dim, keepdim=True)
    high = torch.where(live, x, -torch.inf).amax(dim, keepdim=True)
    return torch.where(low <= high, low, 0.0), torch.where(low <= high, high, 0.0)


def _arrays(view: FormatView) -> tuple[np.ndarray, ...]:
    """Return codes and numbers as a reader takes them."""
    codes, numbers = map(tiles.heads_first, view.tensors)
    return codes, numbers, np.array([[view.fmt.bits, view.fmt.unit]])  # type: ignore[attr-defined]


def reader(axis: str) -> Any:
    """Return the reader of an axis."""
    return read_channels if axis == "channel" else read_tokens


@njit(nogil=True, fastmath=True, cache=True)
def read_channels(arrays, head, begin, count, out):
    """Write tokens of tiles that have a scale and a zero per channel and a factor per token."""
    codes, numbers, sizes = arrays
    bits, unit, d = sizes[0, 0], sizes[0, 1], codes.shape[2]
    per_byte, top = 8 // bits, (1 << bits) - 1
    for t in range(count):
        tile, row = (begin + t) // unit, (begin + t) // per_byte
        shift = (begin + t) % per_byte * bits
        factor = numbers[head, tile, 2 * d + (begin + t) % unit]
        for c in range(d):
            code = np.float32((codes[head, row, c] >> shift) & top)
            out[t, c] = (code * numbers[head, tile, c] + numbers[head, tile, d + c]) * factor


@njit(nogil=True, fastmath=True, cache=True)
def read_tokens(arrays, head, begin, count, out):
    """Write tokens of tiles that have a scale and a zero per token and a factor per channel."""
    codes, numbers, sizes = arrays
    bits, unit, d = sizes[0, 0], sizes[0, 1], codes.shape[2]
    per_byte, top = 8 // bits, (1 << bits) - 1
    for t in range(count):
        tile, row = (begin + t) // unit, (begin + t) // per_byte
        shift, own = (begin + t) % per_byte * bits, (begin + t) % unit
        scale, zero = numbers[head, tile, own], numbers[head, tile, unit + own]
        for c in range(d):
            code = np.float32((codes[head, row, c] >> shift) & top)
            out[t, c] = (code * scale + zero) * numbers[head, tile, 2 * unit + c]


@kvloom.register_recipe("kvarn")
def kvarn(
    bits: int = 2, value_bits: int = 0, unit: int = 128, sinks: int = 4, meta: str = "fp16"
) -> Recipe:
    """KVarN (arXiv:2606.03458): rotated tiles, normalized over tokens and channels.

    value_bits: 0 is as many as `bits`.
    """
    store = Store(
        keys=KVarN(bits, "channel", unit, meta),
        values=KVarN(value_bits or bits, "token", unit, meta),
    )
    return Recipe(store=store, protect=Protect(sinks), name="kvarn")
