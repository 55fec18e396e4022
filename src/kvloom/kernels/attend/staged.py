"""Decode attention over chosen tokens, read where they lie, compiled for one format.

Decides in what order. A step reads a list of tokens: the first ones of a tensor of their own
(sinks), those at given slots of a strand, and all of the strand from a token on. Work is split into
(batch row, head that chose, stretch of the list). A task walks in tiles of `TILE` tokens: `BLOCK`
tokens at a time are laid side by side in fp32, unpacked if need be, in a scratch that stays in the
core's nearest cache, and meet all query rows of the head there; between scores and values stands a
running softmax. The reference is `ref.attend_gathered`.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from .. import lanes, team
from ..lanes import (
    I32,
    VF,
    VI,
    WIDTH,
    Lanes,
    ahead,
    exp,
    fma,
    lane,
    load,
    load_any,
    load_one,
    mul,
    read,
    splat,
    spread,
    store,
    store_one,
)
from ..quant.ref import ATOM
from ..team import Kernel, count, real, sources, whole
from . import micro, parts, ways
from .micro import scores, values
from .parts import merge, soften
from .ways import SIZE, Way

TILE = 128  # tokens of a running softmax
BLOCK = 32  # tokens that lie unpacked at once
AHEAD = 16  # tokens between asking the memory for one and reading it


class Form(NamedTuple):
    """What a kernel is made for: all of it is constant in the code."""

    d: int
    w: int  # query rows at once
    dense: int  # format of exact tokens
    bits: tuple[float, float] = (0, 0)  # of packed keys and values, 0: none
    group: tuple[int, int] = (0, 0)
    channel: tuple[bool, bool] = (False, False)  # whether groups run along tokens
    meta: tuple[int, int] = (0, 0)


@intrinsic
def _shifted(ctx: Any, address: Any, shift: Any, mask: Any) -> Any:
    """Sixteen bytes, shifted down and masked, as fp32."""

    def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        address, shift, mask = args
        bytes_ = read(b, address, ir.VectorType(ir.IntType(8), WIDTH), 1)

        def wide(x: Any) -> Any:
            one = b.bitcast(b.trunc(x, I32), ir.FloatType())
            return b.bitcast(spread(b, one), VI)

        return b.uitofp(b.and_(b.lshr(b.zext(bytes_, VI), wide(shift)), wide(mask)), VF)

    return Lanes(types.int64, types.int64, types.int64), codegen


@intrinsic
def _whole(ctx: Any, x: Any) -> Any:
    """Sixteen positive numbers rounded down."""

    def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        return b.sitofp(b.fptosi(args[0], VI), VF)

    return Lanes(Lanes), codegen


@njit(inline="always")
def _codes(row, crow, t, bits):  # type: ignore[no-untyped-def]
    """Sixteen codes of token t of an atom, whose first byte row is at `row`."""
    if bits == 3:
        low = _shifted(row + t // 4 * crow, t % 4 * 2, 3)
        return fma(_shifted(row + 2 * crow, t, 1), splat(np.float32(4.0)), low)
    if bits == 1.5:
        third, half = splat(np.float32(1.0 / 3.0)), splat(np.float32(0.5 / 3.0))
        x = _shifted(row, 0, 255)
        for _ in range(t):
            x = _whole(fma(x, third, half))
        return fma(_whole(fma(x, third, half)), splat(np.float32(-3.0)), x)
    return _shifted(row, t * int(bits), 2 ** int(bits) - 1)


@njit(inline="always")
def _unpack(to, j, at, d, bits, group, channel, meta, size, per, high):  # type: ignore[no-untyped-def]
    """Write token j of a packed prefix to `to` in fp32; at: its place, as a job says it."""
    codes, crow, scale, zero = at
    row = codes + j // per * high * crow
    across = d // max(group, 1)
    for v in range(0, d, 16):
        x = _codes(row + v, crow, j % per, bits)
        if channel:
            place = (j // max(group, 1) * d + v) * size
            x = fma(x, load_any(scale + place, meta), load_any(zero + place, meta))
        else:
            place = (j * across + v // max(group, 1)) * size
            x = fma(x, splat(load_one(scale + place, meta)), splat(load_one(zero + place, meta)))
        store(to + 4 * v, x)


@cache
def kernel(form: Form) -> Any:
    """Compile the kernel of a form; see `gathered.attend` for how it is called."""
    d, w, dense = form.d, form.w, form.dense
    kbits, vbits = form.bits
    kgroup, vgroup = form.group
    kchannel, vchannel = form.channel
    kmeta, vmeta = form.meta
    kper, khigh = ATOM.get(kbits, (1, 1))
    vper, vhigh = ATOM.get(vbits, (1, 1))
    size, ksize, vsize = SIZE[dense], SIZE[kmeta], SIZE[vmeta]
    at_once, exact = 16 // w, Way().number  # tokens whose scores are taken together; fp32
    srow = 4 * (TILE + 16)
    emitters = sources(lanes, micro, parts, team, ways)

    def attend(job):  # type: ignore[no-untyped-def]
        if emitters == 0:  # never: code on the disk belongs to the sources that emitted it
            return
        batch, heads, rows, r = whole(job, 1), whole(job, 2), whole(job, 3), whole(job, 4)
        n_first, n_slots, skip = whole(job, 5), whole(job, 6), whole(job, 7)
        n, splits = whole(job, 8), whole(job, 9)
        scale, softcap = np.float32(real(job, 10)), np.float32(real(job, 11))
        q, out, lse, states = whole(job, 12), whole(job, 13), whole(job, 14), whole(job, 15)
        done = job + 8 * 63  # of each head, how many stretches are
        padded = -(-rows // w) * w
        tiles = -(-n // TILE)
        tasks = batch * heads * splits
        pstate = 4 * (rows * d + 32 * rows)  # bytes of a task's state
        zero16 = splat(np.float32(0.0))
        room = padded * (2 * d + 32 + srow // 4) + BLOCK * d + 16 * w + 16
        scratch = np.empty(room, np.float32)
        acc = (scratch.ctypes.data + 63) // 64 * 64
        qs = acc + 4 * padded * d  # queries times scale
        tops = qs + 4 * padded * d  # [padded] running maximum and sum, 16 floats apart
        begin = tops + 4 * padded * 32
        s = begin + 64 * w
        tile = s + padded * srow
        for i in range(w):
            store(begin + 64 * i, zero16)
        while True:
            task = count(job)
            if task >= tasks:
                break
            head, part = task // splits, task % splits
            b, g = head // heads, head % heads
            h = g // r
            for i in range(0, padded * d, 16):
                store(acc + 4 * i, zero16)
                if i < rows * d:
                    from_q = q + 4 * (head * rows * d + i)
                    store(qs + 4 * i, mul(load(from_q), splat(np.float32(scale))))
                else:
                    store(qs + 4 * i, zero16)
            for m in range(padded):
                store_one(tops + 128 * m, np.float32(-np.inf))
                store_one(tops + 128 * m + 64, np.float32(0.0))
            slots = whole(job, 22) + b * whole(job, 23) + g * whole(job, 24)
            kfirst = whole(job, 25) + b * whole(job, 26) + h * whole(job, 27)
            vfirst = whole(job, 29) + b * whole(job, 30) + h * whole(job, 31)
            kfrow, vfrow = whole(job, 28), whole(job, 32)
            kat = (
                whole(job, 33) + b * whole(job, 34) + h * whole(job, 35),
                whole(job, 36),
                whole(job, 37) + b * whole(job, 38) + h * whole(job, 39),
                whole(job, 40) + b * whole(job, 41) + h * whole(job, 42),
            )
            ksealed, ktrow = whole(job, 43), whole(job, 47)
            ktail = whole(job, 44) + b * whole(job, 45) + h * whole(job, 46)
            vat = (
                whole(job, 48) + b * whole(job, 49) + h * whole(job, 50),
                whole(job, 51),
                whole(job, 52) + b * whole(job, 53) + h * whole(job, 54),
                whole(job, 55) + b * whole(job, 56) + h * whole(job, 57),
            )
            vsealed, vtrow = whole(job, 58), whole(job, 62)
            vtail = whole(job, 59) + b * whole(job, 60) + h * whole(job, 61)
            last = min(n, (part + 1) * tiles // splits * TILE)
            for lo in range(part * tiles // splits * TILE, last, TILE):
                nt = min(TILE, n - lo)
                # --- scores
                for j0 in range(0, nt, BLOCK):
                    many = min(BLOCK, nt - j0)
                    for i in range(many):
                        x = lo + j0 + i
                        j = x + AHEAD - n_first
                        if j >= 0 and j < n_slots:
                            j = whole(slots, j)
                            for v in range(0, d * size, 64):
                                if not kbits:
                                    ahead(ktail + j * ktrow + v)
                                if not vbits:
                                    ahead(vtail + j * vtrow + v)
                            for v in range(0, d, 64):
                                if kbits:
                                    ahead(kat[0] + j // kper * khigh * kat[1] + v)
                                if vbits:
                                    ahead(vat[0] + j // vper * vhigh * vat[1] + v)
                        to = tile + 4 * d * i
                        j = x - n_first
                        if j >= n_slots:
                            j = j - n_slots + skip
                        elif j >= 0:
                            j = whole(slots, j)
                        if kbits and x >= n_first and j < ksealed:
                            _unpack(
                                to, j, kat, d, kbits, kgroup, kchannel, kmeta, ksize, kper, khigh
                            )
                        else:
                            src = ktail + (j - ksealed) * ktrow
                            if x < n_first:
                                src = kfirst + x * kfrow
                            for v in range(0, d, 16):
                                store(to + 4 * v, load_any(src + v * size, dense))
                    for m0 in range(0, padded, w):  # those behind the last are masked below
                        for i in range(0, many, at_once):
                            scores(
                                qs + 4 * m0 * d, begin, tile + 4 * d * i, 4 * d,
                                s + m0 * srow + 4 * (j0 + i), srow, 0, 0, 0, 0,
                                d, w, at_once, exact,
                            )  # fmt: skip
                # --- the running softmax
                for m in range(padded):
                    if m >= rows:
                        for j in range(0, nt, 16):
                            store(s + m * srow + 4 * j, zero16)
                        continue
                    add_bias, is_valid = 0, 0
                    if whole(job, 16) != 0:
                        add_bias = (
                            whole(job, 16)
                            + b * whole(job, 17)
                            + (g * rows + m) * whole(job, 18)
                            + 4 * lo
                        )
                    if whole(job, 19) != 0:
                        is_valid = whole(job, 19) + b * whole(job, 20) + g * whole(job, 21) + lo
                    top = load_one(tops + 128 * m, 0)
                    new, more = soften(s + m * srow, nt, nt, softcap, add_bias, is_valid, top)
                    if new > top:
                        shrink = exp(splat(top - new))
                        for c in range(0, d, 16):
                            place = acc + 4 * (m * d + c)
                            store(place, mul(load(place), shrink))
                        more += load_one(tops + 128 * m + 64, 0) * lane(shrink)
                    else:
                        more += load_one(tops + 128 * m + 64, 0)
                    store_one(tops + 128 * m, new)
                    store_one(tops + 128 * m + 64, more)
                # --- values
                for j0 in range(0, nt, BLOCK):
                    many = min(BLOCK, nt - j0)
                    for i in range(many):
                        x = lo + j0 + i
                        to = tile + 4 * d * i
                        j = x - n_first
                        if j >= n_slots:
                            j = j - n_slots + skip
                        elif j >= 0:
                            j = whole(slots, j)
                        if vbits and x >= n_first and j < vsealed:
                            _unpack(
                                to, j, vat, d, vbits, vgroup, vchannel, vmeta, vsize, vper, vhigh
                            )
                        else:
                            src = vtail + (j - vsealed) * vtrow
                            if x < n_first:
                                src = vfirst + x * vfrow
                            for v in range(0, d, 16):
                                store(to + 4 * v, load_any(src + v * size, dense))
                    for m0 in range(0, padded, w):
                        values(
                            s + m0 * srow + 4 * j0, srow, tile, 4 * d, many, acc + 4 * m0 * d,
                            0, 0, 0, d, w, exact,
                        )  # fmt: skip
            # --- this stretch's state: out not yet divided, maximum and sum
            to = states + task * pstate
            for i in range(0, rows * d, 16):
                store(to + 4 * i, load(acc + 4 * i))
            for i in range(0, rows * 32, 16):
                store(to + 4 * (rows * d + i), load(tops + 4 * i))
            if count(done + 8 * head) + 1 == splits:  # the last stretch of this head merges all
                merge(
                    states + head * splits * pstate, splits, rows, 1, d,
                    out + 4 * head * rows * d, lse + 4 * head * rows,
                )  # fmt: skip
        scratch[0] = 0.0  # Numba frees an array once its last use is behind

    return Kernel(attend, f"gathered {form}")
