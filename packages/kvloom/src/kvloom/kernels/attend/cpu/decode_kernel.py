"""Decode attention over a packed prefix and an exact tail in one pass, compiled per format.

Decides the order of steps. A task is a (batch row, key/value head, range of tiles). It walks its
range tile by tile: scores of all query rows of the group, a running softmax, then values, both
straight from the codes. Keys and values each have a packed prefix and an exact tail, which need not
end together. Exact tokens of their own may stand before them, and after them tokens of which heads
have different numbers. The last task of a head merges the states of all. Steps are `kernel_step`
functions; `tiles` has those of a tile. Reference: `reference.attend_exact` of
the unpacked tokens; tolerance: 2e-6 absolute in fp32.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np

from ...cpu_runtime import (
    Kernel,
    count,
    head_address,
    kernel_step,
    load_int,
    read_arguments,
    store_int,
)
from ...simd import SIZE, store_one
from . import lookup
from .arguments import DECODE, PAGED, SPANS
from .lookup import scatter_table
from .softmax import finish_task, softmax_tile, start_task
from .tiles import (
    clear_begin,
    head_view,
    moved,
    score_exact,
    score_packed,
    sum_exact,
    sum_packed,
    with_packed,
)
from .variant import CHANNEL, TABLE, Variant


class Scratch(NamedTuple):
    """Addresses of a thread's own memory, fp32."""

    sums: int  # [sets, padded rows, d]
    queries: int  # [padded rows, d], times scale
    packed_queries: int  # the same for packed keys, if those differ
    maxima: int  # [padded rows], running maximum and sum, 16 numbers apart
    folded: int  # [w, d], queries times S
    far: int  # [w, d], queries rotated back by a multiple of `FAR`
    rotated: int  # [w, d], the same to the tokens at hand
    begin: int  # [w, 16], what sums of products begin with
    rest: int  # [w, 16], numbers of the tokens of a partial pack block
    logits: int  # [w, tile + 16], then weights
    scales: int  # S of a tile, and Z
    tables: int  # of 16 tokens, see `lookup`
    key_groups: int  # [d], see `lookup.scatter_table`
    value_groups: int  # [d]


