"""Decode attention to chosen tokens, read where they are stored, compiled per format.

Decides the order of steps. A step reads a list of tokens: those of a tensor of their own (sinks),
those at given slots of a view, and all of the view from a token on. A task is a (batch row, head
that chooses, range of the list). It walks in tiles of `TILE` tokens: `BLOCK` tokens at a time are
written side by side in fp32, unpacked if need be, to scratch memory that stays in the core's
nearest cache, and are multiplied there with all query rows of the head; a running softmax stands
between scores and values. Reference: `reference.attend_regions`; tolerance: 2e-6 absolute in fp32.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np

from ...cpu_runtime import Kernel, count, head_address, kernel_step, load_int, read_arguments
from ...simd import SIZE, load_any, prefetch, store
from .arguments import BEFORE, FAR, GATHERED
from .microkernel import scores, values
from .softmax import finish_task, softmax_tile, start_task
from .tiles import HeadView, clear_begin, head_view
from .unpack_token import out_of_block, unpack
from .variant import CHANNEL, SideConstants, Variant

TILE = 128  # tokens of a running softmax
BLOCK = 32  # tokens that are unpacked at once
AHEAD = 16  # tokens between a prefetch and the read
S_ROW = 4 * (TILE + 16)  # bytes of a row of logits


class Scratch(NamedTuple):
    """Addresses of a thread's own memory, fp32."""

    sums: int  # [sets, padded rows, d]
    queries: int  # [padded rows, d], times scale
    packed_queries: int  # the same for packed keys, if those differ
    maxima: int  # [padded rows], running maximum and sum, 16 numbers apart
    begin: int  # [w, 16], zeros
    logits: int  # [padded rows, TILE + 16], then weights
    scales: int  # S and Z of one token
    block: int  # [BLOCK, d], tokens


class Sources(NamedTuple):
    """Where the tokens that a head reads are."""

    keys: HeadView
    values: HeadView
    slots: int
    first_keys: int  # tokens before the chosen ones
    first_values: int
    positions: int


