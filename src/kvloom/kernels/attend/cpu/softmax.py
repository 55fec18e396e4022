"""Steps between the inner loops of decode attention: scales and zeros, the softmax, the merge.

All by address; who calls them owns what is there. Decides neither formats nor order.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from ...simd import (
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


@njit(inline="always")
def numbers(scale, zero, count, factor, offset, kind, size, out, gap):  # type: ignore[no-untyped-def]
    """S = factor * scale and Z = zero + offset * S of so many numbers, Z `gap` bytes behind S."""
    even = count // 16 * 16
    for i in range(0, even, 16):
        big = mul(load_any(scale + i * size, kind), splat(np.float32(factor)))
        store(out + 4 * i, big)
        off = fma(big, splat(np.float32(offset)), load_any(zero + i * size, kind))
        store(out + gap + 4 * i, off)
    for i in range(even, count):
        one = load_one(scale + i * size, kind) * np.float32(factor)
        store_one(out + 4 * i, one)
        more = one * np.float32(offset)
        store_one(out + gap + 4 * i, load_one(zero + i * size, kind) + more)


@njit(inline="always")
def sizes(scale, count, kind, size, out):  # type: ignore[no-untyped-def]
    """So many scales where there is no zero."""
    even = count // 16 * 16
    for i in range(0, even, 16):
        store(out + 4 * i, load_any(scale + i * size, kind))
    for i in range(even, count):
        store_one(out + 4 * i, load_one(scale + i * size, kind))


@njit(inline="always")
def clear(out, gap, begin, end):  # type: ignore[no-untyped-def]
    """S = Z = 0 from one number to another."""
    for j in range(begin, end):
        store_one(out + 4 * j, np.float32(0.0))
        store_one(out + gap + 4 * j, np.float32(0.0))


@njit
def soften(s, n, bound, softcap, bias, valid, top):  # type: ignore[no-untyped-def]
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
def merge(parts, splits, rows, sets, d, out, lse):  # type: ignore[no-untyped-def]
    """Merge the states of a head's stretches into out [sets, rows, d] and lse [rows]."""
    size = 4 * (sets * rows * d + 32 * rows)
    zero16 = splat(np.float32(0.0))
    for i in range(0, sets * rows * d, 16):
        store(out + 4 * i, zero16)
    for m in range(rows):
        its = parts + 4 * (sets * rows * d + 32 * m)
        top, weights = np.float32(-np.inf), np.float32(0.0)
        for part in range(splits):
            top = max(top, load_one(its + part * size, 0))
        if top > np.float32(-np.inf):
            for part in range(splits):
                weight = exp(splat(load_one(its + part * size, 0) - top))
                weights += load_one(its + part * size + 64, 0) * lane(weight)
                for i in range(sets):
                    for c in range(0, d, 16):
                        at = 4 * ((i * rows + m) * d + c)
                        x = load(parts + part * size + at)
                        store(out + at, fma(x, weight, load(out + at)))
            for i in range(sets):
                for c in range(0, d, 16):
                    at = out + 4 * ((i * rows + m) * d + c)
                    store(at, div(load(at), splat(weights)))
        store_one(lse + 4 * m, top + np.log(weights))
