"""Triton: decode attention over packed and exact tokens in one pass, and the merge of its parts.

Split-token flash decoding. The query rows of a group (R heads x T queries) are one tile, so every
packed byte is loaded once for all of them. Tokens are cut into regions in which keys and values
each have one form: both packed, one packed, both exact; or chosen tokens anywhere; or the span of
each head in one long row. A program of `_split` owns a range of tiles of one region for one
key/value head, a split, and leaves an unnormalized sum, the largest logit and the sum of weights;
`_merge` joins the splits of a row. A split of no tile leaves no sum, and none is read.

A tile of BN tokens begins where bytes and groups begin. Words of four channels, [BN / per_byte,
D / 4], spread to the tokens of their bytes by shifts along a dimension between the two; scales and
zeros likewise, so each is loaded once. Only where tokens are chosen, and at 1.5 bits (five to a
byte), does every token find its own byte. With scales in fp16 or e4m3, and tokens not in fp32,
a token is unpacked in fp16, two channels at a time: a permutation of bytes makes 1024 + c of a
code, or its level, and code * scale + zero is rounded once, as in the reference's unpacked copy.
It enters the products in fp16, beside queries and weights in fp16, which are brought into its
range. Other tokens are unpacked in fp32 and enter in the model's dtype. Sums are fp32. Reference:
`reference.attend_exact`; tolerance: see `tests/kernels/test_gpu_attend.py`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ... import triton_runtime
from ...quantize.triton_kernel import as_float
from ...quantize.triton_rotation_kernel import hadamard
from .arguments import Side

CHANNEL, TOKEN, MAPPED, STATIC = (tl.constexpr(i) for i in range(4))
PLACES = "all_splits", "rotated_splits", "first_rotated", "first_plain"  # of `store_split`
KEYS, VALUES = tl.constexpr(1), tl.constexpr(2)  # the side that is packed; as in `decode`
LIFT = tl.constexpr(14.0)
LOG2E = tl.constexpr(1.4426950408889634)
INTERPRETED = tl.constexpr(triton_runtime.interpreted())


@triton.jit
def _rows(ptr, step, row, ok, o_d, D: tl.constexpr, DP: tl.constexpr):
    """Return the rows `row` [N] of a matrix with D channels: [N, DP], zeros after."""
    mask = ok[:, None]
    if D != DP:
        mask = mask & (o_d[None, :] < D)
    return tl.load(ptr + row.to(tl.int64)[:, None] * step + o_d[None, :], mask=mask, other=0)


@triton.jit
def _bytes_of(a, b, places):
    """Return words of four of the bytes of b and a (0 is a's lowest), one per digit of places."""
    if INTERPRETED:  # which knows no assembly
        both = b.to(tl.uint64) << 32 | a
        word = (both >> (places & 7) * 8) & 255
        for i in tl.static_range(1, 4):
            word |= ((both >> (places >> 4 * i & 7) * 8) & 255) << 8 * i
        word = word.to(tl.uint32)
    else:
        word = tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, $2, $3;", "=r,r,r,r", [a, b, places], tl.uint32, True, 1
        )
    return word


@triton.jit
def _register(WORD: tl.constexpr):
    """Return a word in a register, where a constant would be moved to one at each use."""
    return tl.full([], WORD, tl.uint32) | tl.program_id(1).to(tl.uint32)  # | 0: grids are rows


@triton.jit
def _fma(a, b, c):
    """Return a * b + c, rounded once; in fp16, of two numbers at a time."""
    if INTERPRETED or a.dtype != tl.float16:
        x = (a.to(tl.float32) * b.to(tl.float32) + c.to(tl.float32)).to(a.dtype)
    else:
        x = tl.inline_asm_elementwise(
            "fma.rn.f16x2 $0, $1, $2, $3;", "=r,r,r,r", [a, b, c], tl.float16, False, 2
        )
    return x


@triton.jit
def _copies(x, TIMES: tl.constexpr):
    """Repeat each row, [N, M] to [N, TIMES, M]; by reshape, so that no element moves."""
    one = tl.reshape(x, [x.shape[0], 1, x.shape[1]])
    return tl.broadcast_to(one, [x.shape[0], TIMES, x.shape[1]])