@cache
def kernel(variant: Variant) -> Any:
    """Compile the kernel of a variant; see `attend.BoundCall` for the call."""
    d, w, own_queries = variant.d, variant.w, variant.keys.own_space
    sets = 1 + variant.values.own_space
    (per_row, fixed), split_scratch = _scratch(variant)
    attend_range = _range(variant)
    layout = (PAGED if variant.page else SPANS if variant.spans else DECODE).dtype
    finished = 8 + layout.itemsize  # counters of each head's finished tasks

    def attend(args):  # type: ignore[no-untyped-def]
        a = read_arguments(args, layout)
        padded = -(-a.rows // w) * w
        memory = np.empty(padded * per_row + fixed, np.float32)
        mem = split_scratch((memory.ctypes.data + 63) // 64 * 64, padded)
        clear_begin(mem.begin, w)
        while True:
            task = count(args)
            if task >= a.batch * a.heads * a.splits:
                break
            head, part = task // a.splits, task % a.splits
            start_task(
                a, head, part, padded, sets, d, own_queries, mem.sums, mem.queries,
                mem.packed_queries, mem.maxima,
            )  # fmt: skip
            attend_range(a, head, part, padded, mem)
            finish_task(a, args + finished, task, mem.sums, mem.maxima, padded, sets, d)
        memory[0] = 0.0  # keeps the array alive: Numba frees it after its last use

    return Kernel(attend, f"attend {variant}")


def _scratch(variant: Variant) -> tuple[tuple[int, int], Any]:
    """Return the numbers of a thread's memory, per query row and besides; and how it is divided."""
    d, w, z_offset, s_row = variant.d, variant.w, variant.z_offset, variant.logits_row
    sets, tables = 1 + variant.values.own_space, 16 * lookup.SIZE

    @kernel_step
    def split(sums, padded):  # type: ignore[no-untyped-def]
        """Divide the memory at `sums` for a number of query rows, whole multiples of w."""
        queries = sums + 4 * sets * padded * d
        packed_queries = queries + 4 * padded * d
        maxima = packed_queries + 4 * padded * d
        folded = maxima + 4 * padded * 32
        far = folded + 4 * w * d
        rotated = far + 4 * w * d
        begin = rotated + 4 * w * d
        rest = begin + 4 * w * 16
        logits = rest + 4 * w * 16
        scales = logits + w * s_row
        key_groups = scales + 2 * z_offset + tables
        return Scratch(
            sums, queries, packed_queries, maxima, folded, far, rotated, begin, rest, logits,
            scales, scales + 2 * z_offset, key_groups, key_groups + 4 * d,
        )  # fmt: skip

    fixed = w * (3 * d + 32) + (w * s_row + 2 * z_offset + tables) // 4 + 2 * d + 16
    return ((sets + 2) * d + 32, fixed), split


def _range(variant: Variant) -> Any:
    """Make the step that attends to a range of a head's tiles."""
    tile, page, rope, token_bytes = (
        variant.tile, variant.page, variant.keys.rope_dims, variant.d * SIZE[variant.exact_dtype]
    )  # fmt: skip
    lead, spans = variant.lead, variant.spans
    find_keys, find_values = _find(variant, 0), _find(variant, 1)
    span_of_keys, span_of_values = _span(variant, 0), _span(variant, 1)
    page_of_keys, page_of_values = _page(variant, 0), _page(variant, 1)
    attend_lead, attend_tile = _lead(variant), _tile(variant)

    @kernel_step
    def attend(a, head, part, padded, mem):  # type: ignore[no-untyped-def]
        """Attend to range number `part` of a head's tiles; padded: rows of queries."""
        b, h, n, place, first, span_tokens = head // a.heads, head % a.heads, a.tokens, 0, 0, 0
        if page:
            n, place = load_int(a.lengths, b), a.table + b * a.table_row
        if lead:
            first = a.lead_tokens
        if spans:
            span_tokens = load_int(a.spans, 2 * head + 1)
        keys = head_keys = find_keys(a, a.keys, b, h, mem.key_groups)
        values = head_values = find_values(a, a.values, b, h, mem.value_groups)
        position = load_int(head_address(a.positions, b, 0), 0) if rope else 0
        lead_tiles, tiles = -(-first // tile), -(-n // tile)
        dense_end = lead_tiles + tiles
        all_tiles = dense_end + -(-span_tokens // tile)
        begin, end = part * all_tiles // a.splits, (part + 1) * all_tiles // a.splits
        if page and a.new_keys.address and begin * tile < n <= end * tile:
            past = n - 1 - keys.packed_tokens
            keep_token(a.new_keys, keys.tail + past * keys.tail_row, b, h, token_bytes)
            keep_token(a.new_values, values.tail + past * values.tail_row, b, h, token_bytes)
        if lead:
            for i in range(begin, min(end, lead_tiles)):
                attend_lead(a, b, h, i * tile, min(tile, first - i * tile), padded, mem)
        for i in range(max(begin, lead_tiles), min(end, dense_end)):
            lo = (i - lead_tiles) * tile
            if page and lo < keys.packed_tokens:
                keys = page_of_keys(head_keys, a.keys, place, lo // page)
                values = page_of_values(head_values, a.values, place, lo // page)
            attend_tile(
                a, keys, values, b, h, lo, min(tile, n - lo), first + lo, n - lo, position, place,
                padded, mem,
            )  # fmt: skip
        if spans and end > dense_end:
            keys = span_of_keys(a.span_keys, a.spans, head, span_tokens, mem.key_groups)
            values = span_of_values(a.span_values, a.spans, head, span_tokens, mem.value_groups)
            for i in range(max(begin, dense_end), end):
                lo = (i - dense_end) * tile
                attend_tile(
                    a, keys, values, b, h, lo, min(tile, span_tokens - lo), first + n + lo,
                    2 * tile, 0, 0, padded, mem,
                )  # fmt: skip

    return attend


def _lead(variant: Variant) -> Any:
    """Make the step that attends to a tile of the exact tokens before the others."""
    d, w, s_row, sets = variant.d, variant.w, variant.logits_row, 1 + variant.values.own_space
    score_tail, sum_tail, tile = score_exact(variant), sum_exact(variant), variant.tile

    @kernel_step
    def attend(a, b, h, lo, n, padded, mem):  # type: ignore[no-untyped-def]
        """Attend to n of these tokens from number lo on."""
        keys = head_address(a.lead_keys, b, h) + lo * a.lead_keys.row
        values = head_address(a.lead_values, b, h) + lo * a.lead_values.row
        for m0 in range(0, padded, w):
            skip = 4 * m0 * d
            score_tail(mem.queries + skip, keys, a.lead_keys.row, 0, n, mem)
            softmax_tile(
                a, b, h, lo, n, 2 * tile, m0, w, mem.logits, s_row, mem.maxima, mem.sums,
                4 * padded * d, sets, d,
            )  # fmt: skip
            sum_tail(values, a.lead_values.row, 0, n, mem.sums + skip, mem)

    return attend


def _tile(variant: Variant) -> Any:
    """Make the step that attends to a tile of tokens."""
    d, w, page, s_row = variant.d, variant.w, variant.page, variant.logits_row
    own_queries, sets = variant.keys.own_space, 1 + variant.values.own_space
    k_bits, v_bits = variant.keys.bits_x2, variant.values.bits_x2
    score_keys, score_tail = score_packed(variant), score_exact(variant)
    sum_values, sum_tail = sum_packed(variant), sum_exact(variant)

    @kernel_step
    def attend(a, keys, values, b, h, lo, n, at_token, remaining, position, place, padded, mem):  # type: ignore[no-untyped-def]
        """Attend to n tokens from number lo on.

        at_token, remaining: as for `softmax_tile`. place: of the row's pages in the table.
        """
        keys_packed = min(max(keys.packed_tokens - lo, 0), n)
        values_packed = min(max(values.packed_tokens - lo, 0), n)
        sinks, first_page = 0, 0
        if page:
            sinks = min(max(min(a.sinks, keys.packed_tokens) - lo, 0), n)
            first_page = load_int(place, 0) if sinks > 0 else 0
        for m0 in range(0, padded, w):
            skip = 4 * m0 * d
            q, sums = mem.queries + skip, mem.sums + skip
            if k_bits:
                packed_q = mem.packed_queries + skip if own_queries else q
                score_keys(a, keys, packed_q, lo, keys_packed, position + lo, mem)
            tail = keys.tail + (lo - keys.packed_tokens) * keys.tail_row
            score_tail(q, tail, keys.tail_row, keys_packed, n, mem)
            if page:
                base = head_address(a.sink_keys, first_page, h) + lo * a.sink_keys.row
                score_tail(q, base, a.sink_keys.row, 0, sinks, mem)
            softmax_tile(
                a, b, h, at_token, n, remaining, m0, w, mem.logits, s_row, mem.maxima, mem.sums,
                4 * padded * d, sets, d,
            )  # fmt: skip
            if page:
                if sinks > 0:
                    base = head_address(a.sink_values, first_page, h) + lo * a.sink_values.row
                    sum_tail(base, a.sink_values.row, 0, sinks, sums, mem)
                for i in range(w):  # their packed values have no weight
                    for j in range(sinks):
                        store_one(mem.logits + i * s_row + 4 * j, np.float32(0.0))
            if v_bits:
                packed_sums = sums + 4 * (sets - 1) * padded * d
                sum_values(values, lo, values_packed, packed_sums, mem)
            tail = values.tail + (lo - values.packed_tokens) * values.tail_row
            sum_tail(tail, values.tail_row, values_packed, n, sums, mem)

    return attend


def _find(variant: Variant, side: int) -> Any:
    """Make the step that finds a head's keys (0) or values (1)."""
    constants, page, tabled = variant.sides[side], variant.page, _tabled(variant, side)
    group_size = constants.first_group_size

    @kernel_step
    def find(a, stored, b, h, groups):  # type: ignore[no-untyped-def]
        """Return the view of a head; stored: of keys or values, groups: memory for them."""
        if page:  # of block 0; pages are found tile by tile
            view = head_view(stored, 0, h, group_size)
            view = moved(view, 0, 0, 0, load_int(a.tails, b) * stored.tail.batch)
            view = with_packed(view, load_int(a.packed_tokens, b), view.table)
        else:
            view = head_view(stored, b, h, group_size)
        return tabled(view, groups)

    return find


def _span(variant: Variant, side: int) -> Any:
    """Make the step that finds a head's keys (0) or values (1) in a span."""
    constants, tabled = variant.sides[side], _tabled(variant, side)
    (per_block, height), per_row = constants.per_block, _tokens_per_row(variant, side)
    group_size = constants.first_group_size

    @kernel_step
    def find(stored, spans, head, n, groups):  # type: ignore[no-untyped-def]
        """Return the view of a head's n tokens, as if nothing lay before the first of them."""
        skipped = load_int(spans, 2 * head)
        view = head_view(stored, 0, 0, group_size)
        meta, rows = skipped // per_row * view.meta_row, skipped // per_block * height
        view = moved(view, rows * view.row, meta, meta, skipped * view.tail_row)
        return tabled(with_packed(view, min(view.packed_tokens, n), view.table), groups)

    return find


def _tokens_per_row(variant: Variant, side: int) -> int:
    """Return the tokens of a row of scales of keys (0) or values (1)."""
    constants = variant.sides[side]
    return variant.tokens_at_once(constants) if constants.by == CHANNEL else 1


def _tabled(variant: Variant, side: int) -> Any:
    """Make the step that gives a view its table of groups, if keys (0) or values (1) need one."""
    constants, d = variant.sides[side], variant.d
    by_table, literal = constants.by == TABLE, constants.literal

    @kernel_step
    def tabled(view, groups):  # type: ignore[no-untyped-def]
        """Return the view with its table at `groups`."""
        if by_table and view.packed_tokens > 0:
            scatter_table(view.table, groups, d, literal)
            view = with_packed(view, view.packed_tokens, groups)
        return view

    return tabled


def _page(variant: Variant, side: int) -> Any:
    """Make the step that finds a page of a head's keys (0) or values (1)."""
    constants, page = variant.sides[side], variant.page
    (per_block, height), per_row = constants.per_block, _tokens_per_row(variant, side)
    rows, meta_rows = page // per_block * height, page // per_row  # of a page

    @kernel_step
    def find(first, stored, place, page_index):  # type: ignore[no-untyped-def]
        """Return the view of a page as if the pages before it lay before it."""
        block, prefix = load_int(place, page_index), stored.prefix
        skipped = page_index * meta_rows * first.meta_row
        return moved(
            first,
            block * prefix.codes.batch - page_index * rows * first.row,
            block * prefix.scale.batch - skipped,
            block * prefix.zero.batch - skipped,
            0,
        )

    return find


@kernel_step
def keep_token(x, out, b, h, size):  # type: ignore[no-untyped-def]
    """Copy the `size` bytes of one token of a head, packed as `MATRIX`; a multiple of 8."""
    source = head_address(x, b, h)
    for i in range(0, size, 8):
        store_int(out + i, load_int(source + i, 0))
