"""Decode attention to chosen tokens, read where they are stored, compiled per format.

Decides the order of steps. A step reads a list of tokens: those of a tensor of their own (sinks),
those at given slots of a view, and all of the view from a token on. A task is a (batch row, head
that chooses, range of the list). It walks in tiles of `TILE` tokens: `BLOCK` tokens at a time are
written side by side in fp32, unpacked if need be, to scratch memory that stays in the core's
nearest cache, and are multiplied there with all query rows of the head; a running softmax stands
between scores and values. Reference: `reference.attend_gathered`; tolerance: 2e-6 absolute in fp32.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numba import njit

from ...cpu_runtime import Kernel, at, count, load_int
from ...cpu_runtime import arguments as read_arguments
from ...simd import SIZE, load_any, prefetch, splat, store
from .arguments import GATHERED
from .dequant import CHANNEL, MAP, DequantSpec
from .head_view import head_view as view_of_head
from .microkernel import scores, values
from .rope_tables import BEFORE, FAR
from .softmax import finish_task, start_task, weigh
from .unpack_token import out_of_block, unpack
from .variant import Variant

TILE = 128  # tokens of a running softmax
BLOCK = 32  # tokens that are unpacked at once
AHEAD = 16  # tokens between a prefetch and the read


@njit(inline="always")
def _token(x, n_first, n_slots, slots, begin):  # type: ignore[no-untyped-def]
    """The view's token that is number x of the list; below 0 for one of the first."""
    j = x - n_first
    if j >= n_slots:
        j = j - n_slots + begin
    elif j >= 0:
        j = load_int(slots, j)
    return j


