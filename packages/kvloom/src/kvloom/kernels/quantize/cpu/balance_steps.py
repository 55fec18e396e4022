"""Steps for tiles whose tokens and channels are normalized in turns.

The arithmetic is that of `quantize.balanced`, to the last bit. A tile is fp32 [tokens, d padded to
whole vectors], rows `row` bytes apart, 0 where there is padding. Addresses are int64. Importing
this imports Numba.
"""

from __future__ import annotations

import numpy as np

from ...cpu_runtime import kernel_step
from ...simd import larger, load, load_byte, load_one, smaller, splat, store, store_one
from ..balanced import LEAST, MOST, TURNS
from .codes import nonzero
from .rotation_steps import halved, limited, root
from .tiles import narrow, size_of, widen

_LEAST, _MOST = np.float32(LEAST), np.float32(MOST)
_ONE, _ZERO = np.float32(1.0), np.float32(0.0)


@kernel_step
def room_of_tile(tokens, d):  # type: ignore[no-untyped-def]
    """Numbers that `tile_factors` needs for its own."""
    return 4 * (tokens + d) + 32 * 16


@kernel_step
def _roots(squares, total, count, x, n):  # type: ignore[no-untyped-def]
    """Standard deviations of n rows from their sums of squares and their sums, to x."""
    whole, less = splat(_at_least_one(count)), splat(_at_least_one(count - _ONE))
    for i in range(0, n, 16):
        one = load(total + 4 * i)
        rest = load(squares + 4 * i) - one * (one / whole)
        store(x + 4 * i, root(larger(rest, splat(_ZERO)) / less))


@kernel_step
def _at_least_one(count):  # type: ignore[no-untyped-def]
    """A count, or 1 if it is less."""
    return max(count, _ONE)


@kernel_step
def _of_tokens(x, row, tokens, dp, by, count, room, to):  # type: ignore[no-untyped-def]
    """Standard deviations of tokens whose channels are multiplied by `by`, to `to`."""
    total = room
    squares = room + 4 * tokens
    for t in range(tokens):
        one = load(x + t * row) * load(by)
        first, second = one, one * one
        for c in range(16, dp, 16):
            one = load(x + t * row + 4 * c) * load(by + 4 * c)
            first, second = first + one, second + one * one
        store_one(total + 4 * t, halved(first))
        store_one(squares + 4 * t, halved(second))
    _roots(squares, total, count, to, tokens)


@kernel_step
def _of_channels(x, row, tokens, dp, by, count, room, to):  # type: ignore[no-untyped-def]
    """Standard deviations of channels whose tokens are multiplied by `by`, to `to`."""
    for c in range(0, dp, 16):
        for i in range(16):
            one = load(x + i * row + 4 * c) * splat(load_one(by + 4 * i, 0))
            first, second = one, one * one
            for t in range(i + 16, tokens, 16):
                one = load(x + t * row + 4 * c) * splat(load_one(by + 4 * t, 0))
                first, second = first + one, second + one * one
            store(room + 64 * i, first)
            store(room + 1024 + 64 * i, second)
        half = 8
        while half > 0:
            for i in range(half):
                for to_add in (0, 1024):
                    here = room + to_add + 64 * i
                    store(here, load(here) + load(here + 64 * half))
            half //= 2
        _roots(room + 1024, room, count, to + 4 * c, 16)


@kernel_step
def _spread(x, by, n):  # type: ignore[no-untyped-def]
    """Of x times by, the largest over the smallest that is not 0."""
    most, least = _ZERO, np.float32(np.inf)
    for i in range(n):
        one = load_one(x + 4 * i, 0) * load_one(by + 4 * i, 0)
        most = max(most, one)
        if one > _ZERO:
            least = min(least, one)
    return most / least


@kernel_step
def _limit(x, n, low, high, to, inverse):  # type: ignore[no-untyped-def]
    """Write n numbers within limits, and one over each."""
    for i in range(0, n, 16):
        one = smaller(larger(load(x + 4 * i), splat(low)), splat(high))
        store(to + 4 * i, one)
        store(inverse + 4 * i, splat(_ONE) / one)


