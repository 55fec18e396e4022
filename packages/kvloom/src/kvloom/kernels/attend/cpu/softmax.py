"""Steps that both attention kernels share: the running softmax, and the merge.

Everything is read and written by address; callers own the memory. Decides neither formats nor which
tokens are read. Importing this imports Numba.

State of a task: sums of values fp32 [sets, rows, d], then per row its maximum and its sum of
weights, 16 numbers apart. Packed values of rotated or divided formats have a set of their own.
"""

from __future__ import annotations

import numpy as np

from ...cpu_runtime import count, head_address, kernel_step
from ...simd import (
    exp,
    first_lane,
    first_lanes,
    fma,
    load,
    load_one,
    masked_lanes,
    max_lanes,
    maximum,
    splat,
    store,
    store_one,
    sum_lanes,
)


@kernel_step
def start_task(a, head, part, padded, sets, d, own_queries, sums, queries, packed_queries, maxima):  # type: ignore[no-untyped-def]
    """Clear sums and maxima, and write queries times scale, zeros after the last row.

    a: the kernel's arguments. own_queries: whether packed keys have queries of their own,
    packed_queries: those of the arguments, or `query_rotation` applied to the others. The softmax
    of part 0 begins with the logit of the attention sink, if there are sinks.
    """
    zero16, scale = splat(np.float32(0.0)), splat(np.float32(a.scale))
    numbers = a.rows * d
    skip = 4 * head * numbers
    for i in range(0, sets * padded * d, 16):
        store(sums + 4 * i, zero16)
    for i in range(0, padded * d, 16):
        inside = i < numbers
        store(queries + 4 * i, load(a.q + skip + 4 * i) * scale if inside else zero16)
        if own_queries:
            store(
                packed_queries + 4 * i,
                load(a.q_packed + skip + 4 * i) * scale if inside else zero16,
            )
    if own_queries and a.query_rotation != 0:
        for m in range(a.rows):
            for i in range(0, d, 16):
                store(packed_queries + 4 * (m * d + i), zero16)
            add_rotated(queries + 4 * m * d, a.query_rotation, d, packed_queries + 4 * m * d)
    for m in range(padded):
        top, weight = np.float32(-np.inf), np.float32(0.0)
        if a.sink_logits != 0 and part == 0 and m < a.rows:
            query_head = (head % a.heads * a.rows + m) // a.queries
            top, weight = load_one(a.sink_logits + 4 * query_head, 0), np.float32(1.0)
        store_one(maxima + 128 * m, top)
        store_one(maxima + 128 * m + 64, weight)


@kernel_step
def add_rotated(x, rotation, d, out):  # type: ignore[no-untyped-def]
    """Add x [d] times a matrix [d, d] to out [d]."""
    for i in range(0, d, 16):
        sums = load(out + 4 * i)
        for j in range(d):
            sums = fma(load(rotation + 4 * (j * d + i)), splat(load_one(x + 4 * j, 0)), sums)
        store(out + 4 * i, sums)


