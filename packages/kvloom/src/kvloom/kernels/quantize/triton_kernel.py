"""Triton: quantize and pack in one pass, and back.

The arithmetic and the layout are those of the reference to the last bit: quotients are IEEE's, a
code is rounded half to even by adding 1.5 * 2^23, metadata are rounded in integers. So these run
without contracting a product and a sum into one rounding (enable_fp_fusion=False).

A tile is [A pack blocks, P tokens, D channels]; P is the tokens of a pack block, or 8 for the 5 of
1.5 bits. A program of `pack` owns a tile: per channel, one group of tokens. Loads of neighboring
channels are contiguous, and a byte is the sum of its tokens' shares, so bytes that are begun are
added to.

Reference: `reference.quantize`, `pack_codes`, `dequantize`. Tolerance: none; unpacking rounds
code * scale + zero once, as torch does, where the interpreter rounds twice if metadata are fp32.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Do not compile again for what changes from step to step.
_VARY = ["begin", "n", "lo", "hi", "nonpadding_row", "nonpadding_head"]


@triton.jit
def round_to(x, META: tl.constexpr):
    """Round x fp32 to nearest even as the metadata dtype (0 fp32, 1 fp16, 2 bf16, 3 e4m3)."""
    if META == 1:
        x = x.to(tl.float16).to(tl.float32)
    if META == 2:
        bits = x.to(tl.int32, bitcast=True)
        bits += 0x7FFF + ((bits >> 16) & 1)
        x = ((bits >> 16) << 16).to(tl.float32, bitcast=True)
    if META == 3:
        bits = x.to(tl.int32, bitcast=True)
        bits += 0x7FFFF + ((bits >> 20) & 1)
        normal = ((bits >> 20) << 20).to(tl.float32, bitcast=True)
        small = (tl.abs(x) + 16384.0) - 16384.0  # to multiples of 2^-9
        small = tl.where(x < 0, -small, small)
        x = tl.where(tl.abs(x) < 0.015625, small, normal)
    return x


@triton.jit
def as_stored(x, META: tl.constexpr):
    """Return x fp32, which the metadata dtype holds, as it is stored; e4m3 as bytes."""
    if META == 1:
        x = x.to(tl.float16)
    if META == 2:
        x = x.to(tl.bfloat16)
    if META == 3:
        bits = x.to(tl.int32, bitcast=True)
        normal = ((bits >> 20) & 0x7FF) - 960  # exponents count from 7 instead of 127
        size = tl.where(
            tl.abs(x) < 0.015625, tl.minimum(tl.abs(x) * 512.0, 7.0).to(tl.int32), normal
        )
        x = (((bits >> 24) & 128) | (size & 127)).to(tl.uint8)
    return x


@triton.jit
def as_float(x):
    """Return what `as_stored` made in fp32; bytes are e4m3, by hand: not all GPUs know it."""
    if x.dtype == tl.uint8:
        byte = x.to(tl.int32)
        normal = (((byte & 127) << 20) + (120 << 23)).to(tl.float32, bitcast=True)
        small = (byte & 7).to(tl.float32) * 0.001953125
        size = tl.where((byte & 120) == 0, small, normal)
        x = tl.where(byte > 127, -size, size)
    return x.to(tl.float32)


@triton.jit
def rounded_scale(scale, META: tl.constexpr):
    """Round a scale; e4m3 neither rounds it to 0 nor lets it overflow."""
    if META == 3:
        scale = tl.where(scale > 0, tl.minimum(tl.maximum(scale, 0.001953125), 448.0), scale)
    return round_to(scale, META)


@triton.jit
def metadata(low, high, TOP: tl.constexpr, META: tl.constexpr):
    """Return scale and zero, as stored, of groups from low to high."""
    scale = tl.div_rn(high - low, tl.full(low.shape, TOP, tl.float32))
    if META == 3:
        low = tl.minimum(tl.maximum(low, -448.0), 448.0)
    return rounded_scale(scale, META), round_to(low, META)


@triton.jit
def encode(x, scale, zero, TOP: tl.constexpr):
    """Return codes int32 of x, given the stored scale and zero of its groups."""
    positive = scale > 0
    ratio = tl.div_rn(x - zero, tl.where(positive, scale, 1.0))
    ratio = tl.minimum(tl.maximum(ratio, 0.0), TOP * 1.0)
    code = (ratio + 12582912.0).to(tl.int32, bitcast=True) & 255
    return tl.where(positive, code, 0)


@triton.jit
def put(
    byte, row, keep, codes, block, last, step, channel, inside,
    PER: tl.constexpr, BEGUN: tl.constexpr,
):  # fmt: skip
    """Store bytes [A, DB], row `row` of the PER rows of each pack block; add to begun ones.

    block: [A], numbers of pack blocks of the whole storage, up to `last`; the first one of all
    programs is begun or not. keep: a begun byte modulo this has the tokens before: an undone step
    may have left others behind them.
    """
    ptr = codes + (block * PER + row).to(tl.int64)[:, None] * step + channel[None, :]
    mask = (block <= last)[:, None] & inside[None, :]
    if BEGUN:
        first = (tl.program_id(0) == 0) & (tl.arange(0, block.shape[0]) == 0)
        byte += tl.load(ptr, mask=mask & first[:, None], other=0).to(tl.int32) % keep
    tl.store(ptr, byte.to(tl.uint8), mask=mask)


@triton.jit
def join(
    code, begun, codes, block, last, step, channel, inside,
    BITS_X2: tl.constexpr, P: tl.constexpr, BEGUN: tl.constexpr,
):  # fmt: skip
    """Store codes [A, P, DB] of the pack blocks `block`, 0 where there is no token.

    begun: the tokens of the first block that are stored already.
    """
    t = tl.arange(0, P)[None, :, None]
    if BITS_X2 == 6:
        keep = 1 << (2 * tl.minimum(begun, 4))
        low = tl.where(t < 4, (code & 3) << (2 * (t & 3)), 0)
        put(tl.sum(low, axis=1), 0, keep, codes, block, last, step, channel, inside, 3, BEGUN)
        keep = 1 << (2 * tl.maximum(begun - 4, 0))
        low = tl.where(t < 4, 0, (code & 3) << (2 * (t & 3)))
        put(tl.sum(low, axis=1), 1, keep, codes, block, last, step, channel, inside, 3, BEGUN)
        high = (code >> 2) << t
        put(
            tl.sum(high, axis=1), 2, 1 << begun, codes, block, last, step, channel, inside, 3,
            BEGUN,
        )  # fmt: skip
    elif BITS_X2 == 3:
        byte = tl.sum(code * power_of_3(t), axis=1)
        keep = power_of_3(begun)
        put(byte, 0, keep, codes, block, last, step, channel, inside, 1, BEGUN)
    else:
        byte = tl.sum(code << (t * (BITS_X2 // 2)), axis=1)
        keep = 1 << (begun * (BITS_X2 // 2))
        put(byte, 0, keep, codes, block, last, step, channel, inside, 1, BEGUN)


@triton.jit
def power_of_3(t):
    """Return 3 ** t, t from 0 to 4."""
    power = tl.where(t == 0, 1, tl.where(t == 1, 3, tl.where(t == 2, 9, 27)))
    return tl.where(t == 4, 81, power)


@triton.jit
def tile_of(
    begin, n, heads, D,
    PACK_BLOCK: tl.constexpr, A: tl.constexpr, P: tl.constexpr, DB: tl.constexpr,
):  # fmt: skip
    """Return the tile of a program among the n tokens after `begin`.

    Returns its batch row, head, pack blocks [A], channels [DB] and which of these exist, tokens
    [A, P] counted from `begin`, and which of these exist.
    """
    line = tl.program_id(1).to(tl.int64)
    block = begin // PACK_BLOCK + tl.program_id(0) * A + tl.arange(0, A)
    within = tl.arange(0, P)
    channel = tl.program_id(2) * DB + tl.arange(0, DB)
    token = (block * PACK_BLOCK)[:, None] + within[None, :] - begin
    token_mask = (token >= 0) & (token < n) & (within < PACK_BLOCK)[None, :]
    return line // heads, line % heads, block, channel, channel < D, token, token_mask


@triton.jit(do_not_specialize=_VARY)
def pack(
    x, nonpadding, codes, scale, zero, begin, n, heads,
    x_row, x_head, x_token, x_channel, nonpadding_row, nonpadding_head, c_row, c_head, c_byte,
    m_row, m_head, m_line, D, groups,
    BITS_X2: tl.constexpr, TOP: tl.constexpr, META: tl.constexpr, CHANNEL: tl.constexpr,
    PACK_BLOCK: tl.constexpr, A: tl.constexpr, P: tl.constexpr, DB: tl.constexpr, G: tl.constexpr,
    HAS_PADDING: tl.constexpr, BEGUN: tl.constexpr, CODES: tl.constexpr,
):  # fmt: skip
    """Quantize and pack a tile of the n tokens after `begin`.

    Grid: (tiles of A pack blocks, row and head, ranges of DB channels). CHANNEL: a tile is a group
    of tokens, their number divides `begin`. Else: groups of G channels, all in one tile. BEGUN: the
    first pack block holds tokens already. CODES: whether to store codes too.
    """
    row, head, block, channel, inside, token, token_mask = tile_of(
        begin, n, heads, D, PACK_BLOCK, A, P, DB
    )
    mask = token_mask[:, :, None] & inside[None, None, :]
    offset = token.to(tl.int64)[:, :, None] * x_token + channel[None, None, :] * x_channel
    values = tl.load(x + row * x_row + head * x_head + offset, mask=mask, other=0.0).to(tl.float32)
    scale += row * m_row + head * m_head
    zero += row * m_row + head * m_head

    if CHANNEL:
        counts = mask
        if HAS_PADDING:
            nonpadding += row * nonpadding_row + head * nonpadding_head
            seen = tl.load(nonpadding + token, mask=token_mask, other=0)
            counts = mask & (seen != 0)[:, :, None]
        low = tl.min(tl.min(tl.where(counts, values, float("inf")), axis=1), axis=0)
        high = tl.max(tl.max(tl.where(counts, values, float("-inf")), axis=1), axis=0)
        empty = low > high
        step, least = metadata(tl.where(empty, 0.0, low), tl.where(empty, 0.0, high), TOP, META)
        where = (begin // (A * PACK_BLOCK) + tl.program_id(0)).to(tl.int64) * m_line + channel
        tl.store(scale + where, as_stored(step, META), mask=inside)
        tl.store(zero + where, as_stored(least, META), mask=inside)
        step, least = step[None, None, :], least[None, None, :]
    else:
        low = tl.where(mask, values, float("inf")).reshape(A * P, DB // G, G)
        high = tl.where(mask, values, float("-inf")).reshape(A * P, DB // G, G)
        low, high = tl.min(low, axis=2), tl.max(high, axis=2)
        empty = low > high
        step, least = metadata(tl.where(empty, 0.0, low), tl.where(empty, 0.0, high), TOP, META)
        group = tl.arange(0, DB // G)
        where = (begin + token).to(tl.int64).reshape(A * P)[:, None] * m_line + group[None, :]
        written = token_mask.reshape(A * P)[:, None] & (group < groups)[None, :]
        tl.store(scale + where, as_stored(step, META), mask=written)
        tl.store(zero + where, as_stored(least, META), mask=written)
        step = tl.broadcast_to(step[:, :, None], (A * P, DB // G, G)).reshape(A, P, DB)
        least = tl.broadcast_to(least[:, :, None], (A * P, DB // G, G)).reshape(A, P, DB)

    if CODES:
        code = tl.where(mask, encode(values, step, least, TOP), 0)
        join(
            code, begin % PACK_BLOCK, codes + row * c_row + head * c_head, block,
            (begin + n - 1) // PACK_BLOCK, c_byte, channel, inside, BITS_X2, P, BEGUN,
        )  # fmt: skip


@triton.jit(do_not_specialize=_VARY)
def pack_given(
    x, codes, scale, zero, columns, divisor, begin, n, heads,
    x_row, x_head, x_token, x_channel, c_row, c_head, c_byte, m_row, m_head, m_line, D,
    BITS_X2: tl.constexpr, TOP: tl.constexpr, PER: tl.constexpr,
    PACK_BLOCK: tl.constexpr, A: tl.constexpr, P: tl.constexpr, DB: tl.constexpr,
    BEGUN: tl.constexpr, DIVISOR: tl.constexpr,
):  # fmt: skip
    """Pack a tile of tokens whose metadata are stored already. Grid as for `pack`.

    columns: int32 [Hk, D], the column of the metadata that is a channel's; PER tokens share a line.
    divisor: fp32 [Hk, D], what channels are divided by before.
    """
    row, head, block, channel, inside, token, token_mask = tile_of(
        begin, n, heads, D, PACK_BLOCK, A, P, DB
    )
    mask = token_mask[:, :, None] & inside[None, None, :]
    offset = token.to(tl.int64)[:, :, None] * x_token + channel[None, None, :] * x_channel
    values = tl.load(x + row * x_row + head * x_head + offset, mask=mask, other=0.0).to(tl.float32)
    if DIVISOR:
        divisors = tl.load(divisor + head * D + channel, mask=inside, other=1.0)
        values = tl.div_rn(values, tl.broadcast_to(divisors[None, None, :], values.shape))
    column = tl.load(columns + head * D + channel, mask=inside, other=0)
    where = row * m_row + head * m_head
    where += ((begin + token) // PER).to(tl.int64)[:, :, None] * m_line + column[None, None, :]
    step = as_float(tl.load(scale + where, mask=mask, other=0))
    least = as_float(tl.load(zero + where, mask=mask, other=0))
    code = tl.where(mask, encode(values, step, least, TOP), 0)
    join(
        code, begin % PACK_BLOCK, codes + row * c_row + head * c_head, block,
        (begin + n - 1) // PACK_BLOCK, c_byte, channel, inside, BITS_X2, P, BEGUN,
    )  # fmt: skip


@triton.jit(do_not_specialize=_VARY)
def ranges(
    x, columns, clip, divisor, scale, zero, begin, n, heads, x_row, x_head, x_token, x_channel,
    m_row, m_line, D,
    TOP: tl.constexpr, META: tl.constexpr, TB: tl.constexpr, DB: tl.constexpr,
    DIVISOR: tl.constexpr,
):  # fmt: skip
    """Write metadata [B, 1, N, groups] of any groups. Grid: (tiles of TB tokens, B, groups).

    columns: int32 [Hk, D], each channel's group. clip: fp32 [groups].
    """
    row, group = tl.program_id(1).to(tl.int64), tl.program_id(2)
    token = tl.program_id(0) * TB + tl.arange(0, TB)
    channel = tl.arange(0, DB)
    low = tl.full([TB], float("inf"), tl.float32)
    high = tl.full([TB], float("-inf"), tl.float32)
    for head in range(heads):
        group_mask = tl.load(columns + head * D + channel, mask=channel < D, other=-1) == group
        mask = (token < n)[:, None] & group_mask[None, :]
        offset = row * x_row + head * x_head
        offset += token.to(tl.int64)[:, None] * x_token + channel[None, :] * x_channel
        values = tl.load(x + offset, mask=mask, other=0.0).to(tl.float32)
        if DIVISOR:
            divisors = tl.load(divisor + head * D + channel, mask=group_mask, other=1.0)
            values = tl.div_rn(values, tl.broadcast_to(divisors[None, :], values.shape))
        low = tl.minimum(low, tl.min(tl.where(mask, values, float("inf")), axis=1))
        high = tl.maximum(high, tl.max(tl.where(mask, values, float("-inf")), axis=1))
    low, high = tl.where(token < n, low, 0.0), tl.where(token < n, high, 0.0)
    alpha = tl.load(clip + group)
    step, least = metadata(low * alpha, high * alpha, TOP, META)
    where = row * m_row + (begin + token).to(tl.int64) * m_line + group
    tl.store(scale + where, as_stored(step, META), mask=token < n)
    tl.store(zero + where, as_stored(least, META), mask=token < n)


@triton.jit(do_not_specialize=_VARY)
def unpack(
    codes, scale, zero, levels, columns, divisor, out, lo, hi, heads, c_row, c_head, c_byte,
    m_row, m_head, m_line, D,
    BITS_X2: tl.constexpr, PER: tl.constexpr, PACK_BLOCK: tl.constexpr,
    A: tl.constexpr, P: tl.constexpr, DB: tl.constexpr, DIVISOR: tl.constexpr, LEVELS: tl.constexpr,
):  # fmt: skip
    """Write tokens lo to hi as numbers: out [B, Hk, hi - lo, D]. Grid: `pack`'s from lo's block.

    LEVELS: whether codes are those of `levels`.
    """
    row, head, block, channel, inside, token, token_mask = tile_of(
        lo, hi - lo, heads, D, PACK_BLOCK, A, P, DB
    )
    mask = token_mask[:, :, None] & inside[None, None, :]
    codes += row * c_row + head * c_head
    byte_mask = (block * PACK_BLOCK < hi)[:, None] & inside[None, :]
    t = tl.arange(0, P)[None, :, None]
    if BITS_X2 == 6:
        ptr = codes + (block * 3).to(tl.int64)[:, None] * c_byte + channel[None, :]
        first = tl.load(ptr, mask=byte_mask, other=0).to(tl.int32)[:, None, :]
        second = tl.load(ptr + c_byte, mask=byte_mask, other=0).to(tl.int32)[:, None, :]
        third = tl.load(ptr + 2 * c_byte, mask=byte_mask, other=0).to(tl.int32)[:, None, :]
        code = (tl.where(t < 4, first, second) >> (2 * (t & 3))) & 3
        code |= ((third >> t) & 1) << 2
    else:
        ptr = codes + block.to(tl.int64)[:, None] * c_byte + channel[None, :]
        byte = tl.load(ptr, mask=byte_mask, other=0).to(tl.int32)[:, None, :]
        if BITS_X2 == 3:
            code = byte // power_of_3(tl.minimum(t, 4)) % 3
        else:
            code = (byte >> (t * (BITS_X2 // 2))) & ((1 << (BITS_X2 // 2)) - 1)
    column = tl.load(columns + head * D + channel, mask=inside, other=0)
    where = row * m_row + head * m_head
    where += ((lo + token) // PER).to(tl.int64)[:, :, None] * m_line + column[None, None, :]
    step = as_float(tl.load(scale + where, mask=mask, other=0))
    if LEVELS:
        values = tl.load(levels + code, mask=mask, other=0.0) * step
    else:
        least = as_float(tl.load(zero + where, mask=mask, other=0))
        values = tl.fma(code.to(tl.float32), step, least)
    if DIVISOR:
        values *= tl.load(divisor + head * D + channel, mask=inside, other=1.0)[None, None, :]
    first = tl.program_id(1).to(tl.int64) * (hi - lo)
    place = (first + token.to(tl.int64))[:, :, None] * D + channel[None, None, :]
    tl.store(out + place, values.to(out.dtype.element_ty), mask=mask)