@kernel_step
def clear_padding(x, row, tokens, d, dp, nonpadding):  # type: ignore[no-untyped-def]
    """Set the rest of a tile to 0: padding, and channels behind d.

    nonpadding: the address of a byte a token, 0 for padding; or 0. Returns how many are not
    padding.
    """
    count = _ZERO
    for t in range(tokens):
        if nonpadding == 0 or load_byte(nonpadding + t) != 0:
            count += _ONE
            for c in range(d, dp):
                store_one(x + t * row + 4 * c, _ZERO)
        else:
            for c in range(0, dp, 16):
                store(x + t * row + 4 * c, splat(_ZERO))
    return count


@kernel_step
def tile_factors(x, row, tokens, d, dp, count, of_tokens, room):  # type: ignore[no-untyped-def]
    """Return the address of what tokens, or else channels, of a tile are divided by.

    count: tokens of the tile that are not padding. room: `room_of_tile` numbers.
    """
    by_token, by_channel = room, room + 4 * tokens
    token_by, channel_by = by_channel + 4 * dp, by_channel + 4 * (dp + tokens)
    its_tokens, its_channels = channel_by + 4 * dp, channel_by + 4 * (dp + tokens)
    best, spare = its_channels + 4 * dp, its_channels + 4 * (dp + max(tokens, dp))
    total = splat(_ZERO)
    for c in range(0, dp, 16):
        store(channel_by + 4 * c, splat(_ONE))
    _of_tokens(x, row, tokens, dp, channel_by, np.float32(d), spare, by_token)
    squares = spare + 4 * tokens
    for t in range(0, tokens, 16):
        total = total + load(squares + 4 * t)
    store(spare, splat(halved(total)) / splat(_at_least_one(count * np.float32(d))))
    store(spare, root(load(spare)))
    size = load_one(spare, 0)
    if size == _ZERO:
        size = _ONE
    kept = its_tokens if of_tokens else its_channels
    n = tokens if of_tokens else dp
    for i in range(0, n, 16):
        store(best + 4 * i, splat(_ONE))
    least = np.float32(np.inf)
    for _ in range(TURNS):
        _limit(by_token, tokens, size * _LEAST, size * _MOST, its_tokens, token_by)
        _of_channels(x, row, tokens, dp, token_by, count, spare, by_channel)
        _limit(by_channel, dp, _LEAST, _MOST, its_channels, channel_by)
        _of_tokens(x, row, tokens, dp, channel_by, np.float32(d), spare, by_token)
        imbalance = _spread(by_token, token_by, tokens) + _spread(by_channel, channel_by, d)
        if imbalance < least:
            least = imbalance
            for i in range(0, n, 16):
                store(best + 4 * i, load(kept + 4 * i))
    return best


@kernel_step
def divide_tile(x, row, tokens, dp, factor, by_token):  # type: ignore[no-untyped-def]
    """Divide the tokens, or else the channels, of a tile by stored factors, fp32; 0 gives 0."""
    for t in range(tokens):
        one = nonzero(splat(load_one(factor + 4 * t, 0))) if by_token else splat(_ONE)
        for c in range(0, dp, 16):
            if not by_token:
                one = nonzero(load(factor + 4 * c))
            here = x + t * row + 4 * c
            store(here, load(here) / one)


@kernel_step
def multiply_row(x, dp, factor, t, by_token):  # type: ignore[no-untyped-def]
    """Invert `divide_tile` for token t of a tile."""
    for c in range(0, dp, 16):
        one = splat(load_one(factor + 4 * t, 0)) if by_token else load(factor + 4 * c)
        store(x + 4 * c, load(x + 4 * c) * one)


@kernel_step
def keep_factors(x, n, meta, to):  # type: ignore[no-untyped-def]
    """Store n factors, none of them larger than the format's largest, and leave them as stored."""
    for i in range(0, n, 16):
        store(x + 4 * i, limited(load(x + 4 * i), meta))
    narrow(x, n, meta, to)
    widen(to, size_of(meta), meta, n, x)
