"""Decode attention over a packed prefix and an exact tail in one pass, compiled for one format.

Decides what happens in what order. Work is split into (batch row, key/value head, stretch of
tokens); a task walks its stretch in tiles of tokens: scores of all query rows of the group, a
running softmax, then values, both straight from the codes. Keys and values each have a packed
prefix and an exact tail of their own, so where one ends does not matter to the other. The
stretches' states are merged at the end. The reference is `ref.attend`.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from ... import cpu_runtime as team
from ... import simd as lanes
from ...cpu_runtime import Kernel, count, real, sources, whole
from ...quantize import reference as ref
from ...simd import exp, fma, lane, load, load_any, load_one, mul, splat, store, store_one
from . import dequant as ways
from . import lookup
from . import microkernel as micro
from . import rope_tables as turns
from . import softmax as parts
from .dequant import CHANNEL, MAP, NONE, RUN, SIZE, TABLE, Way
from .lookup import known, place, tabled
from .microkernel import scores, turn, values
from .rope_tables import BEFORE, FAR
from .softmax import clear, merge, numbers, sizes, soften

KEYS, VALUES, LEFT, DONE = 21, 43, 62, 64  # where a job says where things lie; counters


class Form(NamedTuple):
    """What a kernel is made for: all of it is constant in the code."""

    d: int
    w: int  # query rows at once
    exact: Way  # of the tails
    keys: Way = Way()  # of the packed prefixes
    values: Way = Way()
    meta: tuple[int, int] = (0, 0)  # number formats of scale and zero
    span: tuple[int, int] = (0, 0)  # by channel: tokens that share S and Z, 0: all
    flat: tuple[bool, bool] = (True, True)  # by map: whether a head reads all of a token's groups
    apart: tuple[bool, bool] = (False, False)  # packed: queries of their own, sums of their own

    @property
    def tile(self) -> int:
        """Tokens of a tile, at least 128: atoms and groups end with it."""
        each = math.lcm(16, self.keys.atom[0], self.values.atom[0], *filter(None, self.span))
        return each * -(-128 // each)


@cache
def kernel(form: Form) -> Any:
    """Compile the kernel of a form; see `cpu.attend` for how it is called."""
    d, w, tile = form.d, form.w, form.tile
    k, v, exact = known(form.keys), known(form.values), form.exact.number
    kbits, vbits, kby, vby = k.twice, v.twice, k.by, v.by
    (kper, khigh), (vper, vhigh) = k.atom, v.atom
    kmeta, vmeta = form.meta
    msize, vsize = SIZE[kmeta], SIZE[vmeta]
    kspan, vspan = (x or tile for x in form.span)
    kacross, vacross = k.across, v.across
    kapart, sets = form.apart[0], 1 + form.apart[1]
    kfactor, vfactor, koffset, voffset = k.factor, v.factor, k.offset, v.offset
    klevels, vlevels, kturned = k.levels, v.levels, k.turned
    kchannel, vchannel = kby == CHANNEL, vby == CHANNEL
    kfold = kchannel and not kturned  # S goes into the query
    # by token: scales of a tile lie side by side, or those of a head among others'
    ktabled, vtabled = kby == TABLE, vby == TABLE
    kmap, vmap = kby == MAP or ktabled, vby == MAP or vtabled
    kjoint, vjoint = kby == RUN or (kmap and form.flat[0]), vby == RUN or (vmap and form.flat[1])
    kstrewn, vstrewn = kmap and not kjoint, vmap and not vjoint
    kway, vway = (k._replace(by=NONE) if kfold else k).number, v.number
    kblock = max(1, 16 // (w * kper))  # atoms of packed keys at once
    kstretch = max(1, 16 // kper) if kturned or ktabled else tile  # atoms: a turned query, tables
    trow = 8 * d  # bytes of a row of cosines and sines
    table_size = lookup.SIZE
    block = 16 // w  # exact keys at once
    meta_gap = 4 * (max(kacross, vacross, 1) * (tile + 8) + d + 256) // 64 * 64  # bytes of S
    srow = 4 * (tile + 16)
    emitters = sources(lanes, lookup, micro, parts, ref, team, turns, ways)

    def attend(job):  # type: ignore[no-untyped-def]
        if emitters == 0:  # never: code on the disk belongs to the sources that emitted it
            return
        batch, hk, rows, t = whole(job, 1), whole(job, 2), whole(job, 3), whole(job, 4)
        n, causal, splits = whole(job, 5), whole(job, 6), whole(job, 7)
        scale, softcap = np.float32(real(job, 8)), np.float32(real(job, 9))
        q, qpacked, out = whole(job, 10), whole(job, 11), whole(job, 12)
        lse, states = whole(job, 13), whole(job, 14)
        left = whole(job, LEFT)  # where products are left
        padded = -(-rows // w) * w
        tiles = -(-n // tile)
        tasks = batch * hk * splits
        pstate = 4 * (sets * rows * d + 32 * rows)  # bytes of a task's state
        zero16, minus = splat(np.float32(0.0)), splat(np.float32(koffset))
        room = padded * ((sets + 2) * d + 32) + w * (3 * d + 32) + w * (srow // 4)
        scratch = np.empty(room + 2 * (meta_gap // 4) + 2 * d + 512 + 16, np.float32)
        acc = (scratch.ctypes.data + 63) // 64 * 64
        qs = acc + 4 * sets * padded * d  # queries times scale
        qps = qs + 4 * padded * d  # the same for packed keys, where those differ
        tops = qps + 4 * padded * d  # [padded] running maximum and sum, 16 floats apart
        folded = tops + 4 * padded * 32
        far, turned = folded + 4 * w * d, folded + 8 * w * d
        begin = folded + 12 * w * d
        rest = begin + 4 * w * 16  # weights of the tokens of an unfinished atom
        s = rest + 4 * w * 16
        meta = s + w * srow
        tables = meta + 2 * meta_gap
        kplaced = tables + 2048
        vplaced = kplaced + 4 * d
        while True:
            task = count(job)
            if task >= tasks:
                break
            head, part = task // splits, task % splits
            b, h = head // hk, head % hk
            for i in range(0, sets * padded * d, 16):
                store(acc + 4 * i, zero16)
            for i in range(0, padded * d, 16):
                inside = i < rows * d
                at = 4 * (head * rows * d + i)
                x = mul(load(q + at), splat(scale)) if inside else zero16
                store(qs + 4 * i, x)
                if kapart:
                    x = mul(load(qpacked + at), splat(scale)) if inside else zero16
                    store(qps + 4 * i, x)
            for m in range(padded):
                store_one(tops + 128 * m, np.float32(-np.inf))
                store_one(tops + 128 * m + 64, np.float32(0.0))
            side = job + 8 * KEYS
            kcodes = whole(side, 0) + b * whole(side, 1) + h * whole(side, 2)
            krow, ksealed = whole(side, 3), whole(side, 4)
            kscale = whole(side, 5) + b * whole(side, 6) + h * whole(side, 7)
            kzero = whole(side, 8) + b * whole(side, 9) + h * whole(side, 10)
            kmrow = whole(side, 11)
            ktail = whole(side, 12) + b * whole(side, 13) + h * whole(side, 14)
            ktrow = whole(side, 15)
            ktable = whole(side, 16) + h * whole(side, 17)
            if kmap and ksealed > 0:
                kscale += msize * whole(whole(side, 18), h)
                kzero += msize * whole(whole(side, 18), h)
                if ktabled:
                    place(ktable, kplaced, d, kway)
                    ktable = kplaced
            knear, kfar = whole(side, 19), whole(side, 20)
            kposition = whole(whole(side, 21), b) if kturned else 0
            side = job + 8 * VALUES
            vcodes = whole(side, 0) + b * whole(side, 1) + h * whole(side, 2)
            vrow, vsealed = whole(side, 3), whole(side, 4)
            vscale = whole(side, 5) + b * whole(side, 6) + h * whole(side, 7)
            vzero = whole(side, 8) + b * whole(side, 9) + h * whole(side, 10)
            vmrow = whole(side, 11)
            vtail = whole(side, 12) + b * whole(side, 13) + h * whole(side, 14)
            vtrow = whole(side, 15)
            vtable = whole(side, 16) + h * whole(side, 17)
            if vmap and vsealed > 0:
                vscale += vsize * whole(whole(side, 18), h)
                vzero += vsize * whole(whole(side, 18), h)
                if vtabled:
                    place(vtable, vplaced, d, vway)
                    vtable = vplaced
            last = min(n, (part + 1) * tiles // splits * tile)
            for lo in range(part * tiles // splits * tile, last, tile):
                nt = min(tile, n - lo)
                kn = min(max(ksealed - lo, 0), nt)  # packed keys of this tile
                vn = min(max(vsealed - lo, 0), nt)
                many = max(-BEFORE, (kposition + lo) // FAR)  # turns before the tile, and after
                few = max(0, kposition + lo - many * FAR)
                for m0 in range(0, padded, w):
                    qm = qs + 4 * m0 * d
                    qp = qps + 4 * m0 * d if kapart else qm
                    for i in range(w):
                        store(begin + 64 * i, zero16)
                    # --- scores of packed keys
                    if kturned:
                        turn(qp, far, kfar + (many + BEFORE) * trow, d, w, kway)
                    if kjoint:
                        at = lo * kmrow
                        if klevels:
                            sizes(kscale + at, kn * kacross, kmeta, msize, meta)
                        else:
                            numbers(
                                kscale + at, kzero + at, kn * kacross, kfactor, koffset, kmeta,
                                msize, meta, meta_gap,
                            )  # fmt: skip
                    if kstrewn:
                        for j in range(kn):
                            at = (lo + j) * kmrow
                            numbers(
                                kscale + at, kzero + at, kacross, kfactor, koffset, kmeta, msize,
                                meta + 4 * j * kacross, meta_gap,
                            )  # fmt: skip
                    if kbits:
                        for g in range(0, kn, kspan):
                            tokens = min(kspan, kn - g)
                            its = qp
                            if kchannel:
                                at = (lo + g) // kspan * kmrow
                                if kturned:
                                    numbers(
                                        kscale + at, kzero + at, d, kfactor, koffset, kmeta, msize,
                                        meta, meta_gap,
                                    )  # fmt: skip
                                else:
                                    its = folded
                                    for i in range(w):
                                        const = zero16
                                        for c in range(0, d, 16):
                                            x = load(qp + 4 * (i * d + c))
                                            big = load_any(kscale + at + c * msize, kmeta)
                                            x_big = mul(x, mul(big, splat(np.float32(kfactor))))
                                            store(folded + 4 * (i * d + c), x_big)
                                            # offset times x_big as rounded: the 1 of x cancels
                                            const = fma(x_big, minus, const)
                                            zero = load_any(kzero + at + c * msize, kmeta)
                                            const = fma(x, zero, const)
                                        store(begin + 64 * i, const)
                            skip = (lo + g) % kper  # tokens of the first atom before the group
                            base = kcodes + (lo + g) // kper * khigh * krow
                            to = s + 4 * (g - skip)
                            for i in range(w):
                                for j in range(skip):
                                    kept = load_one(to + i * srow + 4 * j, 0)
                                    store_one(rest + 64 * i + 4 * j, kept)
                            atoms = -(-(skip + tokens) // kper)
                            for a0 in range(0, atoms, kstretch):
                                stop = min(a0 + kstretch, atoms)
                                if kturned:
                                    its = turned
                                    here = knear + (few + g - skip + a0 * kper) * trow
                                    turn(far, turned, here, d, w, kway)
                                at, each = meta + 4 * a0 * kper * kacross, 4 * kper * kacross
                                if ktabled:
                                    tabled(at, meta_gap, (stop - a0) * kper, tables, kway)
                                    at, each = tables, kper * table_size
                                even = a0 + (stop - a0) // kblock * kblock
                                for a in range(a0, even, kblock):
                                    scores(
                                        its, begin, base + a * khigh * krow, krow,
                                        to + 4 * a * kper, srow, at + (a - a0) * each, meta_gap,
                                        ktable, knear + (a - a0) * kper * trow, d, w, kblock, kway,
                                    )  # fmt: skip
                                for a in range(even, stop):
                                    scores(
                                        its, begin, base + a * khigh * krow, krow,
                                        to + 4 * a * kper, srow, at + (a - a0) * each, meta_gap,
                                        ktable, knear + (a - a0) * kper * trow, d, w, 1, kway,
                                    )  # fmt: skip
                            for i in range(w):
                                for j in range(skip):
                                    kept = load_one(rest + 64 * i + 4 * j, 0)
                                    store_one(to + i * srow + 4 * j, kept)
                    if kfold:
                        for i in range(w):
                            store(begin + 64 * i, zero16)
                    # --- scores of exact keys
                    base = ktail + (lo - ksealed) * ktrow
                    even = kn + (nt - kn) // block * block
                    for j in range(kn, even, block):
                        scores(
                            qm, begin, base + j * ktrow, ktrow, s + 4 * j, srow, meta, meta_gap,
                            0, 0, d, w, block, exact,
                        )  # fmt: skip
                    for j in range(even, nt):
                        scores(
                            qm, begin, base + j * ktrow, ktrow, s + 4 * j, srow, meta, meta_gap,
                            0, 0, d, w, 1, exact,
                        )  # fmt: skip
                    # --- the running softmax
                    for i in range(w):
                        m = m0 + i
                        if m >= rows:
                            for j in range(0, nt, 16):
                                store(s + i * srow + 4 * j, zero16)
                            continue
                        bound = nt
                        if causal:
                            bound = min(nt, max(0, n - t + m % t + 1 - lo))
                        if left != 0:
                            to = left + (head * rows + m) * whole(job, LEFT + 1) + 4 * lo
                            for j in range(0, nt, 16):
                                store(to + 4 * j, load(s + i * srow + 4 * j))
                        bias, valid = 0, 0
                        if whole(job, 15) != 0:
                            at = b * whole(job, 16) + (h * rows + m) // t * whole(job, 17)
                            bias = whole(job, 15) + at + 4 * lo
                        if whole(job, 18) != 0:
                            valid = whole(job, 18) + b * whole(job, 19) + h * whole(job, 20) + lo
                        top = load_one(tops + 128 * m, 0)
                        new, more = soften(s + i * srow, nt, bound, softcap, bias, valid, top)
                        if new > top:
                            shrink = exp(splat(top - new))
                            for its_set in range(sets):
                                for c in range(0, d, 16):
                                    at = acc + 4 * ((its_set * padded + m) * d + c)
                                    store(at, mul(load(at), shrink))
                            more += load_one(tops + 128 * m + 64, 0) * lane(shrink)
                        else:
                            more += load_one(tops + 128 * m + 64, 0)
                        store_one(tops + 128 * m, new)
                        store_one(tops + 128 * m + 64, more)
                    # --- values: packed ones, then exact ones
                    to = acc + 4 * ((sets - 1) * padded + m0) * d
                    if vjoint:
                        at = lo * vmrow
                        if vlevels:
                            sizes(vscale + at, vn * vacross, vmeta, vsize, meta)
                        else:
                            numbers(
                                vscale + at, vzero + at, vn * vacross, vfactor, voffset, vmeta,
                                vsize, meta, meta_gap,
                            )  # fmt: skip
                    if vstrewn:
                        for j in range(vn):
                            at = (lo + j) * vmrow
                            numbers(
                                vscale + at, vzero + at, vacross, vfactor, voffset, vmeta, vsize,
                                meta + 4 * j * vacross, meta_gap,
                            )  # fmt: skip
                    if vjoint or vstrewn:
                        clear(meta, meta_gap, vn * vacross, -(-vn // vper) * vper * vacross)
                    if vbits:
                        for g in range(0, vn, vspan):
                            if vchannel:
                                at = (lo + g) // vspan * vmrow
                                numbers(
                                    vscale + at, vzero + at, d, vfactor, voffset, vmeta, vsize,
                                    meta, meta_gap,
                                )  # fmt: skip
                            skip = (lo + g) % vper
                            end = skip + min(vspan, vn - g)
                            base = vcodes + (lo + g) // vper * vhigh * vrow
                            weights = s + 4 * (g - skip)
                            front, full = (1 if skip > 0 else 0), end // vper
                            values(
                                weights + 4 * front * vper, srow, base + front * vhigh * vrow, vrow,
                                full - front, to, meta + 4 * front * vper * vacross, meta_gap,
                                vtable, d, w, vway,
                            )  # fmt: skip
                            for edge in range(
                                2
                            ):  # atoms with tokens of another group, or exact ones
                                if (skip if edge == 0 else end % vper) == 0:
                                    continue
                                past = edge * full * vper
                                for i in range(w):
                                    for j in range(vper):
                                        x = np.float32(0.0)
                                        if skip <= past + j < end:
                                            x = load_one(weights + i * srow + 4 * (past + j), 0)
                                        store_one(rest + 64 * i + 4 * j, x)
                                values(
                                    rest, 64, base + edge * full * vhigh * vrow, vrow, 1, to,
                                    meta + 4 * past * vacross, meta_gap, vtable, d, w, vway,
                                )  # fmt: skip
                    values(
                        s + 4 * vn, srow, vtail + (lo + vn - vsealed) * vtrow, vtrow, nt - vn,
                        acc + 4 * m0 * d, meta, meta_gap, 0, d, w, exact,
                    )  # fmt: skip
            # --- this stretch's state: out not yet divided, maximum and sum
            to = states + task * pstate
            for its_set in range(sets):
                for i in range(0, rows * d, 16):
                    at = 4 * (its_set * rows * d + i)
                    store(to + at, load(acc + 4 * (its_set * padded * d + i)))
            for i in range(0, rows * 32, 16):
                store(to + 4 * (sets * rows * d + i), load(tops + 4 * i))
            if count(job + 8 * (DONE + head)) + 1 == splits:  # the head's last stretch merges all
                merge(
                    states + head * splits * pstate, splits, rows, sets, d,
                    out + 4 * head * sets * rows * d, lse + 4 * head * rows,
                )  # fmt: skip
        scratch[0] = 0.0  # Numba frees an array once its last use is behind

    return Kernel(attend, f"attend {form}")
