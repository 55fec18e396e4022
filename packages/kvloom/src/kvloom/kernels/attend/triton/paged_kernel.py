"""Triton: decode attention of rows that each have their own packed pages, by a table of blocks.

A program of `_split_pages` owns a range of the pages of one row and key/value head, or its exact
tokens: those of the page that is not full, and the exact first tokens. It reads where the pages of
its row are, and how many, from the table on the device: the grid follows from the longest row.
`decode_kernel` has the tiles of a page and merges the splits. Reference:
`reference.attend_regions`; tolerance: see `tests/kernels/test_gpu_pages.py`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .decode_kernel import (
    PLACES,
    _tiles_of,
    _walk,
    exact,
    load_queries,
    side_of_head,
    side_of_row,
    store_split,
)


@triton.jit(do_not_specialize=["splits", "sinks", "width", "r", *PLACES])
def _split_pages(
    q_ptr, turn_ptr, k, v, k_sinks, v_sinks,
    blocks_ptr, packed_ptr, tokens_ptr, tails_ptr, acc_ptr, ml_ptr,
    scale, h, r, width, sinks, splits, all_splits, rotated_splits, first_rotated, first_plain,
    K: tl.constexpr, V: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr,
    BN0: tl.constexpr, BN1: tl.constexpr, PAGE: tl.constexpr, OPTIONS: tl.constexpr,
):  # fmt: skip
    """Attend to a split of a row by BM query heads of a group; grid: [(splits + 1) x heads x rows].

    h: key/value heads, r: query heads of each. Split number `splits` has the exact tokens. width:
    of the table's rows. sinks: exact first tokens of a row's first page, in place of its own.
    """
    parts = splits + 1
    pid = tl.program_id(0)
    i = pid % parts
    head = (pid // parts).to(tl.int64)
    tiles = tl.cdiv(r, BM)
    tile = head % tiles
    head = head // tiles
    b, hk = head // h, head % h
    o_m = tile.to(tl.int32) * BM + tl.arange(0, BM)
    o_d = tl.arange(0, DP)
    q, scale, rotated, rotated_scale = load_queries(
        q_ptr, turn_ptr, head, r, scale, o_m, o_d, K, D
    )  # fmt: skip
    packed = tl.load(packed_ptr + b).to(tl.int32)
    exact_tokens = tl.load(tokens_ptr + b).to(tl.int32) - packed
    blocks = blocks_ptr + b * width
    k, v = side_of_head(k, hk, o_d, K, D), side_of_head(v, hk, o_d, V, D)
    top = tl.full([BM], -float("inf"), tl.float32)
    total = tl.zeros([BM], tl.float32)
    acc = tl.zeros([DP, BM], tl.float32)
    lo, hi = _tiles_of(tl.where(i < splits, i, -1), splits, packed // PAGE)
    for page in range(lo, hi):
        place = tl.load(blocks + page).to(tl.int64)
        first = tl.where(page == 0, sinks, 0)
        top, total, acc = _walk(
            top, total, acc, rotated, first, PAGE, 0, tl.cdiv(PAGE - first // BN0 * BN0, BN0),
            PAGE, 1, rotated_scale, 1.0, side_of_row(k, place), 0, side_of_row(v, place), 0,
            q_ptr, q_ptr, q_ptr, o_m, o_d, o_m, K, V, True, True, D, DP, BN0, OPTIONS,
        )  # fmt: skip
    if i == splits:
        place = tl.load(tails_ptr + b).to(tl.int64)
        top, total, acc = exact(
            top, total, acc, q, exact_tokens, scale, 1.0, k.tail + place * k.tail_b, k.tail_n,
            v.tail + place * v.tail_b, v.tail_n, o_m, o_d, K, V, D, DP, BN1, OPTIONS,
        )  # fmt: skip
        if packed > 0:
            place = tl.load(blocks).to(tl.int64)
            top, total, acc = exact(
                top, total, acc, q, sinks, scale, 1.0,
                k_sinks.first + place * k_sinks.b + hk * k_sinks.h, k_sinks.n,
                v_sinks.first + place * v_sinks.b + hk * v_sinks.h, v_sinks.n,
                o_m, o_d, K, V, D, DP, BN1, OPTIONS,
            )  # fmt: skip
    store_split(
        acc_ptr, ml_ptr, top, total, acc, head, r, i, all_splits, rotated_splits, first_rotated,
        first_plain, o_m, o_d, D,
    )  # fmt: skip
