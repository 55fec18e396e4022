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
from numba import njit

from ... import cpu_runtime as team
from ... import simd as lanes
from ...cpu_runtime import Kernel, count, real, sources, whole
from ...quantize import reference as ref
from ...simd import ahead, exp, lane, load, load_any, load_one, mul, splat, store, store_one
from . import dequant as ways
from . import microkernel as micro
from . import rope_tables as turns
from . import softmax as parts
from . import unpack_token as single
from .dequant import CHANNEL, MAP, SIZE, Way
from .microkernel import scores, values
from .rope_tables import BEFORE, FAR
from .softmax import merge, soften
from .unpack_token import out_of_atom, unpack

TILE = 128  # tokens of a running softmax
BLOCK = 32  # tokens that lie unpacked at once
AHEAD = 16  # tokens between asking the memory for one and reading it
KEYS, VALUES, DONE = 34, 59, 78  # where a job says where things lie; counters


class Form(NamedTuple):
    """What a kernel is made for: all of it is constant in the code."""

    d: int
    w: int  # query rows at once
    exact: int  # number format of exact tokens
    keys: Way = Way()  # of packed tokens
    values: Way = Way()
    meta: tuple[int, int] = (0, 0)  # number formats of scale and zero
    span: tuple[int, int] = (1, 1)  # tokens that share S and Z
    apart: tuple[bool, bool] = (False, False)  # packed: queries of their own, sums of their own


@njit(inline="always")
def _token(x, n_first, n_slots, slots, skip):  # type: ignore[no-untyped-def]
    """The strands' token that is number x of the list; below 0: one of the first."""
    j = x - n_first
    if j >= n_slots:
        j = j - n_slots + skip
    elif j >= 0:
        j = whole(slots, j)
    return j


@njit(inline="always")
def _strand(side, b, h, size):  # type: ignore[no-untyped-def]
    """Where a head's tokens lie: addresses, and bytes from one row to the next.

    size: bytes of a scale, where a head's are among others', else 0.
    """
    scale = whole(side, 5) + b * whole(side, 6) + h * whole(side, 7)
    zero = whole(side, 8) + b * whole(side, 9) + h * whole(side, 10)
    if size and whole(side, 4) > 0:
        scale += size * whole(whole(side, 18), h)
        zero += size * whole(whole(side, 18), h)
    codes = whole(side, 0) + b * whole(side, 1) + h * whole(side, 2)
    tail = whole(side, 12) + b * whole(side, 13) + h * whole(side, 14)
    table = whole(side, 16) + h * whole(side, 17)
    packed = codes, whole(side, 3), whole(side, 4), scale, zero, whole(side, 11), table
    return packed, tail, whole(side, 15)


