"""Quantizing and packing in one pass, and back: one kernel each for all formats.

Decides what happens in what order; the arithmetic is `ref`'s, to the last bit. Work is split into
(batch row, head, tile of tokens); where groups reach over all heads, a row of numbers is a token of
all heads. A tile begins and ends where bytes and groups do, so no two tasks write to one byte. Its
numbers are widened to fp32 (fp32 itself is read in place), their ranges become scales and zeros as
stored, these make codes, a byte each, and codes are joined: all within the caches of a core; only
what is packed goes to memory.
"""

from __future__ import annotations

from functools import cache

import numpy as np

from ... import cpu_runtime as team
from ... import simd as lanes
from ...cpu_runtime import Kernel, count, sources, whole
from ...simd import div, load, store
from .. import reference as ref
from . import codes as numbers
from . import rotation as butterfly
from . import tiles
from .codes import clear
from .rotation import keep_scales, restore_row, rotate_row, round_row, units
from .tiles import (
    CHANNEL,
    ROTATED,
    STATIC,
    TOKEN,
    decode_row,
    encode_row,
    fill,
    join_atom,
    metadata,
    narrow,
    range_of_channels,
    range_of_slots,
    range_of_tokens,
    size_of,
    split_atom,
    turn,
    widen,
)


@cache
def kernels() -> tuple[Kernel, Kernel]:
    """Compile what packs and what unpacks; see `cpu` for how they are called."""
    emitters = sources(butterfly, lanes, numbers, ref, team, tiles)

    def pack(job):  # type: ignore[no-untyped-def]
        if emitters == 0:  # never: code on the disk belongs to the sources that emitted it
            return
        batch, heads, across, d = whole(job, 1), whole(job, 2), whole(job, 3), whole(job, 4)
        at, n, tile = whole(job, 5), whole(job, 6), whole(job, 7)
        how, group, groups = whole(job, 8), whole(job, 9), whole(job, 10)
        bits, top, atom, height = whole(job, 11), whole(job, 12), whole(job, 13), whole(job, 14)
        meta, kind = whole(job, 15), whole(job, 16)
        group_of, slots, ends = whole(job, 17), whole(job, 18), whole(job, 19)
        clip, divisor = whole(job, 20), whole(job, 21)
        x, x_row, x_step = whole(job, 24), whole(job, 27), whole(job, 28)
        codes_row, cos, sin = whole(job, 32), whole(job, 42), whole(job, 43)
        half, interleaved = whole(job, 46), whole(job, 47) != 0
        size, signs, mix = whole(job, 48), whole(job, 49), whole(job, 50)
        dp = -(-d // 16) * 16
        cols = across * dp
        rows = min(tile, n)
        first, last = at // tile, -(-(at + n) // tile)
        tasks = batch * (heads // across) * (last - first)
        stretches = 1 if how == STATIC else rows // group if how == CHANNEL else rows
        metas = (stretches * groups + 31) // 16 * 16
        scratch = np.empty((rows + 1) * cols + 2 * metas + (rows + 16) * cols // 4 + 16, np.float32)
        wide = (scratch.ctypes.data + 63) // 64 * 64
        low = wide + 4 * rows * cols
        high = low + 4 * metas
        spare = high + 4 * metas
        bytes_ = spare + 4 * cols
        in_place = kind == 0 and x_step == 4 and d == dp and across == 1 and divisor + cos == 0
        in_place = in_place and how != ROTATED
        while True:
            task = count(job)
            if task >= tasks:
                break
            part, head = task % (last - first), task // (last - first)
            b, h = head // (heads // across), head % (heads // across) * across
            lo, hi = max(at, (first + part) * tile), min(at + n, (first + part + 1) * tile)
            m = hi - lo
            codes = whole(job, 29) + b * whole(job, 30) + h * whole(job, 31)
            scale = whole(job, 33) + b * whole(job, 34) + h * whole(job, 35)
            zero = whole(job, 36) + b * whole(job, 37) + h * whole(job, 38)
            # --- numbers
            xs, row = x + b * whole(job, 25) + h * whole(job, 26) + (lo - at) * x_row, x_row
            if not in_place:
                for t in range(m):
                    for i in range(across):
                        to = wide + 4 * (t * cols + i * dp)
                        widen(xs + t * x_row + i * whole(job, 26), x_step, kind, d, to)
                        if cos != 0:
                            at_row = b * whole(job, 44) + (h + i) * whole(job, 45)
                            at_row += (lo - at + t) * 4 * half
                            turn(to, cos + at_row, sin + at_row, half, interleaved)
                        fill(to, d)
                        if divisor != 0:
                            for c in range(0, dp, 16):
                                by = load(divisor + 4 * ((h + i) * dp + c))
                                store(to + 4 * c, div(load(to + 4 * c), by))
                xs, row = wide, 4 * cols
            # --- scales and zeros
            zeros, scales = low, high
            if how == CHANNEL:
                real = whole(job, 39)
                if real != 0:
                    real += b * whole(job, 40) + h * whole(job, 41) + lo - at
                for t in range(0, m, group):
                    place = 4 * (t // group * dp)
                    here = 0 if real == 0 else real + t
                    range_of_tokens(xs + t * row, row, group, dp, here, low + place, high + place)
                    out = (lo + t) // group * d * size_of(meta)
                    metadata(low + place, high + place, d, top, meta, scale + out, zero + out)
            elif how == STATIC:
                scales, zeros = whole(job, 22), whole(job, 23)
            elif how == ROTATED:  # norms first: scales follow from the codes
                for t in range(m):
                    to = high + 4 * t * groups
                    rotate_row(xs + t * row, d, group, size, signs, mix, spare, to)
                units(high, m * groups, group, low)
            else:
                for t in range(m):
                    place = 4 * t * groups
                    if how == TOKEN:
                        range_of_channels(xs + t * row, d, group, low + place, high + place)
                    else:
                        range_of_slots(
                            xs + t * row, slots, ends, groups, clip, low + place, high + place
                        )
                out = lo * groups * size_of(meta)
                metadata(low, high, m * groups, top, meta, scale + out, zero + out)
            # --- codes, behind those that an atom holds already
            begun = lo % atom
            codes += lo // atom * height * codes_row
            if begun:
                for i in range(across):
                    here = codes + i * whole(job, 31)
                    split_atom(here, codes_row, d, bits, bytes_ + i * dp, cols)
            for t in range(m):
                place = 0
                if how == CHANNEL:
                    place = 4 * (t // group * dp)
                elif how != STATIC:
                    place = 4 * t * groups
                to = bytes_ + (begun + t) * cols
                if how == ROTATED:
                    levels, ends_of = whole(job, 51), whole(job, 52)
                    round_row(xs + t * row, d, group, levels, ends_of, bits, low + place, to)
                else:
                    encode_row(
                        xs + t * row, cols, how, group, group_of, zeros + place, scales + place,
                        top, to,
                    )  # fmt: skip
            if how == ROTATED:
                keep_scales(high, low, m * groups, meta, scale + lo * groups * size_of(meta))
            atoms = -(-(begun + m) // atom)
            for i in range((begun + m) * cols, atoms * atom * cols, 16):
                clear(bytes_ + i)
            for a in range(atoms):
                for i in range(across):
                    to = codes + i * whole(job, 31) + a * height * codes_row
                    join_atom(bytes_ + a * atom * cols + i * dp, cols, d, bits, to, codes_row)
        scratch[0] = 0.0  # Numba frees an array once its last use is behind

    def unpack(job):  # type: ignore[no-untyped-def]
        if emitters == 0:
            return
        batch, heads, across, d = whole(job, 1), whole(job, 2), whole(job, 3), whole(job, 4)
        at, n, tile = whole(job, 5), whole(job, 6), whole(job, 7)
        how, group, groups = whole(job, 8), whole(job, 9), whole(job, 10)
        bits, atom, height = whole(job, 11), whole(job, 13), whole(job, 14)
        meta, kind = whole(job, 15), whole(job, 16)
        group_of, divisor = whole(job, 17), whole(job, 21)
        out, out_row = whole(job, 24), whole(job, 27)
        codes_row, cos, sin = whole(job, 32), whole(job, 42), whole(job, 43)
        half, interleaved = whole(job, 46), whole(job, 47) != 0
        size, signs, mix = whole(job, 48), whole(job, 49), whole(job, 50)
        dp = -(-d // 16) * 16
        cols = across * dp
        first, last = at // tile, -(-(at + n) // tile)
        tasks = batch * (heads // across) * (last - first)
        stretches = 1 if how == STATIC else tile // group + 1 if how == CHANNEL else tile
        metas = (stretches * groups + 31) // 16 * 16
        scratch = np.empty(2 * cols + 2 * metas + (tile + 16) * cols // 4 + 16, np.float32)
        wide = (scratch.ctypes.data + 63) // 64 * 64
        low = wide + 4 * cols
        high = low + 4 * metas
        spare = high + 4 * metas
        bytes_ = spare + 4 * cols
        while True:
            task = count(job)
            if task >= tasks:
                break
            part, head = task % (last - first), task // (last - first)
            b, h = head // (heads // across), head % (heads // across) * across
            lo, hi = max(at, (first + part) * tile), min(at + n, (first + part + 1) * tile)
            codes = whole(job, 29) + b * whole(job, 30) + h * whole(job, 31)
            scale = whole(job, 33) + b * whole(job, 34) + h * whole(job, 35)
            zero = whole(job, 36) + b * whole(job, 37) + h * whole(job, 38)
            # --- scales and zeros
            zeros, scales = low, high
            begin = lo
            if how == CHANNEL:
                begin = lo // group * group
                for t in range(begin, hi, group):
                    place, held_at = 4 * ((t - begin) // group * dp), t // group * d * size_of(meta)
                    widen(zero + held_at, size_of(meta), meta, d, low + place)
                    widen(scale + held_at, size_of(meta), meta, d, high + place)
            elif how == STATIC:
                scales, zeros = whole(job, 22), whole(job, 23)
            else:
                held_at = lo * groups * size_of(meta)
                if how != ROTATED:
                    widen(zero + held_at, size_of(meta), meta, (hi - lo) * groups, low)
                widen(scale + held_at, size_of(meta), meta, (hi - lo) * groups, high)
            # --- codes
            begun = lo % atom
            codes += lo // atom * height * codes_row
            for a in range(-(-(begun + hi - lo) // atom)):
                for i in range(across):
                    rows = codes + i * whole(job, 31) + a * height * codes_row
                    split_atom(rows, codes_row, d, bits, bytes_ + a * atom * cols + i * dp, cols)
            # --- numbers
            for t in range(hi - lo):
                place = 0
                if how == CHANNEL:
                    place = 4 * ((lo + t - begin) // group * dp)
                elif how != STATIC:
                    place = 4 * t * groups
                if how == ROTATED:
                    restore_row(
                        bytes_ + (begun + t) * cols, d, group, size, signs, mix, whole(job, 51),
                        bits, spare, scales + place, wide,
                    )  # fmt: skip
                else:
                    decode_row(
                        bytes_ + (begun + t) * cols, cols, how, group, group_of, zeros + place,
                        scales + place, divisor, wide,
                    )  # fmt: skip
                for i in range(across):
                    if cos != 0:
                        at_row = b * whole(job, 44) + (h + i) * whole(job, 45)
                        at_row += (lo - at + t) * 4 * half
                        turn(wide + 4 * i * dp, cos + at_row, sin + at_row, half, interleaved)
                    to = out + b * whole(job, 25) + (h + i) * whole(job, 26)
                    narrow(wide + 4 * i * dp, d, kind, to + (lo + t - at) * out_row)
        scratch[0] = 0.0

    return Kernel(pack, "pack"), Kernel(unpack, "unpack")
