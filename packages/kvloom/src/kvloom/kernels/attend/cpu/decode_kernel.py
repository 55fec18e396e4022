"""Decode attention over a packed prefix and an exact tail in one pass, compiled per format.

Decides the order of steps. A task is a (batch row, key/value head, range of tiles). It walks its
range tile by tile: scores of all query rows of the group, a running softmax, then values, both
straight from the codes. Keys and values each have a packed prefix and an exact tail, which need not
end together. Exact tokens of their own may stand before them, and behind them tokens of which heads
have different numbers. The last task of a head merges the states of all. Steps are `kernel_step`
functions; `score_tile` and `sum_tile` have those of a tile. Reference: `reference.attend` of the
unpacked tokens; tolerance: 2e-6 absolute in fp32.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np

from ...cpu_runtime import Kernel, at, count, kernel_step, load_int, store_int
from ...cpu_runtime import arguments as read_arguments
from ...simd import SIZE, store_one
from . import lookup
from .arguments import DECODE, PAGED, SPANS
from .dequant import TABLE
from .head_view import head_view, moved, with_packed
from .lookup import scatter_table
from .score_tile import clear_begin, score_exact, score_packed
from .softmax import finish_task, start_task, weigh
from .sum_tile import sum_exact, sum_packed
from .variant import Variant


class Scratch(NamedTuple):
    """Addresses of a thread's own memory, fp32."""

    sums: int  # [sets, padded rows, d]
    queries: int  # [padded rows, d], times scale
    packed_queries: int  # the same for packed keys, if those differ
    tops: int  # [padded rows], running maximum and sum, 16 numbers apart
    folded: int  # [w, d + boost], queries times S; sums of a balanced tile
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
    """Compile the kernel of a variant; see `attend.Attend` for the call."""
    d, w, apart, sets = variant.d, variant.w, variant.apart[0], 1 + variant.apart[1]
    (per_row, fixed), split_scratch = _scratch(variant)
    attend_range = _range(variant)
    layout = (PAGED if variant.page else SPANS if variant.spans else DECODE).dtype
    finished = 8 + layout.itemsize  # counters of each head's finished tasks

    def attend(job):  # type: ignore[no-untyped-def]
        a = read_arguments(job, layout)
        padded = -(-a.rows // w) * w
        memory = np.empty(padded * per_row + fixed, np.float32)
        mem = split_scratch((memory.ctypes.data + 63) // 64 * 64, padded)
        clear_begin(mem.begin, w)
        while True:
            task = count(job)
            if task >= a.batch * a.heads * a.splits:
                break
            head, part = task // a.splits, task % a.splits
            start_task(
                a, head, padded, sets, d, apart, mem.sums, mem.queries, mem.packed_queries, mem.tops
            )  # fmt: skip
            attend_range(a, head, part, padded, mem)
            finish_task(a, job + finished, task, mem.sums, mem.tops, padded, sets, d)
        memory[0] = 0.0  # keeps the array alive: Numba frees it after its last use

    return Kernel(attend, f"attend {variant}")


def _scratch(variant: Variant) -> tuple[tuple[int, int], Any]:
    """Return the numbers of a thread's memory, per query row and besides; and how it is divided."""
    d, w, boost, gap = variant.d, variant.w, variant.boost, variant.scales_gap
    sets, s_row, tables = 1 + variant.apart[1], variant.logits_row, 16 * lookup.SIZE

    @kernel_step
    def split(sums, padded):  # type: ignore[no-untyped-def]
        """Divide the memory at `sums` for a number of query rows, whole multiples of w."""
        queries = sums + 4 * sets * padded * d
        packed_queries = queries + 4 * padded * d
        tops = packed_queries + 4 * padded * d
        folded = tops + 4 * padded * 32
        far = folded + 4 * w * (d + boost)
        rotated = far + 4 * w * d
        begin = rotated + 4 * w * d
        rest = begin + 4 * w * 16
        logits = rest + 4 * w * 16
        scales = logits + w * s_row
        key_groups = scales + 2 * gap + tables
        return Scratch(
            sums, queries, packed_queries, tops, folded, far, rotated, begin, rest, logits, scales,
            scales + 2 * gap, key_groups, key_groups + 4 * d,
        )  # fmt: skip

    fixed = w * (3 * d + boost + 32) + (w * s_row + 2 * gap + tables) // 4 + 2 * d + 16
    return ((sets + 2) * d + 32, fixed), split


def _range(variant: Variant) -> Any:
    """Make the step that attends to a range of a head's tiles."""
    tile, page, rope, token_bytes = (
        variant.tile, variant.page, variant.keys.rope_dims, variant.d * SIZE[variant.exact]
    )  # fmt: skip
    lead, spans = variant.lead, variant.spans
    find_keys, find_values = _find(variant, 0), _find(variant, 1)
    span_of_keys, span_of_values = _span(variant, 0), _span(variant, 1)
    page_of_keys, page_of_values = _page(variant, 0), _page(variant, 1)
    attend_first, attend_tile = _first(variant), _tile(variant)

    @kernel_step
    def attend(a, head, part, padded, mem):  # type: ignore[no-untyped-def]
        """Attend to range number `part` of a head's tiles; padded: rows of queries."""
        b, h, n, place, first, more = head // a.heads, head % a.heads, a.tokens, 0, 0, 0
        if page:
            n, place = load_int(a.lengths, b), a.table + b * a.table_row
        if lead:
            first = a.first_tokens
        if spans:
            more = load_int(a.spans, 2 * head + 1)
        keys = first_keys = find_keys(a, a.keys, b, h, mem.key_groups)
        values = first_values = find_values(a, a.values, b, h, mem.value_groups)
        position = load_int(at(a.positions, b, 0), 0) if rope else 0
        before, tiles = -(-first // tile), -(-n // tile)
        behind = before + tiles
        every = behind + -(-more // tile)
        begin, end = part * every // a.splits, (part + 1) * every // a.splits
        if page and a.new_keys.address and begin * tile < n <= end * tile:
            past = n - 1 - keys.packed
            keep_token(a.new_keys, keys.tail + past * keys.tail_row, b, h, token_bytes)
            keep_token(a.new_values, values.tail + past * values.tail_row, b, h, token_bytes)
        if lead:
            for i in range(begin, min(end, before)):
                attend_first(a, b, h, i * tile, min(tile, first - i * tile), padded, mem)
        for i in range(max(begin, before), min(end, behind)):
            lo = (i - before) * tile
            if page and lo < keys.packed:
                keys = page_of_keys(first_keys, a.keys, place, lo // page)
                values = page_of_values(first_values, a.values, place, lo // page)
            attend_tile(
                a, keys, values, b, h, lo, min(tile, n - lo), first + lo, n - lo, position, place,
                padded, mem,
            )  # fmt: skip
        if spans and end > behind:
            keys = span_of_keys(a.span_keys, a.spans, head, more, mem.key_groups)
            values = span_of_values(a.span_values, a.spans, head, more, mem.value_groups)
            for i in range(max(begin, behind), end):
                lo = (i - behind) * tile
                attend_tile(
                    a, keys, values, b, h, lo, min(tile, more - lo), first + n + lo, 2 * tile,
                    0, 0, padded, mem,
                )  # fmt: skip

    return attend


def _first(variant: Variant) -> Any:
    """Make the step that attends to a tile of the exact tokens before the others."""
    d, w, s_row, sets = variant.d, variant.w, variant.logits_row, 1 + variant.apart[1]
    score_tail, sum_tail, tile = score_exact(variant), sum_exact(variant), variant.tile

    @kernel_step
    def attend(a, b, h, lo, n, padded, mem):  # type: ignore[no-untyped-def]
        """Attend to n of these tokens from number lo on."""
        keys = at(a.first_keys, b, h) + lo * a.first_keys.row
        values = at(a.first_values, b, h) + lo * a.first_values.row
        for m0 in range(0, padded, w):
            skip = 4 * m0 * d
            score_tail(mem.queries + skip, keys, a.first_keys.row, 0, n, mem)
            weigh(
                a, b, h, lo, n, 2 * tile, m0, w, mem.logits, s_row, mem.tops, mem.sums,
                4 * padded * d, sets, d,
            )  # fmt: skip
            sum_tail(values, a.first_values.row, 0, n, mem.sums + skip, mem)

    return attend


def _tile(variant: Variant) -> Any:
    """Make the step that attends to a tile of tokens."""
    d, w, page, s_row = variant.d, variant.w, variant.page, variant.logits_row
    apart, sets = variant.apart[0], 1 + variant.apart[1]
    k_bits, v_bits = variant.keys.twice_bits, variant.values.twice_bits
    score_keys, score_tail = score_packed(variant), score_exact(variant)
    sum_values, sum_tail = sum_packed(variant), sum_exact(variant)

    @kernel_step
    def attend(a, keys, values, b, h, lo, n, at_token, ahead, position, place, padded, mem):  # type: ignore[no-untyped-def]
        """Attend to n tokens from number lo on.

        at_token, ahead: as for `weigh`. place: of the row's pages in the table.
        """
        keys_packed = min(max(keys.packed - lo, 0), n)
        values_packed = min(max(values.packed - lo, 0), n)
        sinks, first_page = 0, 0
        if page:
            sinks = min(max(min(a.sinks, keys.packed) - lo, 0), n)
            first_page = load_int(place, 0) if sinks > 0 else 0
        for m0 in range(0, padded, w):
            skip = 4 * m0 * d
            q, sums = mem.queries + skip, mem.sums + skip
            if k_bits:
                packed_q = mem.packed_queries + skip if apart else q
                score_keys(a, keys, packed_q, lo, keys_packed, position + lo, mem)
            tail = keys.tail + (lo - keys.packed) * keys.tail_row
            score_tail(q, tail, keys.tail_row, keys_packed, n, mem)
            if page:
                base = at(a.sink_keys, first_page, h) + lo * a.sink_keys.row
                score_tail(q, base, a.sink_keys.row, 0, sinks, mem)
            weigh(
                a, b, h, at_token, n, ahead, m0, w, mem.logits, s_row, mem.tops, mem.sums,
                4 * padded * d, sets, d,
            )  # fmt: skip
            if page:
                if sinks > 0:
                    base = at(a.sink_values, first_page, h) + lo * a.sink_values.row
                    sum_tail(base, a.sink_values.row, 0, sinks, sums, mem)
                for i in range(w):  # their packed values have no weight
                    for j in range(sinks):
                        store_one(mem.logits + i * s_row + 4 * j, np.float32(0.0))
            if v_bits:
                to = sums + 4 * (sets - 1) * padded * d
                sum_values(values, lo, values_packed, to, mem)
            tail = values.tail + (lo + values_packed - values.packed) * values.tail_row
            sum_tail(tail, values.tail_row, values_packed, n, sums, mem)

    return attend


def _find(variant: Variant, side: int) -> Any:
    """Make the step that finds a head's keys (0) or values (1)."""
    form, d, page = variant.form(side), variant.d, variant.page
    in_groups, by_table, spec = form.in_groups, form.spec.by == TABLE, form.spec.as_int

    @kernel_step
    def find(a, its, b, h, groups):  # type: ignore[no-untyped-def]
        """Return the view of a head; its: of keys or values, groups: memory for them."""
        if page:  # of block 0; pages are found tile by tile
            view = head_view(its, 0, h, in_groups)
            view = moved(view, 0, 0, 0, load_int(a.tails, b) * its.tail.batch)
            view = with_packed(view, load_int(a.packed, b), view.table)
        else:
            view = head_view(its, b, h, in_groups)
        if by_table and view.packed > 0:
            scatter_table(view.table, groups, d, spec)
            view = with_packed(view, view.packed, groups)
        return view

    return find


def _span(variant: Variant, side: int) -> Any:
    """Make the step that finds a head's keys (0) or values (1) in a span."""
    form, d = variant.form(side), variant.d
    (per_block, height), per_row = form.spec.per_block, form.per_row
    in_groups, by_table, spec = form.in_groups, form.spec.by == TABLE, form.spec.as_int

    @kernel_step
    def find(its, spans, head, n, groups):  # type: ignore[no-untyped-def]
        """Return the view of a head's n tokens, as if nothing lay before the first of them."""
        ahead = load_int(spans, 2 * head)
        view = head_view(its, 0, 0, in_groups)
        meta, rows = ahead // per_row * view.meta_row, ahead // per_block * height
        view = moved(view, rows * view.row, meta, meta, ahead * view.tail_row)
        view = with_packed(view, min(view.packed, n), view.table)
        if by_table and view.packed > 0:
            scatter_table(view.table, groups, d, spec)
            view = with_packed(view, view.packed, groups)
        return view

    return find


def _page(variant: Variant, side: int) -> Any:
    """Make the step that finds a page of a head's keys (0) or values (1)."""
    form, page = variant.form(side), variant.page
    (per_block, height), per_row = form.spec.per_block, form.per_row
    rows, meta_rows = page // per_block * height, page // per_row  # of a page

    @kernel_step
    def find(first, its, place, number):  # type: ignore[no-untyped-def]
        """Return the view of a page as if the pages before it lay before it."""
        block, prefix = load_int(place, number), its.prefix
        ahead = number * meta_rows * first.meta_row
        return moved(
            first,
            block * prefix.codes.batch - number * rows * first.row,
            block * prefix.scale.batch - ahead,
            block * prefix.zero.batch - ahead,
            0,
        )

    return find


@kernel_step
def keep_token(x, to, b, h, size):  # type: ignore[no-untyped-def]
    """Copy the `size` bytes of one token of a head, packed as `MATRIX`; a multiple of 8."""
    here = at(x, b, h)
    for i in range(0, size, 8):
        store_int(to + i, load_int(here + i, 0))