@triton.jit
def _meta(
    ptr, step, group_of, base, first, stop, n, ok, o_d,
    KIND: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BN: tl.constexpr,
    APART: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """Return scales or zeros of the tokens n [BN]: [BN, DP], or what broadcasts to it."""
    if KIND == CHANNEL:
        if APART:
            x = _rows(ptr, step, n // GROUP, ok, o_d, D, DP)
        elif GROUP >= BN:
            x = tl.load(ptr + base // GROUP * step + o_d, mask=o_d < D, other=0)[None, :]
        else:
            o_g = base + GROUP * tl.arange(0, BN // GROUP)
            in_region = (o_g + GROUP > first) & (o_g < stop)
            x = _rows(ptr, step, o_g // GROUP, in_region, o_d, D, DP)
    elif KIND == STATIC:
        x = tl.load(ptr + o_d, mask=o_d < D, other=0)[None, :]
    elif KIND == MAPPED:
        mask = ok[:, None] & (o_d[None, :] < D)
        x = tl.load(ptr + n.to(tl.int64)[:, None] * step + group_of[None, :], mask=mask, other=0)
    elif GROUP == D:
        x = tl.load(ptr + n.to(tl.int64) * step, mask=ok, other=0)[:, None]
    else:
        x = _rows(ptr, step, n, ok, tl.arange(0, DP // GROUP), D // GROUP, DP // GROUP)
    if x.dtype != dtype:
        x = as_float(x).to(dtype)
    if KIND == CHANNEL and not APART and GROUP < BN:
        x = tl.reshape(_copies(x, GROUP), [BN, DP])
    if KIND == TOKEN and GROUP != D:
        many = tl.broadcast_to(tl.reshape(x, [BN, DP // GROUP, 1]), [BN, DP // GROUP, GROUP])
        x = tl.reshape(many, [BN, DP])
    return x


@triton.jit
def _words(
    ptr, step, base, first, stop, n, ok, o_w,
    BITS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BN: tl.constexpr, APART: tl.constexpr,
):  # fmt: skip
    """Return words of 4 channels, in each byte of which a token's code is lowest: [BN, DP / 4]."""
    W: tl.constexpr = DP // 4
    if BITS == 15 or BITS == 8:
        per: tl.constexpr = 5 if BITS == 15 else 1
        words = _rows(ptr, step, n // per, ok, o_w, D // 4, W)
    elif BITS == 3:
        if APART:
            a = n[:, None] % 8
            low = _rows(ptr, step, n // 8 * 3 + n % 8 // 4, ok, o_w, D // 4, W) >> (a % 4 * 2)
            high = _rows(ptr, step, n // 8 * 3 + 2, ok, o_w, D // 4, W) >> a
        else:
            o_l = base + 4 * tl.arange(0, BN // 4)
            in_region = (o_l + 4 > first) & (o_l < stop)
            low = _rows(ptr, step, o_l // 8 * 3 + o_l % 8 // 4, in_region, o_w, D // 4, W)
            low = tl.reshape(_copies(low, 4) >> (2 * tl.arange(0, 4))[None, :, None], [BN, W])
            o_h = base + 8 * tl.arange(0, BN // 8)
            in_region = (o_h + 8 > first) & (o_h < stop)
            high = _rows(ptr, step, o_h // 8 * 3 + 2, in_region, o_w, D // 4, W)
            high = tl.reshape(_copies(high, 8) >> tl.arange(0, 8)[None, :, None], [BN, W])
        words = (low & 0x03030303) | ((high & 0x01010101) << 2)
    else:
        PER: tl.constexpr = 8 // BITS
        if APART:
            words = _rows(ptr, step, n // PER, ok, o_w, D // 4, W) >> (n[:, None] % PER * BITS)
        else:
            o_b = base + PER * tl.arange(0, BN // PER)
            in_region = (o_b + PER > first) & (o_b < stop)
            words = _rows(ptr, step, o_b // PER, in_region, o_w, D // 4, W)
            words = _copies(words, PER) >> (BITS * tl.arange(0, PER))[None, :, None]
            words = tl.reshape(words, [BN, W])
    return words


@triton.jit
def _halves(first, second, DP: tl.constexpr, BN: tl.constexpr):
    """Return numbers in fp16 of which words have channels 0 and 1, and 2 and 3: [BN, DP]."""
    pairs = tl.join(first, second)
    halves = tl.join(pairs & 0xFFFF, pairs >> 16).to(tl.uint16).to(tl.float16, bitcast=True)
    return tl.reshape(halves, [BN, DP])


@triton.jit
def _levels(
    words, X: tl.constexpr, TOKENS: tl.constexpr, DP: tl.constexpr, BN: tl.constexpr
):  # fmt: skip
    """Return the levels of the codes in words [BN / TOKENS, DP / 4] in fp16: [BN, DP].

    A byte has the code of a token, or two codes of 4 bits. X.table: the low bytes of eight levels,
    lowest first, in two words, and the high bytes; of 16 levels, it is the upper half, and the
    lower half is its mirror.
    """
    lower = words & 0
    if X.bits == 4:
        lower = (words & 0x88888888) ^ 0x88888888
        at = (words ^ (lower - (lower >> 3))) & 0x77777777
    else:
        at = words & (0x01010101 * ((1 << X.bits) - 1))
    first = _two_levels(at, lower, 0x1504, X, TOKENS)
    second = _two_levels(at >> 16, lower, 0x3726, X, TOKENS)
    W: tl.constexpr = DP // 4
    return _halves(tl.reshape(first, [BN, W]), tl.reshape(second, [BN, W]), DP, BN)


@triton.jit
def _two_levels(at, lower, SIGNS: tl.constexpr, X: tl.constexpr, TOKENS: tl.constexpr):
    """Return the levels of two channels at the four lowest digits of `at`: [N, TOKENS, W]."""
    low = _bytes_of(_register(X.table[0]), _register(X.table[1]), at)
    high = _bytes_of(_register(X.table[2]), _register(X.table[3]), at)
    if X.bits == 4:
        high ^= _bytes_of(lower, lower << 4, SIGNS) & 0x80808080
    places = 0x6240 + 0x1111 * tl.arange(0, TOKENS).to(tl.uint32)[None, :, None]
    return _bytes_of(_copies(low, TOKENS), _copies(high, TOKENS), places)


@triton.jit
def _codes(words, n, BITS: tl.constexpr, DP: tl.constexpr, BN: tl.constexpr, dtype: tl.constexpr):
    """Return the codes in words: [BN, DP] of dtype: fp16, fp32, or int32."""
    W: tl.constexpr = DP // 4
    TOP: tl.constexpr = (1 << BITS) - 1 if BITS < 8 else 255
    if dtype == tl.float16 and BITS != 15:  # 1024 + c is 0x6400 | c
        low, high = words & (TOP * 0x01010101), tl.full([BN, W], _register(0x64646464), tl.uint32)
        code = _halves(_bytes_of(low, high, 0x5140), _bytes_of(low, high, 0x7362), DP, BN)
        code = _fma(code, tl.full([1, 1], 1, tl.float16), tl.full([1, 1], -1024, tl.float16))
    else:
        words = tl.broadcast_to(tl.reshape(words, [BN, W, 1]), [BN, W, 4])
        code = (words >> (8 * tl.arange(0, 4))[None, None, :]).to(tl.int32) & TOP
        code = tl.reshape(code, [BN, DP])
        if BITS == 15:  # a byte is the sum of five codes times 3^a; inverse: of 3^a, times 65536
            a = n[:, None] % 5
            even = tl.where(a == 0, 65536, tl.where(a == 2, 7282, 810))
            whole = code * tl.where(a == 1, 21846, tl.where(a == 3, 2428, even)) >> 16
            code = whole - 3 * (whole * 21846 >> 16)
        if dtype != tl.int32:  # 2^23 + c is 0x4B000000 | c
            code = ((code | 0x4B000000).to(tl.float32, bitcast=True) - 8388608.0).to(dtype)
    return code


@triton.jit
def _load(
    x, base, first, stop, n, ok, o_d,
    X: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BN: tl.constexpr, APART: tl.constexpr,
):  # fmt: skip
    """Load the scales, zeros and words of packed tokens n [BN] of a side x."""
    WORK: tl.constexpr = tl.float16 if X.half else tl.float32
    scale = _meta(
        x.scale, x.meta_n, x.group_of, base, first, stop, n, ok, o_d,
        X.kind, X.group, D, DP, BN, APART, WORK,
    )  # fmt: skip
    zero = scale
    if X.rotation != 1:
        zero = _meta(
            x.zero, x.meta_n, x.group_of, base, first, stop, n, ok, o_d,
            X.kind, X.group, D, DP, BN, APART, WORK,
        )  # fmt: skip
    # Loaded last, codes have their elements where scales must go, and not the other way around.
    codes, step = x.codes.to(tl.pointer_type(tl.uint32)), x.codes_n // 4
    o_w = tl.arange(0, DP // 4)
    if X.rotation == 1 and X.half and X.bits == 4 and not APART:  # bytes as they are
        o_b = base + 2 * tl.arange(0, BN // 2)
        in_region = (o_b + 2 > first) & (o_b < stop)
        words = _rows(codes, step, o_b // 2, in_region, o_w, D // 4, DP // 4)
    else:
        words = _words(codes, step, base, first, stop, n, ok, o_w, X.bits, D, DP, BN, APART)
    return scale, zero, words


@triton.jit
def _unpacked(
    x, scale, zero, words, n, dtype: tl.constexpr,
    X: tl.constexpr, DP: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Return packed tokens n [BN] of a side x, without rotating any back: [BN, DP].

    In fp16 if X.half, which saves half of the instructions, else in dtype.
    """
    WORK: tl.constexpr = tl.float16 if X.half else tl.float32
    if X.rotation != 1:
        values = _fma(_codes(words, n, X.bits, DP, BN, WORK), scale, zero)
    elif X.half and X.bits <= 4:  # by levels; other rotated codes are affine
        levels = _levels(words, X, BN // words.shape[0], DP, BN)
        values = _fma(levels, scale, tl.zeros([1, 1], tl.float16))
    else:
        values = tl.load(x.levels + _codes(words, n, X.bits, DP, BN, tl.int32)).to(WORK) * scale
    if X.divided:
        values = values * x.divisor[None, :]
    if not X.half:
        values = values.to(dtype)
    return values


@triton.jit
def _walk(
    top, total, acc, q, first, stop, tile0, tile1, n_all, t, scale, softcap,
    k, k_packed_end, v, v_packed_end, visible, bias, slots, o_m, o_d, heads,
    K: tl.constexpr, V: tl.constexpr, K_PACKED: tl.constexpr, V_PACKED: tl.constexpr,
    D: tl.constexpr, DP: tl.constexpr, BN: tl.constexpr, OPTIONS: tl.constexpr,
):  # fmt: skip
    """Take tiles tile0 to tile1 of a region, tokens first to stop, into the running softmax.

    k, v: the sides of a head. K_PACKED, V_PACKED: whether the region's tokens are packed. scale:
    of the logits of each query row; those in `top` are to base 2. Weights are 2^LIFT times too
    large, so that fp16 holds small ones.
    """
    weights = tl.zeros([BN, q.shape[0]], tl.float32)
    for tile in range(tile0, tile1):
        base = first // BN * BN + tile * BN
        j = base + tl.arange(0, BN)  # places in masks
        ok = (j >= first) & (j < stop)
        n = j  # tokens
        if OPTIONS.chosen:
            n = tl.load(slots + j, mask=ok, other=0).to(tl.int32)
        if V_PACKED:  # scales of values are not copied ahead, so their loads begin here
            v_scale, v_zero, v_words = _load(
                v, base, first, stop, n, ok, o_d, V, D, DP, BN, OPTIONS.chosen
            )  # fmt: skip
        if K_PACKED:
            k_scale, k_zero, k_words = _load(
                k, base, first, stop, n, ok, o_d, K, D, DP, BN, OPTIONS.chosen
            )  # fmt: skip
            keys = _unpacked(
                k, k_scale, k_zero, k_words, n, k.tail.dtype.element_ty, K, DP, BN
            )  # fmt: skip
        else:
            keys = _rows(k.tail, k.tail_n, n - k_packed_end, ok, o_d, D, DP)
        s = tl.dot(keys, tl.trans(q), input_precision="tf32x3")
        if OPTIONS.softcapped:  # c tanh(x / c) = c - 2 c / (exp(2 x / c) + 1)
            s = tl.exp2(s * (scale * (2 * LOG2E / softcap))[None, :])
            s = (softcap - 2 * softcap / (s + 1)) * LOG2E
        else:
            s = s * (scale * LOG2E)[None, :]
        if OPTIONS.biased:
            bias_mask = (heads >= 0)[None, :] & ok[:, None]
            s += tl.load(bias + heads[None, :] + j[:, None], mask=bias_mask, other=0.0) * LOG2E
        mask = ok[:, None]
        if OPTIONS.causal:
            mask = mask & (j[:, None] <= n_all - t + o_m[None, :] % t)
        if OPTIONS.padded:
            mask = mask & (tl.load(visible + j, mask=ok, other=0) != 0)[:, None]
        s = tl.where(mask, s, -float("inf"))
        new = tl.maximum(top, tl.max(s, 0))
        sub = tl.where(new == -float("inf"), 0.0, new)
        p = tl.exp2(s - (sub - LIFT)[None, :])
        shrink = tl.exp2(top - sub)
        total = total * shrink
        weights = weights * shrink[None, :] + p
        if V_PACKED:
            values = _unpacked(
                v, v_scale, v_zero, v_words, n, v.tail.dtype.element_ty, V, DP, BN
            )  # fmt: skip
        else:
            values = _rows(v.tail, v.tail_n, n - v_packed_end, ok, o_d, D, DP)
        p = p.to(values.dtype)
        acc = acc * shrink[None, :] + tl.dot(tl.trans(values), p, input_precision="tf32x3")
        top = new
    return top, total + tl.sum(weights, 0), acc


@triton.jit
def side_of_head(x, h, o_d, X: tl.constexpr, D: tl.constexpr):
    """Return side x at head h, with the divisors and the groups of its channels."""
    divisor, group_of = o_d, o_d
    if X.divided:
        divisor = tl.load(x.divisor + h * D + o_d, mask=o_d < D, other=0.0)
    if X.kind == MAPPED:
        group_of = tl.load(x.group_of + h * D + o_d, mask=o_d < D, other=0).to(tl.int32)
    return Side(
        x.codes + h * x.codes_h, x.scale + h * x.meta_h, x.zero + h * x.meta_h,
        group_of, divisor, x.levels, x.tail + h * x.tail_h,
        x.codes_b, x.codes_h, x.codes_n, x.meta_b, x.meta_h, x.meta_n,
        x.tail_b, x.tail_h, x.tail_n,
    )  # fmt: skip


@triton.jit
def side_of_row(x, b):
    """Return side x at batch row, or block, b."""
    return Side(
        x.codes + b * x.codes_b, x.scale + b * x.meta_b, x.zero + b * x.meta_b,
        x.group_of, x.divisor, x.levels, x.tail + b * x.tail_b,
        x.codes_b, x.codes_h, x.codes_n, x.meta_b, x.meta_h, x.meta_n,
        x.tail_b, x.tail_h, x.tail_n,
    )  # fmt: skip


@triton.jit
def load_queries(q, turn, head, rows, scale, o_m, o_d, K: tl.constexpr, D: tl.constexpr):
    """Load queries o_m [BM] of a head's `rows`, and as packed keys need them: [BM, DP] each.

    turn: the signs of rotated channels, fp32, or the rotated queries where K.turns is 0.
    Both with the scales of their logits [BM]: queries in fp16 are divided by their largest number.
    """
    offsets = (head * rows + o_m)[:, None] * D + o_d[None, :]
    mask = (o_m < rows)[:, None] & (o_d[None, :] < D)
    plain = tl.load(q + offsets, mask=mask, other=0.0)
    packed = plain
    if K.turns > 0:
        G: tl.constexpr = 1 << K.turns
        signs = tl.load(turn + o_d % G)[None, :]
        groups = tl.reshape(plain.to(tl.float32) * signs, [plain.numel // G, G])
        packed = tl.reshape(hadamard(groups, G, K.turns, K.norm), plain.shape).to(plain.dtype)
    elif K.rotation:
        packed = tl.load(turn + offsets, mask=mask, other=0.0)
    scale = tl.full([o_m.shape[0]], scale, tl.float32)
    packed_scale = scale
    if K.half and q.dtype.element_ty != tl.float16:
        large = tl.max(tl.abs(packed.to(tl.float32)), 1)
        large = tl.where(large > 0, large, 1.0)
        packed = (packed.to(tl.float32) / large[:, None]).to(tl.float16)
        packed_scale = scale * large
    return plain, scale, packed, packed_scale


@triton.jit
def store_split(
    acc_ptr, ml_ptr, top, total, acc, head, rows, i, all_splits, rotated, first_rotated,
    first_plain, o_m, o_d, D: tl.constexpr, busy=True,
):  # fmt: skip
    """Store the state of split i of the query rows o_m [BM]; busy: whether it has tokens.

    Among all splits of all calls, the call's first `rotated` are from first_rotated on, and the
    others from first_plain + rotated on.
    """
    place = tl.where(i < rotated, first_rotated, first_plain) + i
    place += (head * rows + o_m) * all_splits
    mask = (o_m < rows)[:, None] & (o_d[None, :] < D)
    if busy:
        tl.store(acc_ptr + place[:, None] * D + o_d[None, :], tl.trans(acc), mask=mask)
    tl.store(ml_ptr + 2 * place, (top - LIFT) / LOG2E, mask=o_m < rows)
    tl.store(ml_ptr + 2 * place + 1, total, mask=o_m < rows)


@triton.jit
def _tiles_of(i, splits, tiles):
    """Return the tile range of program i among the `splits` of a region; empty for another i."""
    owned = (i >= 0) & (i < splits)
    lo = tl.where(owned, (i.to(tl.int64) * tiles // tl.maximum(splits, 1)).to(tl.int32), 0)
    hi = tl.where(owned, ((i.to(tl.int64) + 1) * tiles // tl.maximum(splits, 1)).to(tl.int32), 0)
    return lo, hi


@triton.jit
def exact(
    top, total, acc, q, count, scale, softcap, k, k_n, v, v_n, o_m, o_d,
    K: tl.constexpr, V: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BN: tl.constexpr,
    OPTIONS: tl.constexpr,
):  # fmt: skip
    """Take `count` exact tokens, side by side, into the running softmax."""
    keys = Side(k, k, k, o_d, o_d, k, k, 0, 0, 0, 0, 0, 0, 0, 0, k_n)
    values = Side(v, v, v, o_d, o_d, v, v, 0, 0, 0, 0, 0, 0, 0, 0, v_n)
    top, total, acc = _walk(
        top, total, acc, q, 0, count, 0, tl.cdiv(count, BN), count, 1, scale, softcap,
        keys, 0, values, 0, k, k, k, o_m, o_d, o_m, K, V, False, False, D, DP, BN, OPTIONS,
    )  # fmt: skip
    return top, total, acc


@triton.jit(do_not_specialize=[
    "k_packed_end", "v_packed_end", "bias_h", "visible_b", "visible_h", "bias_b", "where_b",
    "where_h", "n", "begin", "both_packed_end", "split0", "split1", "split2", "tiles0", "tiles1",
    "tiles2", "t", "r", "first_tokens", *PLACES,
])  # fmt: skip
def _split(
    q_ptr, turn_ptr, k, v, k_first, v_first, k_packed_end, v_packed_end, visible_ptr, bias_ptr,
    where_ptr, acc_ptr, ml_ptr, visible_b, visible_h, bias_b, bias_h, where_b, where_h,
    scale, softcap, h, share, r, t, n, begin, both_packed_end, split0, split1, split2, tiles0,
    tiles1, tiles2, first_tokens, all_splits, rotated_splits, first_rotated, first_plain,
    K: tl.constexpr, V: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr,
    BN0: tl.constexpr, BN1: tl.constexpr, PACKED_SIDE: tl.constexpr, OPTIONS: tl.constexpr,
    FIRST: tl.constexpr,
):  # fmt: skip
    """Attend to one split of a region by BM query rows of a head; grid: [splits x heads x rows].

    Region 0, tokens begin to both_packed_end: both sides in their formats (packed or not). Region
    1, to the later end of a packed prefix: one side packed, PACKED_SIDE (KEYS or VALUES; 0: there
    is no such token). Region 2, to n: both exact. With slots, region 0 is the tokens at the slots;
    with spans, it is those of the head's span, and tiles0 of them make a split. where: slots, or
    bounds of spans. h: heads of these or of the keys, `share` of the former to one of the latter.
    The first column of the mask and of the bias is that of token `begin`. A last split has
    `first_tokens` exact tokens that are stored apart, where there are any; FIRST: their options.
    """
    splits = split0 + split1 + split2
    if OPTIONS.first:
        splits += 1
    pid = tl.program_id(0)
    i = pid % splits
    head = (pid // splits).to(tl.int64)
    blocks = tl.cdiv(r * t, BM)
    block = head % blocks
    head = head // blocks
    b, hs = head // h, head % h
    hk = hs // share
    o_m = block.to(tl.int32) * BM + tl.arange(0, BM)
    o_d = tl.arange(0, DP)
    q, scale, rotated, rotated_scale = load_queries(
        q_ptr, turn_ptr, head, r * t, scale, o_m, o_d, K, D
    )  # fmt: skip
    k = side_of_row(side_of_head(k, hk, o_d, K, D), b)
    v = side_of_row(side_of_head(v, hk, o_d, V, D), b)
    where = where_ptr + b * where_b + hs * where_h
    busy = True
    if OPTIONS.spanned:
        begin = tl.load(where).to(tl.int32)
        n = begin + tl.load(where + 1).to(tl.int32)
        both_packed_end = n
        tiles = tl.where(n > begin, tl.cdiv(n, BN0) - begin // BN0, 0)
        split0, tiles0 = tl.cdiv(tiles, tiles0), tiles
        busy = i < split0
    visible = visible_ptr + b * visible_b + hs * visible_h - begin
    bias = bias_ptr + b * bias_b - begin
    heads = tl.where(o_m < r * t, (hs * r + o_m // t) * bias_h, -1)
    top = tl.full([BM], -float("inf"), tl.float32)
    total = tl.zeros([BM], tl.float32)
    acc = tl.zeros([DP, BM], tl.float32)
    lo, hi = _tiles_of(i, split0, tiles0)
    top, total, acc = _walk(
        top, total, acc, rotated, begin, both_packed_end, lo, hi, n, t, rotated_scale, softcap,
        k, k_packed_end, v, v_packed_end, visible, bias, where, o_m, o_d, heads,
        K, V, K.bits > 0, V.bits > 0, D, DP, BN0, OPTIONS,
    )  # fmt: skip
    if PACKED_SIDE > 0:
        lo, hi = _tiles_of(i - split0, split1, tiles1)
        any_packed_end = tl.maximum(k_packed_end, v_packed_end)
        region_q, region_scale = q, scale
        if PACKED_SIDE == KEYS:
            region_q, region_scale = rotated, rotated_scale
        top, total, acc = _walk(
            top, total, acc, region_q, both_packed_end, any_packed_end, lo, hi, n, t, region_scale,
            softcap,
            k, k_packed_end, v, v_packed_end, visible, bias, where, o_m, o_d, heads,
            K, V, PACKED_SIDE == KEYS, PACKED_SIDE == VALUES, D, DP, BN0, OPTIONS,
        )  # fmt: skip
    if (K.bits > 0 or V.bits > 0) and not (OPTIONS.chosen or OPTIONS.spanned):
        lo, hi = _tiles_of(i - split0 - split1, split2, tiles2)
        any_packed_end = tl.maximum(begin, tl.maximum(k_packed_end, v_packed_end))
        top, total, acc = _walk(
            top, total, acc, q, any_packed_end, n, lo, hi, n, t, scale, softcap,
            k, k_packed_end, v, v_packed_end, visible, bias, where, o_m, o_d, heads,
            K, V, False, False, D, DP, BN1, OPTIONS,
        )  # fmt: skip
    if OPTIONS.first:  # never with spans
        last = i == splits - 1
        if last:
            top, total, acc = exact(
                top, total, acc, q, first_tokens, scale, softcap,
                k_first.first + b * k_first.b + hk * k_first.h, k_first.n,
                v_first.first + b * v_first.b + hk * v_first.h, v_first.n,
                o_m, o_d, K, V, D, DP, BN1, FIRST,
            )  # fmt: skip
    store_split(
        acc_ptr, ml_ptr, top, total, acc, head, r * t, i, all_splits, rotated_splits,
        first_rotated, first_plain, o_m, o_d, D, busy,
    )  # fmt: skip


@triton.jit(do_not_specialize=["splits", "rotated"])
def _merge(
    acc_ptr, ml_ptr, out_ptr, rotated_ptr, lse_ptr, signs, splits, rotated,
    D: tl.constexpr, DP: tl.constexpr, BS: tl.constexpr, ROTATED: tl.constexpr,
    G: tl.constexpr, STAGES: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """Merge the splits of a query row; the first `rotated` have sums of rotated values.

    ROTATED: whether some have; their sum is rotated back in groups of G channels, or, where G is no
    power of 2 and STAGES is 0, stored apart.
    """
    row = tl.program_id(0).to(tl.int64)
    o_d, o_s = tl.arange(0, DP), tl.arange(0, BS)
    ml_ptr += 2 * row * splits
    acc_ptr += row * splits * D
    tops = tl.full([BS], -float("inf"), tl.float32)
    for s0 in range(0, splits, BS):
        inside = s0 + o_s < splits
        tops = tl.maximum(tops, tl.load(ml_ptr + 2 * (s0 + o_s), mask=inside, other=-float("inf")))
    top = tl.max(tops, 0)
    sub = tl.where(top == -float("inf"), 0.0, top)
    totals = tl.zeros([BS], tl.float32)
    out = tl.zeros([DP], tl.float32)
    back = tl.zeros([DP], tl.float32)
    for s0 in range(0, splits, BS):
        o = s0 + o_s
        inside = o < splits
        split_top = tl.load(ml_ptr + 2 * o, mask=inside, other=-float("inf"))
        weight = tl.exp(split_top - sub)
        totals += weight * tl.load(ml_ptr + 2 * o + 1, mask=inside, other=0.0)
        mask = (split_top != -float("inf"))[:, None] & (o_d[None, :] < D)
        acc = tl.load(acc_ptr + o[:, None] * D + o_d[None, :], mask=mask, other=0.0)
        acc = acc * weight[:, None]
        if ROTATED:
            back += tl.sum(tl.where((o < rotated)[:, None], acc, 0.0), 0)
            acc = tl.where((o < rotated)[:, None], 0.0, acc)
        out += tl.sum(acc, 0)
    total = tl.sum(totals, 0)
    divisor = tl.where(total > 0, total, 1.0)
    if ROTATED and STAGES > 0:
        groups = hadamard(tl.reshape(back, [DP // G, G]), G, STAGES, NORM)
        out += tl.reshape(groups * tl.load(signs + tl.arange(0, G))[None, :], [DP])
    tl.store(out_ptr + row * D + o_d, out / divisor, mask=o_d < D)
    if ROTATED and STAGES == 0:
        tl.store(rotated_ptr + row * D + o_d, back / divisor, mask=o_d < D)
    tl.store(lse_ptr + row, tl.where(total > 0, top + tl.log(divisor), -float("inf")))