@njit(inline="always")
def _ask(at, j, line, twice, per, high, d, span, more):  # type: ignore[no-untyped-def]
    """Ask for token j; line: bytes of an exact one, more: of a packed one's scales."""
    (codes, row, sealed, scale, zero, mrow, _), tail, trow = at
    if twice == 0 or j >= sealed:
        for v in range(0, line, 64):
            ahead(tail + (j - sealed) * trow + v)
        return
    for v in range(0, high * d, 64):
        ahead(codes + j // per * high * row + v)
    for v in range(0, more, 64):
        ahead(scale + j // span * mrow + v)
        ahead(zero + j // span * mrow + v)


@njit(inline="always")
def _lay(to, j, at, near, far, room, twice, per, high, d, span, meta, how):  # type: ignore[no-untyped-def]
    """Write packed token j to `to` in fp32."""
    codes, row, _, scale, zero, mrow, table = at
    t = j % per
    unpack(
        to, codes + j // per * high * row, row, t, out_of_atom(t, twice),
        scale + j // span * mrow, zero + j // span * mrow, table, room, near, far, d, how, meta,
    )  # fmt: skip


@cache
def kernel(form: Form) -> Any:
    """Compile the kernel of a form; see `gathered.attend` for how it is called."""
    d, w, exact = form.d, form.w, form.exact
    k, v = form.keys, form.values
    kbits, vbits, kturned = k.twice, v.twice, k.turned
    (kper, khigh), (vper, vhigh) = k.atom, v.atom
    kmeta, vmeta = form.meta
    kspan, vspan = form.span
    kmap, vmap = (SIZE[m] * (s.by == MAP) for s, m in zip((k, v), form.meta, strict=True))
    kmore, vmore = (
        SIZE[m] * (d if s.by == CHANNEL else s.across)
        for s, m in zip((k, v), form.meta, strict=True)
    )
    kapart, vapart = form.apart
    sets, kway, vway = 1 + vapart, k.number, v.number
    size, line, plain = SIZE[exact], SIZE[exact] * d, Way().number
    at_once, trow = 16 // w, 8 * d  # tokens whose scores are taken together; bytes of a turn
    srow = 4 * (TILE + 16)
    emitters = sources(lanes, micro, parts, ref, single, team, turns, ways)

    def attend(job):  # type: ignore[no-untyped-def]
        if emitters == 0:  # never: code on the disk belongs to the sources that emitted it
            return
        batch, heads, rows, r = whole(job, 1), whole(job, 2), whole(job, 3), whole(job, 4)
        n_first, n_slots, skip = whole(job, 5), whole(job, 6), whole(job, 7)
        n, splits = whole(job, 8), whole(job, 9)
        scale, softcap = np.float32(real(job, 10)), np.float32(real(job, 11))
        q, qpacked, out = whole(job, 12), whole(job, 13), whole(job, 14)
        lse, states = whole(job, 15), whole(job, 16)
        padded = -(-rows // w) * w
        tiles = -(-n // TILE)
        tasks = batch * heads * splits
        pstate = 4 * (sets * rows * d + 32 * rows)  # bytes of a task's state
        zero16 = splat(np.float32(0.0))
        room = padded * ((sets + 2) * d + 32 + srow // 4) + BLOCK * d + 16 * w + 256 + 16
        scratch = np.empty(room, np.float32)
        acc = (scratch.ctypes.data + 63) // 64 * 64
        qs = acc + 4 * sets * padded * d  # queries times scale
        qps = qs + 4 * padded * d  # the same for packed keys, where those differ
        tops = qps + 4 * padded * d  # [padded] running maximum and sum, 16 floats apart
        begin = tops + 4 * padded * 32
        s = begin + 64 * w
        groups = s + padded * srow  # S and Z of one token
        tile = groups + 4 * 256
        for i in range(w):
            store(begin + 64 * i, zero16)
        while True:
            task = count(job)
            if task >= tasks:
                break
            head, part = task // splits, task % splits
            b, g = head // heads, head % heads
            h = g // r
            for i in range(0, sets * padded * d, 16):
                store(acc + 4 * i, zero16)
            for i in range(0, padded * d, 16):
                inside = i < rows * d
                at = 4 * (head * rows * d + i)
                store(qs + 4 * i, mul(load(q + at), splat(scale)) if inside else zero16)
                if kapart:
                    x = mul(load(qpacked + at), splat(scale)) if inside else zero16
                    store(qps + 4 * i, x)
            for m in range(padded):
                store_one(tops + 128 * m, np.float32(-np.inf))
                store_one(tops + 128 * m + 64, np.float32(0.0))
            slots = whole(job, 23) + b * whole(job, 24) + g * whole(job, 25)
            kfirst = whole(job, 26) + b * whole(job, 27) + h * whole(job, 28)
            vfirst = whole(job, 30) + b * whole(job, 31) + h * whole(job, 32)
            kfrow, vfrow = whole(job, 29), whole(job, 33)
            keys = _strand(job + 8 * KEYS, b, h, kmap)
            values_ = _strand(job + 8 * VALUES, b, h, vmap)
            kpacked, ktail, ktrow = keys
            vpacked, vtail, vtrow = values_
            ksealed, vsealed = whole(job, KEYS + 4), whole(job, VALUES + 4)
            knear, kfar = whole(job, KEYS + 19), whole(job, KEYS + 20)
            places = whole(job, KEYS + 21) + b * whole(job, KEYS + 22) + h * whole(job, KEYS + 23)
            apart = whole(job, KEYS + 24)  # whether each key has a position of its own
            last = min(n, (part + 1) * tiles // splits * TILE)
            for lo in range(part * tiles // splits * TILE, last, TILE):
                nt = min(TILE, n - lo)
                # --- scores, of tokens that meet the same queries
                j0 = 0
                while j0 < nt:
                    many, packed = 0, False
                    while many < BLOCK and j0 + many < nt:
                        x = lo + j0 + many
                        j = x + AHEAD - n_first
                        if j >= 0 and j < n_slots:
                            j = whole(slots, j)
                            _ask(keys, j, line, kbits, kper, khigh, d, kspan, kmore)
                            _ask(values_, j, line, vbits, vper, vhigh, d, vspan, vmore)
                        j = _token(x, n_first, n_slots, slots, skip)
                        its = kbits > 0 and x >= n_first and j < ksealed
                        if kapart and many > 0 and its != packed:
                            break
                        packed = its
                        to = tile + 4 * d * many
                        many += 1
                        if its:
                            near, far = knear, kfar
                            if kturned:
                                at = whole(places, j) if apart else whole(places, 0) + j
                                turns_ = max(-BEFORE, at // FAR)
                                near += max(0, at - turns_ * FAR) * trow
                                far += (turns_ + BEFORE) * trow
                            _lay(
                                to, j, kpacked, near, far, groups,
                                kbits, kper, khigh, d, kspan, kmeta, kway,
                            )  # fmt: skip
                            continue
                        src = ktail + (j - ksealed) * ktrow
                        if x < n_first:
                            src = kfirst + x * kfrow
                        for c in range(0, d, 16):
                            store(to + 4 * c, load_any(src + c * size, exact))
                    its_q = qps if kapart and packed else qs
                    for m0 in range(0, padded, w):  # those behind the last are masked below
                        for i in range(0, many, at_once):
                            scores(
                                its_q + 4 * m0 * d, begin, tile + 4 * d * i, 4 * d,
                                s + m0 * srow + 4 * (j0 + i), srow, 0, 0, 0, 0,
                                d, w, at_once, plain,
                            )  # fmt: skip
                    j0 += many
                # --- the running softmax
                for m in range(padded):
                    if m >= rows:
                        for j in range(0, nt, 16):
                            store(s + m * srow + 4 * j, zero16)
                        continue
                    bias, valid = 0, 0
                    if whole(job, 17) != 0:
                        bias = whole(job, 17) + b * whole(job, 18) + 4 * lo
                        bias += (g * rows + m) * whole(job, 19)
                    if whole(job, 20) != 0:
                        valid = whole(job, 20) + b * whole(job, 21) + g * whole(job, 22) + lo
                    top = load_one(tops + 128 * m, 0)
                    new, more = soften(s + m * srow, nt, nt, softcap, bias, valid, top)
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
                # --- values, of tokens whose sums are taken in the same space
                j0 = 0
                while j0 < nt:
                    many, packed = 0, False
                    while many < BLOCK and j0 + many < nt:
                        x = lo + j0 + many
                        j = _token(x, n_first, n_slots, slots, skip)
                        its = vbits > 0 and x >= n_first and j < vsealed
                        if vapart and many > 0 and its != packed:
                            break
                        packed = its
                        to = tile + 4 * d * many
                        many += 1
                        if its:
                            _lay(
                                to, j, vpacked, 0, 0, groups,
                                vbits, vper, vhigh, d, vspan, vmeta, vway,
                            )  # fmt: skip
                            continue
                        src = vtail + (j - vsealed) * vtrow
                        if x < n_first:
                            src = vfirst + x * vfrow
                        for c in range(0, d, 16):
                            store(to + 4 * c, load_any(src + c * size, exact))
                    to = acc + 4 * padded * d if vapart and packed else acc
                    for m0 in range(0, padded, w):
                        values(
                            s + m0 * srow + 4 * j0, srow, tile, 4 * d, many, to + 4 * m0 * d,
                            0, 0, 0, d, w, plain,
                        )  # fmt: skip
                    j0 += many
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

    return Kernel(attend, f"gathered {form}")