@njit(inline="always")
def _prefetch(view, j, line, twice_bits, per_block, height, d, span, more):  # type: ignore[no-untyped-def]
    """Prefetch token j; line: bytes of an exact one, more: of a packed one's scales."""
    codes, row, packed, scale, zero, meta_row, _, tail, tail_row = view
    if twice_bits == 0 or j >= packed:
        for v in range(0, line, 64):
            prefetch(tail + (j - packed) * tail_row + v)
        return
    for v in range(0, height * d, 64):
        prefetch(codes + j // per_block * height * row + v)
    for v in range(0, more, 64):
        prefetch(scale + j // span * meta_row + v)
        prefetch(zero + j // span * meta_row + v)


@njit(inline="always")
def _unpack(to, j, view, near, far, room, twice_bits, per_block, height, d, span, meta, spec):  # type: ignore[no-untyped-def]
    """Write packed token j to `to` in fp32."""
    codes, row, _, scale, zero, meta_row, table, _, _ = view
    t = j % per_block
    unpack(
        to, codes + j // per_block * height * row, row, t, out_of_block(t, twice_bits),
        scale + j // span * meta_row, zero + j // span * meta_row, table, room, near, far, d, spec,
        meta,
    )  # fmt: skip


@cache
def kernel(variant: Variant) -> Any:
    """Compile the kernel of a variant; see `gathered.attend` for the call."""
    d, w, exact = variant.d, variant.w, variant.exact
    k, v = variant.keys, variant.values
    k_bits, v_bits, k_rope = k.twice_bits, v.twice_bits, k.rope_dims
    (k_per_block, k_height), (v_per_block, v_height) = k.per_block, v.per_block
    k_meta, v_meta = variant.meta
    k_span, v_span = (x or 1 for x in variant.span)
    k_first, v_first = (
        SIZE[meta] * (spec.by == MAP) for spec, meta in zip((k, v), variant.meta, strict=True)
    )
    k_more, v_more = (
        SIZE[meta] * (d if spec.by == CHANNEL else spec.across)
        for spec, meta in zip((k, v), variant.meta, strict=True)
    )
    k_apart, v_apart = variant.apart
    sets, k_spec, v_spec = 1 + v_apart, k.as_int, v.as_int
    size, plain = SIZE[exact], DequantSpec().as_int
    line = d * size
    at_once, rope_row = 16 // w, 8 * d  # tokens of one call of `scores`; bytes of rope tables
    s_row = 4 * (TILE + 16)
    layout = GATHERED.dtype
    counters = 8 + layout.itemsize  # finished tasks of each head

    def attend(job):  # type: ignore[no-untyped-def]
        a = read_arguments(job, layout)
        heads, rows, n, splits = a.heads, a.rows, a.tokens, a.splits
        n_first, n_slots, begin = a.first_tokens, a.slots_count, a.begin
        padded = -(-rows // w) * w
        tiles = -(-n // TILE)
        tasks = a.batch * heads * splits
        zero16 = splat(np.float32(0.0))
        room = padded * ((sets + 2) * d + 32 + s_row // 4) + BLOCK * d + 16 * w + 256 + 16
        scratch = np.empty(room, np.float32)
        acc = (scratch.ctypes.data + 63) // 64 * 64
        qs = acc + 4 * sets * padded * d  # queries times scale
        qps = qs + 4 * padded * d  # the same for packed keys, if those differ
        tops = qps + 4 * padded * d  # [padded] running maximum and sum, 16 floats apart
        start = tops + 4 * padded * 32
        s = start + 64 * w
        groups = s + padded * s_row  # S and Z of one token
        tile = groups + 4 * 256
        for i in range(w):
            store(start + 64 * i, zero16)
        while True:
            task = count(job)
            if task >= tasks:
                break
            head, part = task // splits, task % splits
            b, g = head // heads, head % heads
            h = g // a.share
            start_task(a, head, padded, sets, d, k_apart, acc, qs, qps, tops)
            slots = at(a.slots, b, g)
            first_keys, first_values = at(a.first_keys, b, h), at(a.first_values, b, h)
            keys = view_of_head(a.keys, b, h, k_first)
            values_ = view_of_head(a.values, b, h, v_first)
            k_packed, k_tail, k_tail_row = keys.packed, keys.tail, keys.tail_row
            v_packed, v_tail, v_tail_row = values_.packed, values_.tail, values_.tail_row
            positions = at(a.positions, b, h)
            last = min(n, (part + 1) * tiles // splits * TILE)
            for lo in range(part * tiles // splits * TILE, last, TILE):
                nt = min(TILE, n - lo)
                # --- scores, of tokens whose keys are in the same space
                j0 = 0
                while j0 < nt:
                    many, packed = 0, False
                    while many < BLOCK and j0 + many < nt:
                        x = lo + j0 + many
                        j = x + AHEAD - n_first
                        if j >= 0 and j < n_slots:
                            j = load_int(slots, j)
                            _prefetch(
                                keys, j, line, k_bits, k_per_block, k_height, d, k_span, k_more
                            )
                            _prefetch(
                                values_, j, line, v_bits, v_per_block, v_height, d, v_span, v_more
                            )
                        j = _token(x, n_first, n_slots, slots, begin)
                        its = k_bits > 0 and x >= n_first and j < k_packed
                        if k_apart and many > 0 and its != packed:
                            break
                        packed = its
                        to = tile + 4 * d * many
                        many += 1
                        if its:
                            near, far = a.near, a.far
                            if k_rope:
                                place = load_int(positions, 0) + j
                                if a.position_per_token:
                                    place = load_int(positions, j)
                                turns = max(-BEFORE, place // FAR)
                                near += max(0, place - turns * FAR) * rope_row
                                far += (turns + BEFORE) * rope_row
                            _unpack(
                                to, j, keys, near, far, groups,
                                k_bits, k_per_block, k_height, d, k_span, k_meta, k_spec,
                            )  # fmt: skip
                            continue
                        source = k_tail + (j - k_packed) * k_tail_row
                        if x < n_first:
                            source = first_keys + x * a.first_keys.row
                        for c in range(0, d, 16):
                            store(to + 4 * c, load_any(source + c * size, exact))
                    its_q = qps if k_apart and packed else qs
                    for m0 in range(0, padded, w):  # rows behind the last are cleared below
                        for i in range(0, many, at_once):
                            scores(
                                its_q + 4 * m0 * d, start, tile + 4 * d * i, 4 * d,
                                s + m0 * s_row + 4 * (j0 + i), s_row, 0, 0, 0, 0,
                                d, w, at_once, plain,
                            )  # fmt: skip
                    j0 += many
                weigh(a, b, g, lo, nt, 0, padded, s, s_row, tops, acc, 4 * padded * d, sets, d)
                # --- values, of tokens whose sums are in the same space
                j0 = 0
                while j0 < nt:
                    many, packed = 0, False
                    while many < BLOCK and j0 + many < nt:
                        x = lo + j0 + many
                        j = _token(x, n_first, n_slots, slots, begin)
                        its = v_bits > 0 and x >= n_first and j < v_packed
                        if v_apart and many > 0 and its != packed:
                            break
                        packed = its
                        to = tile + 4 * d * many
                        many += 1
                        if its:
                            _unpack(
                                to, j, values_, 0, 0, groups,
                                v_bits, v_per_block, v_height, d, v_span, v_meta, v_spec,
                            )  # fmt: skip
                            continue
                        source = v_tail + (j - v_packed) * v_tail_row
                        if x < n_first:
                            source = first_values + x * a.first_values.row
                        for c in range(0, d, 16):
                            store(to + 4 * c, load_any(source + c * size, exact))
                    to = acc + 4 * padded * d if v_apart and packed else acc
                    for m0 in range(0, padded, w):
                        values(
                            s + m0 * s_row + 4 * j0, s_row, tile, 4 * d, many, to + 4 * m0 * d,
                            0, 0, 0, d, w, plain,
                        )  # fmt: skip
                    j0 += many
            finish_task(a, job + counters, task, acc, tops, padded, sets, d)
        scratch[0] = 0.0  # keeps the array alive: Numba frees it after its last use

    return Kernel(attend, f"gathered {variant}")