@kernel_step
def softmax_tile(  # type: ignore[no-untyped-def]
    a, b, h, at_token, nt, remaining, first_row, count, s, s_row, maxima, sums, set_bytes, sets, d
):  # fmt: skip
    """Turn logits of a tile into weights, and rescale earlier sums to the new maxima.

    a: the kernel's arguments. s: logits of `count` rows, from number first_row of head h on, to nt
    tokens; the first has number at_token in masks and logits. remaining: tokens from it to the last
    of the step, which queries do not see beyond themselves. Logits are written to the caller's
    first, if it wants them. maxima: each row's maximum, with its sum of weights 64 bytes behind.
    sums: those of all rows, of the first set; those of the other follow after set_bytes.
    """
    rows, t = a.rows, a.queries
    for i in range(count):
        m, row = first_row + i, s + i * s_row
        if m >= rows:
            for j in range(0, nt, 16):
                store(row + 4 * j, splat(np.float32(0.0)))
            continue
        bound = nt
        if a.causal:
            bound = min(nt, max(0, remaining - t + m % t + 1))
        if a.logits != 0:
            target = a.logits + ((b * a.heads + h) * rows + m) * a.logits_row + 4 * at_token
            for j in range(0, nt, 16):
                store(target + 4 * j, load(row + 4 * j))
        bias, visible = 0, 0
        if a.bias.address != 0:
            bias = head_address(a.bias, b, (h * rows + m) // t) + 4 * at_token
        if a.visible.address != 0:
            visible = head_address(a.visible, b, h) + at_token
        top = maxima + 128 * m
        best = load_one(top, 0)
        new, weight_sum = exp_logits(row, nt, bound, np.float32(a.softcap), bias, visible, best)
        if new > best:
            shrink = exp(splat(best - new))
            for k in range(sets):
                for c in range(0, d, 16):
                    x = sums + k * set_bytes + 4 * (m * d + c)
                    store(x, load(x) * shrink)
            weight_sum += load_one(top + 64, 0) * first_lane(shrink)
        else:
            weight_sum += load_one(top + 64, 0)
        store_one(top, new)
        store_one(top + 64, weight_sum)


@kernel_step
def finish_task(a, finished, task, task_sums, maxima, padded, sets, d):  # type: ignore[no-untyped-def]
    """Write a task's state: sums not yet divided, maxima and sums of weights.

    a: the kernel's arguments. finished: address of the number of finished tasks of each head. The
    last task of a head merges the states of all, and adds both sets if packed sums are rotated.
    """
    rows, splits, head = a.rows, a.splits, task // a.splits
    size = 4 * (sets * rows * d + 32 * rows)
    state = a.states + task * size
    for k in range(sets):
        for i in range(0, rows * d, 16):
            target = state + 4 * (k * rows * d + i)
            store(target, load(task_sums + 4 * (k * padded * d + i)))
    for i in range(0, rows * 32, 16):
        store(state + 4 * (sets * rows * d + i), load(maxima + 4 * i))
    if count(finished + 8 * head) + 1 == splits:
        sums = a.out + 4 * head * sets * rows * d
        merge(a.states + head * splits * size, splits, rows, sets, d, sums, a.lse + 4 * head * rows)
        if a.value_rotation != 0:
            for m in range(rows):
                target = a.rotated_out + 4 * (head * rows + m) * d
                for i in range(0, d, 16):
                    store(target + 4 * i, load(sums + 4 * (m * d + i)))
                add_rotated(sums + 4 * (rows + m) * d, a.value_rotation, d, target)


@kernel_step
def exp_logits(s, n, bound, softcap, bias, visible, top):  # type: ignore[no-untyped-def]
    """Turn a row's n logits into weights exp(logit - top'); return (top', their sum).

    Lanes after the last logit get weight 0. bound: how many logits this row sees. bias, visible:
    addresses or 0. top: the largest logit so far; top' includes these logits, and NaN as infinity,
    so that the state of a row with NaN is never that of a row that sees nothing.
    """
    best = splat(np.float32(-np.inf))
    for j in range(0, n, 16):
        x = load(s + 4 * j)
        if softcap > 0.0:  # c * tanh(x / c) = c - 2 c / (exp(2 x / c) + 1)
            cap = np.float32(softcap)
            e = exp(x * splat(np.float32(2.0) / cap))
            x = splat(cap) + splat(np.float32(-2.0) * cap) / (e + splat(np.float32(1.0)))
        if bias != 0:
            x = x + load(bias + 4 * j)
        if visible != 0:
            x = masked_lanes(x, visible + j)
        if j + 16 > bound:
            x = first_lanes(x, bound - j)
        store(s + 4 * j, x)
        best = maximum(best, x)
    new = max(top, max_lanes(best))
    sub = splat(-new if new > np.float32(-np.inf) else np.float32(0.0))
    weights = splat(np.float32(0.0))
    for j in range(0, n, 16):
        p = exp(load(s + 4 * j) + sub)
        store(s + 4 * j, p)
        weights = weights + p
    total = sum_lanes(weights)
    return (np.float32(np.inf) if np.isnan(total) else new), total


@kernel_step
def merge(parts, splits, rows, sets, d, out, lse):  # type: ignore[no-untyped-def]
    """Merge the states of a head's tasks into out [sets, rows, d] and lse [rows]."""
    size = 4 * (sets * rows * d + 32 * rows)
    zero16 = splat(np.float32(0.0))
    for i in range(0, sets * rows * d, 16):
        store(out + 4 * i, zero16)
    for m in range(rows):
        row_state = parts + 4 * (sets * rows * d + 32 * m)
        top, weights = np.float32(-np.inf), np.float32(0.0)
        for part in range(splits):
            top = max(top, load_one(row_state + part * size, 0))
        if top > np.float32(-np.inf):
            for part in range(splits):
                weight = exp(splat(load_one(row_state + part * size, 0) - top))
                weights += load_one(row_state + part * size + 64, 0) * first_lane(weight)
                for i in range(sets):
                    for c in range(0, d, 16):
                        offset = 4 * ((i * rows + m) * d + c)
                        x = load(parts + part * size + offset)
                        store(out + offset, fma(x, weight, load(out + offset)))
            for i in range(sets):
                for c in range(0, d, 16):
                    offset = out + 4 * ((i * rows + m) * d + c)
                    store(offset, load(offset) / splat(weights))
        store_one(lse + 4 * m, top + np.log(weights))
