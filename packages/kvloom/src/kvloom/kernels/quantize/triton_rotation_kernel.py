"""Triton: rotate channels, and round rotated groups to levels, in the order of `hadamard`.

Every sum takes its terms in the reference's order, so codes and scales are the reference's to the
last bit. The number of channels that are rotated together is a power of 2.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .triton_kernel import _VARY, as_stored, join, rounded_scale, tile_of


@triton.jit
def hadamard(x, G: tl.constexpr, STAGES: tl.constexpr, NORM: tl.constexpr):
    """Multiply the rows of x [M, G] by the Hadamard matrix; NORM: 1 / sqrt(G)."""
    second = tl.arange(0, 2)[None, None, :, None] == 1
    for i in tl.static_range(STAGES):
        pairs = tl.reshape(x, [x.shape[0], G >> (i + 1), 2, 1 << i])
        plus = tl.sum(pairs, axis=2)[:, :, None, :]
        minus = tl.sum(tl.where(second, -pairs, pairs), axis=2)[:, :, None, :]
        x = tl.reshape(tl.where(second, minus, plus), [x.shape[0], G])
    return x * NORM


@triton.jit
def _summed(x, G: tl.constexpr, HALVINGS: tl.constexpr):
    """Sum the rows of x [M, G] as `hadamard.summed` does; HALVINGS: log2 of 16 or, if less, G."""
    WIDTH: tl.constexpr = 1 << HALVINGS
    PARTS: tl.constexpr = G // WIDTH
    parts = tl.reshape(x, [x.shape[0], PARTS, WIDTH])
    place = tl.arange(0, PARTS)[None, :, None]
    total = tl.sum(tl.where(place == 0, parts, 0.0), axis=1)
    for i in tl.static_range(1, PARTS):
        total += tl.sum(tl.where(place == i, parts, 0.0), axis=1)
    for i in tl.static_range(HALVINGS):
        total = tl.sum(tl.reshape(total, [x.shape[0], 2, WIDTH >> (i + 1)]), axis=1)
    return tl.reshape(total, [x.shape[0]])


@triton.jit(do_not_specialize=["tokens", "rows"])
def rotate(
    x, signs, out, rows, heads, tokens, x_row, x_head, x_token, x_channel,
    D: tl.constexpr, G: tl.constexpr, STAGES: tl.constexpr, NORM: tl.constexpr, M: tl.constexpr,
    BACK: tl.constexpr,
):  # fmt: skip
    """Rotate each G channels of x [B, H, T, D]; out: contiguous. A program takes M groups.

    rows: B x H x T x D/G. signs: fp32 [G]. BACK: whether to invert the rotation.
    """
    row = tl.program_id(0).to(tl.int64) * M + tl.arange(0, M)
    group, token = row % (D // G), row // (D // G)
    head = token // tokens
    channel = tl.arange(0, G)
    sign = tl.load(signs + channel)[None, :]
    place = head // heads * x_row + head % heads * x_head + token % tokens * x_token
    channels = (group * G)[:, None] + channel[None, :]
    mask = (row < rows)[:, None]
    values = tl.load(x + place[:, None] + channels * x_channel, mask=mask, other=0.0)
    values = values.to(tl.float32)
    if BACK:
        values = hadamard(values, G, STAGES, NORM) * sign
    else:
        values = hadamard(values * sign, G, STAGES, NORM)
    tl.store(
        out + (row * G)[:, None] + channel[None, :], values.to(out.dtype.element_ty), mask=mask
    )


@triton.jit(do_not_specialize=_VARY)
def pack_levels(
    x, signs, levels, ends, codes, scale, begin, n, heads,
    x_row, x_head, x_token, x_channel, c_row, c_head, c_byte, m_row, m_head, m_line, D, groups,
    BITS_X2: tl.constexpr, TOP: tl.constexpr, META: tl.constexpr, MOST: tl.constexpr,
    PACK_BLOCK: tl.constexpr, A: tl.constexpr, P: tl.constexpr, DB: tl.constexpr,
    BEGUN: tl.constexpr, G: tl.constexpr, STAGES: tl.constexpr, NORM: tl.constexpr,
    ROOT: tl.constexpr, HALVINGS: tl.constexpr,
):  # fmt: skip
    """Rotate, round and pack a tile of the n tokens after `begin`. Grid as for `pack`.

    levels, ends: as `hadamard.levels` and `hadamard.ends`. MOST: the largest scale. ROOT: sqrt(G).
    """
    row, head, block, channel, inside, token, token_mask = tile_of(
        begin, n, heads, D, PACK_BLOCK, A, P, DB
    )
    mask = token_mask[:, :, None] & inside[None, None, :]
    offset = token.to(tl.int64)[:, :, None] * x_token + channel[None, None, :] * x_channel
    values = tl.load(x + row * x_row + head * x_head + offset, mask=mask, other=0.0).to(tl.float32)
    ROWS: tl.constexpr = A * P * (DB // G)
    sign = tl.load(signs + tl.arange(0, G))[None, :]
    rotated = hadamard(tl.reshape(values, [ROWS, G]) * sign, G, STAGES, NORM)
    norm = tl.sqrt_rn(_summed(rotated * rotated, G, HALVINGS))
    inverse = tl.where(norm > 0, tl.div_rn(1.0, tl.where(norm > 0, norm, 1.0)), 0.0)
    unit = rotated * (inverse * ROOT)[:, None]
    code = tl.zeros([ROWS, G], tl.int32)
    for i in range(TOP):
        code += (unit > tl.load(ends + i)).to(tl.int32)
    level = tl.load(levels + code)
    length = tl.sqrt_rn(_summed(level * level, G, HALVINGS))
    step = tl.minimum(tl.div_rn(norm, tl.maximum(length, 1e-6)), MOST)
    step = tl.reshape(as_stored(rounded_scale(step, META), META), [A * P, DB // G])
    group = tl.arange(0, DB // G)
    where = (begin + token).to(tl.int64).reshape(A * P)[:, None] * m_line + group[None, :]
    written = token_mask.reshape(A * P)[:, None] & (group < groups)[None, :]
    tl.store(scale + row * m_row + head * m_head + where, step, mask=written)
    code = tl.where(mask, tl.reshape(code, [A, P, DB]), 0)
    join(
        code, begin % PACK_BLOCK, codes + row * c_row + head * c_head, block,
        (begin + n - 1) // PACK_BLOCK, c_byte, channel, inside, BITS_X2, P, BEGUN,
    )  # fmt: skip