@cache
def kernel(variant: Variant) -> Any:
    """Compile the kernel of a variant; see `attend.BoundCall` for the call."""
    d, w, own_queries = variant.d, variant.w, variant.keys.own_space
    sets = 1 + variant.values.own_space
    k_first, v_first = (side.first_group_size for side in variant.sides)
    score_tile, sum_tile, layout = _score(variant), _sum(variant), GATHERED.dtype
    finished = 8 + layout.itemsize  # counters of each head's finished tasks

    def attend(args):  # type: ignore[no-untyped-def]
        a = read_arguments(args, layout)
        padded, tiles = -(-a.rows // w) * w, -(-a.tokens // TILE)
        room = padded * ((sets + 2) * d + 32 + S_ROW // 4) + BLOCK * d + 16 * w + 256 + 16
        memory = np.empty(room, np.float32)
        sums = (memory.ctypes.data + 63) // 64 * 64
        queries = sums + 4 * sets * padded * d
        packed_queries = queries + 4 * padded * d
        maxima = packed_queries + 4 * padded * d
        begin = maxima + 4 * padded * 32
        logits = begin + 64 * w
        scales = logits + padded * S_ROW
        mem = Scratch(
            sums, queries, packed_queries, maxima, begin, logits, scales, scales + 4 * 256
        )  # fmt: skip
        clear_begin(mem.begin, w)
        while True:
            task = count(args)
            if task >= a.batch * a.heads * a.splits:
                break
            head, part = task // a.splits, task % a.splits
            b, g = head // a.heads, head % a.heads
            h = g // a.share
            start_task(
                a, head, part, padded, sets, d, own_queries, mem.sums, mem.queries,
                mem.packed_queries, mem.maxima,
            )  # fmt: skip
            views = Sources(
                head_view(a.keys, b, h, k_first), head_view(a.values, b, h, v_first),
                head_address(a.slots, b, g), head_address(a.lead_keys, b, h),
                head_address(a.lead_values, b, h), head_address(a.positions, b, h),
            )  # fmt: skip
            last = min(a.tokens, (part + 1) * tiles // a.splits * TILE)
            for lo in range(part * tiles // a.splits * TILE, last, TILE):
                n = min(TILE, a.tokens - lo)
                score_tile(a, views, lo, n, padded, mem)
                softmax_tile(
                    a, b, g, lo, n, a.tokens - lo, 0, padded, mem.logits, S_ROW, mem.maxima,
                    mem.sums, 4 * padded * d, sets, d,
                )  # fmt: skip
                sum_tile(a, views, lo, n, padded, mem)
            finish_task(a, args + finished, task, mem.sums, mem.maxima, padded, sets, d)
        memory[0] = 0.0  # keeps the array alive: Numba frees it after its last use

    return Kernel(attend, f"gathered {variant}")


def _score(variant: Variant) -> Any:
    """Make the step that scores a tile, block by block, of keys in the same space."""
    d, w, own_queries = variant.d, variant.w, variant.keys.own_space
    literal = SideConstants().literal  # of fp32
    at_once, unpack_keys = 16 // w, _unpack(variant, 0)  # tokens of one call of `scores`

    @kernel_step
    def score(a, sources, lo, n, padded, mem):  # type: ignore[no-untyped-def]
        """Write the logits of n tokens of the list, from number lo on."""
        j = 0
        while j < n:
            many, packed = unpack_keys(a, sources, lo + j, n - j, mem)
            q = mem.packed_queries if own_queries and packed else mem.queries
            for m0 in range(0, padded, w):  # rows after the last are cleared later
                for i in range(0, many, at_once):
                    scores(
                        q + 4 * m0 * d, mem.begin, mem.block + 4 * d * i, 4 * d,
                        mem.logits + m0 * S_ROW + 4 * (j + i), S_ROW, 0, 0, 0, 0,
                        d, w, at_once, literal,
                    )  # fmt: skip
            j += many

    return score


def _sum(variant: Variant) -> Any:
    """Make the step that adds the values of a tile, block by block, to sums in the same space."""
    d, w, own_sums = variant.d, variant.w, variant.values.own_space
    literal = SideConstants().literal  # of fp32
    unpack_values = _unpack(variant, 1)

    @kernel_step
    def add(a, sources, lo, n, padded, mem):  # type: ignore[no-untyped-def]
        """Add n tokens of the list, from number lo on, times their weights."""
        j = 0
        while j < n:
            many, packed = unpack_values(a, sources, lo + j, n - j, mem)
            out = mem.sums + 4 * padded * d if own_sums and packed else mem.sums
            for m0 in range(0, padded, w):
                values(
                    mem.logits + m0 * S_ROW + 4 * j, S_ROW, mem.block, 4 * d, many,
                    out + 4 * m0 * d, 0, 0, 0, d, w, literal,
                )  # fmt: skip
            j += many

    return add


def _unpack(variant: Variant, side: int) -> Any:
    """Make the step that writes keys (0) or values (1) of the list side by side, in fp32."""
    constants, d, exact = variant.sides[side], variant.d, variant.exact_dtype
    own_space, meta, per_row = constants.own_space, constants.meta, constants.tokens_per_scale or 1
    (per_block, height), bits = constants.per_block, constants.bits_x2
    literal, rope, rope_row, size = constants.literal, constants.rope_dims, 8 * d, SIZE[exact]
    is_key, fetch_ahead = side == 0, _prefetch(variant)

    @kernel_step
    def write(a, sources, lo, n, mem):  # type: ignore[no-untyped-def]
        """Write up to `BLOCK` of n tokens from number lo on; return how many, and if packed.

        They end before a token that needs other queries or sums.
        """
        view, first = sources.values, sources.first_values
        if is_key:
            view, first = sources.keys, sources.first_keys
        many, packed = 0, False
        while many < min(BLOCK, n):
            x = lo + many
            if is_key:
                fetch_ahead(a, sources, x)
            j = _token(x, a.lead_tokens, a.slots_count, sources.slots, a.begin)
            is_packed = bits > 0 and x >= a.lead_tokens and j < view.packed_tokens
            if own_space and many > 0 and is_packed != packed:
                break
            packed, out = is_packed, mem.block + 4 * d * many
            many += 1
            if packed:
                near, far = a.near, a.far
                if rope:
                    place = load_int(sources.positions, 0) + j
                    if a.position_per_token:
                        place = load_int(sources.positions, j)
                    turns = max(-BEFORE, place // FAR)
                    near += max(0, place - turns * FAR) * rope_row
                    far += (turns + BEFORE) * rope_row
                t, row = j % per_block, j // per_row * view.meta_row
                unpack(
                    out, view.codes + j // per_block * height * view.row, view.row, t,
                    out_of_block(t, bits), view.scale + row, view.zero + row, view.table,
                    mem.scales, near, far, d, literal, meta,
                )  # fmt: skip
                continue
            source = view.tail + (j - view.packed_tokens) * view.tail_row
            if x < a.lead_tokens:
                source = first + x * (a.lead_keys.row if is_key else a.lead_values.row)
            for c in range(0, d, 16):
                store(out + 4 * c, load_any(source + c * size, exact))
        return many, packed

    return write


def _prefetch(variant: Variant) -> Any:
    """Make the step that prefetches a chosen token some tokens before it is read."""
    fetch_keys, fetch_values = _prefetch_side(variant, 0), _prefetch_side(variant, 1)

    @kernel_step
    def fetch(a, sources, x):  # type: ignore[no-untyped-def]
        j = x + AHEAD - a.lead_tokens
        if j >= 0 and j < a.slots_count:
            j = load_int(sources.slots, j)
            fetch_keys(sources.keys, j)
            fetch_values(sources.values, j)

    return fetch


def _prefetch_side(variant: Variant, side: int) -> Any:
    """Make the step that prefetches a token's key (0) or value (1)."""
    constants, d = variant.sides[side], variant.d
    (per_block, height), bits = constants.per_block, constants.bits_x2
    per_row, line = constants.tokens_per_scale or 1, d * SIZE[variant.exact_dtype]
    scales = constants.meta_size * (d if constants.by == CHANNEL else constants.across)

    @kernel_step
    def fetch(view, j):  # type: ignore[no-untyped-def]
        if bits == 0 or j >= view.packed_tokens:
            for v in range(0, line, 64):
                prefetch(view.tail + (j - view.packed_tokens) * view.tail_row + v)
        else:
            for v in range(0, height * d, 64):
                prefetch(view.codes + j // per_block * height * view.row + v)
            for v in range(0, scales, 64):
                prefetch(view.scale + j // per_row * view.meta_row + v)
                prefetch(view.zero + j // per_row * view.meta_row + v)

    return fetch


@kernel_step
def _token(x, n_first, n_slots, slots, begin):  # type: ignore[no-untyped-def]
    """Return the view's token that is number x of the list; below 0 for one of the first."""
    j = x - n_first
    if j >= n_slots:
        j = j - n_slots + begin
    elif j >= 0:
        j = load_int(slots, j)
    return j
