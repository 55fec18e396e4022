"""Decode attention over a packed prefix and an exact tail in one pass, compiled for one format.

Decides what happens in what order. Work is split into (batch row, key/value head, stretch of
tokens); a task walks its stretch in tiles of `TILE` tokens: scores of all query rows of the group,
a running softmax, then values, both straight from the codes. Keys and values each have a packed
prefix and an exact tail of their own, so where one ends does not matter to the other. The
stretches' states are merged at the end. The reference is `ref.attend`.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numba import njit

from .. import lanes, team
from ..lanes import (
    add,
    div,
    exp,
    first,
    fma,
    lane,
    larger,
    largest,
    load,
    load_any,
    load_one,
    mul,
    seen,
    splat,
    store,
    store_one,
    total,
)
from ..quant.ref import ATOM
from ..team import Kernel, count, real, sources, whole
from . import micro
from .micro import SIZE, scores, values

TILE = 128  # tokens; every group divides it


class Form(NamedTuple):
    """What a kernel is made for: all of it is constant in the code."""

    d: int
    w: int  # query rows at once
    dense: int  # format of the exact tails
    bits: tuple[int, int] = (0, 0)  # of packed keys and values, 0: none
    group: tuple[int, int] = (0, 0)
    channel: tuple[bool, bool] = (False, False)  # whether groups run along tokens
    meta: tuple[int, int] = (0, 0)


@njit(inline="always")
def _numbers(scale, zero, numbers, factor, kind, size, out, gap):  # type: ignore[no-untyped-def]
    """S = factor * scale and Z = zero - S of so many numbers, Z `gap` bytes behind S."""
    even = numbers // 16 * 16
    for i in range(0, even, 16):
        big = mul(load_any(scale + i * size, kind), splat(np.float32(factor)))
        store(out + 4 * i, big)
        off = fma(big, splat(np.float32(-1.0)), load_any(zero + i * size, kind))
        store(out + gap + 4 * i, off)
    for i in range(even, numbers):
        one = load_one(scale + i * size, kind) * np.float32(factor)
        store_one(out + 4 * i, one)
        store_one(out + gap + 4 * i, load_one(zero + i * size, kind) - one)


@njit
def _soften(s, n, bound, softcap, bias, valid, top):  # type: ignore[no-untyped-def]
    """Turn a row's n logits into weights exp(logit - top'); returns (top', their sum).

    Lanes behind the last logit get weight 0. bound: logits that this row may see. bias, valid:
    addresses or 0. top: the largest logit so far, top' with these.
    """
    best = splat(np.float32(-np.inf))
    for j in range(0, n, 16):
        x = load(s + 4 * j)
        if softcap > 0.0:  # c * tanh(x / c) = c - 2 c / (exp(2 x / c) + 1)
            cap = np.float32(softcap)
            e = exp(mul(x, splat(np.float32(2.0) / cap)))
            x = add(splat(cap), div(splat(np.float32(-2.0) * cap), add(e, splat(np.float32(1.0)))))
        if bias != 0:
            x = add(x, load(bias + 4 * j))
        if valid != 0:
            x = seen(x, valid + j)
        if j + 16 > bound:
            x = first(x, bound - j)
        store(s + 4 * j, x)
        best = larger(best, x)
    new = max(top, largest(best))
    sub = splat(-new if new > np.float32(-np.inf) else np.float32(0.0))
    acc = splat(np.float32(0.0))
    for j in range(0, n, 16):
        p = exp(add(load(s + 4 * j), sub))
        store(s + 4 * j, p)
        acc = add(acc, p)
    return new, total(acc)


@njit
def _merge(parts, splits, rows, d, out, lse):  # type: ignore[no-untyped-def]
    """Merge the states of a head's stretches into out [rows, d] and lse [rows]."""
    size = 4 * (rows * d + 32 * rows)
    zero16 = splat(np.float32(0.0))
    for m in range(rows):
        its = parts + 4 * (rows * d + 32 * m)
        top, weights = np.float32(-np.inf), np.float32(0.0)
        for part in range(splits):
            top = max(top, load_one(its + part * size, 0))
        for c in range(0, d, 16):
            store(out + 4 * (m * d + c), zero16)
        if top > np.float32(-np.inf):
            for part in range(splits):
                weight = exp(splat(load_one(its + part * size, 0) - top))
                weights += load_one(its + part * size + 64, 0) * lane(weight)
                for c in range(0, d, 16):
                    place = out + 4 * (m * d + c)
                    x = load(parts + part * size + 4 * (m * d + c))
                    store(place, fma(x, weight, load(place)))
            for c in range(0, d, 16):
                place = out + 4 * (m * d + c)
                store(place, div(load(place), splat(weights)))
        store_one(lse + 4 * m, top + np.log(weights))


@cache
def kernel(form: Form) -> Any:
    """Compile the kernel of a form; see `cpu.attend` for how it is called."""
    d, w, dense = form.d, form.w, form.dense
    kbits, vbits = form.bits
    kgroup, vgroup = form.group
    kchannel, vchannel = form.channel
    kmeta, vmeta = form.meta
    kper, khigh = ATOM.get(kbits, (1, 1))
    vper, vhigh = ATOM.get(vbits, (1, 1))
    kblock = max(1, 16 // (w * kper))  # atoms of packed keys at once
    ktoken = 0 if kchannel else kgroup  # channels that share a scale
    vtoken = -1 if vchannel else vgroup
    kacross, vacross = d // max(kgroup, 1), d // max(vgroup, 1)
    kfactor, vfactor = 2.0**kbits, 2.0**vbits
    block = 16 // w  # exact keys at once
    msize, vsize = SIZE[kmeta], SIZE[vmeta]
    meta_gap = 4 * max(TILE + 8, 16) * max(1, d // 16)  # bytes of S, then Z
    srow = 4 * (TILE + 16)
    emitters = sources(lanes, micro, team)

    def attend(job):  # type: ignore[no-untyped-def]
        if emitters == 0:  # never: code on the disk belongs to the sources that emitted it
            return
        batch, hk, rows, t = whole(job, 1), whole(job, 2), whole(job, 3), whole(job, 4)
        n, causal, splits = whole(job, 5), whole(job, 6), whole(job, 7)
        scale, softcap = np.float32(real(job, 8)), np.float32(real(job, 9))
        q, out, lse, parts = whole(job, 10), whole(job, 11), whole(job, 12), whole(job, 13)
        left = whole(job, 50)  # where products are left
        done = job + 8 * 52  # of each head, how many stretches are
        padded = -(-rows // w) * w
        tiles = -(-n // TILE)
        tasks = batch * hk * splits
        pstate = 4 * (rows * d + 32 * rows)  # bytes of a task's state
        zero16, minus = splat(np.float32(0.0)), splat(np.float32(-1.0))
        room = padded * (2 * d + 32) + w * (d + 16) + 2 * (meta_gap // 4)
        scratch = np.empty(room + w * (srow // 4) + 16 * w + 16, np.float32)
        acc = (scratch.ctypes.data + 63) // 64 * 64
        qs = acc + 4 * padded * d  # queries times scale
        tops = qs + 4 * padded * d  # [padded] running maximum and sum, 16 floats apart
        folded = tops + 4 * padded * 32
        begin = folded + 4 * w * d
        s = begin + 4 * w * 16
        rest = s + w * srow  # weights of the last tokens of an unfinished atom
        meta = rest + 4 * 16 * w
        while True:
            task = count(job)
            if task >= tasks:
                break
            head, part = task // splits, task % splits
            b, h = head // hk, head % hk
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
            kcodes = whole(job, 20) + b * whole(job, 21) + h * whole(job, 22)
            kscale = whole(job, 24) + b * whole(job, 25) + h * whole(job, 26)
            kzero = whole(job, 27) + b * whole(job, 28) + h * whole(job, 29)
            ksealed, krow = whole(job, 30), whole(job, 23)
            ktail = whole(job, 31) + b * whole(job, 32) + h * whole(job, 33)
            ktrow = whole(job, 34)
            vcodes = whole(job, 35) + b * whole(job, 36) + h * whole(job, 37)
            vscale = whole(job, 39) + b * whole(job, 40) + h * whole(job, 41)
            vzero = whole(job, 42) + b * whole(job, 43) + h * whole(job, 44)
            vsealed, vrow = whole(job, 45), whole(job, 38)
            vtail = whole(job, 46) + b * whole(job, 47) + h * whole(job, 48)
            vtrow = whole(job, 49)
            last = min(n, (part + 1) * tiles // splits * TILE)
            for lo in range(part * tiles // splits * TILE, last, TILE):
                nt = min(TILE, n - lo)
                kn = min(max(ksealed - lo, 0), nt)  # packed keys of this tile
                vn = min(max(vsealed - lo, 0), nt)
                for m0 in range(0, padded, w):
                    qm = qs + 4 * m0 * d
                    for i in range(w):
                        store(begin + 64 * i, zero16)
                    # --- scores of packed keys
                    if kbits and kchannel:
                        for g in range(0, kn, kgroup):
                            at = (lo + g) // kgroup * d * msize
                            for i in range(w):
                                const = zero16
                                for c in range(0, d, 16):
                                    x = load(qm + 4 * (i * d + c))
                                    big = mul(
                                        load_any(kscale + at + c * msize, kmeta),
                                        splat(np.float32(kfactor)),
                                    )
                                    x_big = mul(x, big)
                                    store(folded + 4 * (i * d + c), x_big)
                                    # minus x_big as rounded: the 1 in 1 + c / 2^b cancels
                                    const = fma(x_big, minus, const)
                                    const = fma(x, load_any(kzero + at + c * msize, kmeta), const)
                                store(begin + 64 * i, const)
                            base = kcodes + (lo + g) // kper * khigh * krow
                            for a in range(0, kgroup // kper, kblock):
                                scores(
                                    folded, begin, base + a * khigh * krow, krow,
                                    s + 4 * (g + a * kper), srow, meta, meta_gap,
                                    d, w, kblock, kbits, dense, 0,
                                )  # fmt: skip
                        for i in range(w):
                            store(begin + 64 * i, zero16)
                    if kbits and not kchannel and kn > 0:
                        at = lo * kacross * msize
                        _numbers(
                            kscale + at, kzero + at, kn * kacross, kfactor, kmeta, msize, meta,
                            meta_gap,
                        )  # fmt: skip
                        base = kcodes + lo // kper * khigh * krow
                        atoms = -(-kn // kper)
                        even = atoms // kblock * kblock
                        for a in range(0, even, kblock):
                            scores(
                                qm, begin, base + a * khigh * krow, krow, s + 4 * a * kper, srow,
                                meta + 4 * a * kper * kacross, meta_gap,
                                d, w, kblock, kbits, dense, ktoken,
                            )  # fmt: skip
                        for a in range(even, atoms):
                            scores(
                                qm, begin, base + a * khigh * krow, krow, s + 4 * a * kper, srow,
                                meta + 4 * a * kper * kacross, meta_gap,
                                d, w, 1, kbits, dense, ktoken,
                            )  # fmt: skip
                    # --- scores of exact keys
                    base = ktail + (lo - ksealed) * ktrow
                    even = kn + (nt - kn) // block * block
                    for j in range(kn, even, block):
                        scores(
                            qm, begin, base + j * ktrow, ktrow, s + 4 * j, srow, meta, meta_gap,
                            d, w, block, 0, dense, 0,
                        )  # fmt: skip
                    for j in range(even, nt):
                        scores(
                            qm, begin, base + j * ktrow, ktrow, s + 4 * j, srow, meta, meta_gap,
                            d, w, 1, 0, dense, 0,
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
                        add_bias, is_valid = 0, 0
                        if whole(job, 14) != 0:
                            at_head = (h * rows + m) // t
                            add_bias = (
                                whole(job, 14)
                                + b * whole(job, 15)
                                + at_head * whole(job, 16)
                                + 4 * lo
                            )
                        if whole(job, 17) != 0:
                            is_valid = whole(job, 17) + b * whole(job, 18) + h * whole(job, 19) + lo
                        if left != 0:
                            to = left + (head * rows + m) * whole(job, 51) + 4 * lo
                            for j in range(0, nt, 16):
                                store(to + 4 * j, load(s + i * srow + 4 * j))
                        top = load_one(tops + 128 * m, 0)
                        new, more = _soften(
                            s + i * srow, nt, bound, softcap, add_bias, is_valid, top
                        )
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
                    to = acc + 4 * m0 * d
                    if vbits and vchannel:
                        for g in range(0, vn, vgroup):
                            at = (lo + g) // vgroup * d * vsize
                            _numbers(
                                vscale + at, vzero + at, d, vfactor, vmeta, vsize, meta, meta_gap
                            )
                            values(
                                s + 4 * g, srow, vcodes + (lo + g) // vper * vhigh * vrow, vrow,
                                vgroup // vper, to, meta, meta_gap,
                                d, w, vbits, dense, vtoken,
                            )  # fmt: skip
                    if vbits and not vchannel and vn > 0:
                        at = lo * vacross * vsize
                        _numbers(
                            vscale + at, vzero + at, vn * vacross, vfactor, vmeta, vsize, meta,
                            meta_gap,
                        )  # fmt: skip
                        base = vcodes + lo // vper * vhigh * vrow
                        full = vn // vper
                        values(
                            s, srow, base, vrow, full, to, meta, meta_gap,
                            d, w, vbits, dense, vtoken,
                        )  # fmt: skip
                        if full * vper < vn:  # the atom's other tokens are exact or not there
                            past = full * vper
                            for i in range(w):
                                for j in range(vper):
                                    x = np.float32(0.0)
                                    if past + j < vn:
                                        x = load_one(s + i * srow + 4 * (past + j), 0)
                                    store_one(rest + 64 * i + 4 * j, x)
                            for j in range(vn * vacross, (past + vper) * vacross):
                                store_one(meta + 4 * j, np.float32(0.0))
                                store_one(meta + meta_gap + 4 * j, np.float32(0.0))
                            values(
                                rest, 64, base + full * vhigh * vrow, vrow, 1, to,
                                meta + 4 * past * vacross, meta_gap,
                                d, w, vbits, dense, vtoken,
                            )  # fmt: skip
                    values(
                        s + 4 * vn, srow, vtail + (lo + vn - vsealed) * vtrow, vtrow, nt - vn, to,
                        meta, meta_gap, d, w, 0, dense, 0,
                    )  # fmt: skip
            # --- this stretch's state: out not yet divided, maximum and sum
            to = parts + task * pstate
            for i in range(0, rows * d, 16):
                store(to + 4 * i, load(acc + 4 * i))
            for i in range(0, rows * 32, 16):
                store(to + 4 * (rows * d + i), load(tops + 4 * i))
            if count(done + 8 * head) + 1 == splits:  # the last stretch of this head merges all
                _merge(
                    parts + head * splits * pstate, splits, rows, d,
                    out + 4 * head * rows * d, lse + 4 * head * rows,
                )  # fmt: skip

    return Kernel(attend, f"attend {form}")
