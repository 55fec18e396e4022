"""Triton: attention mass per key, in two passes over tiles of logits.

For rows i of one query head and keys j, with s the scaled logits, in this order: softcap, bias,
noise, 1 / tau, masks.

`row_lse`: lse_i = log sum_j exp(s_ij). A program owns ROWS query rows of a head and walks the keys.
`column_mass`: mass_j = sum_i exp(s_ij - lse_i), or its largest term. A program owns KEYS keys of a
query head and walks the rows that see them. Nothing of the size T x N is stored.

`step_logits` and `step_mass` do the same for a step of few queries, whose logits are small beside
the keys: a program owns KEYS keys of a key/value head, reads them once for all query rows of the
group, and keeps the logits and each row's (maximum, sum); then masses follow from the logits.

A row that sees nothing has lse -inf, and gives no key anything. Reference: `reference.column_mass`;
tolerance: relative 1e-4.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Do not compile again for what changes from step to step.
_VARY = [
    "seed", "first", "t", "n", "nonpadding_row",
    "visible_row", "visible_head", "bias_row", "bias_head", "number_row", "number_head",
]  # fmt: skip


@triton.jit
def hashed(x):
    """Apply the finalizer of MurmurHash3 to uint32 (see `noise`)."""
    x ^= x >> 16
    x *= 0x85EBCA6B
    x ^= x >> 13
    x *= 0xC2B2AE35
    return x ^ (x >> 16)


@triton.jit
def gumbel(seed, head, query, key, FIXED: tl.constexpr):
    """Draw noise of query heads, queries and keys, uint32 that broadcast, fp32."""
    state = hashed(seed + head * tl.full(head.shape, 0x9E3779B1, tl.uint32))
    if not FIXED:
        state = hashed(state + query * tl.full(query.shape, 0x85EBCA77, tl.uint32))
    state = hashed(state + key * tl.full(key.shape, 0xC2B2AE3D, tl.uint32)) & 0xFFFFFF
    u = (state.to(tl.float32) + 0.5) * 5.9604644775390625e-08
    return -tl.log(-tl.log(tl.minimum(u, 0.99999994)))


@triton.jit
def load_rows(x, i, count, step, channel, D):
    """Load the rows i of a head's `count` queries or keys, channels side by side."""
    mask = (i < count)[:, None] & (channel < D)[None, :]
    return tl.load(x + i.to(tl.int64)[:, None] * step + channel[None, :], mask=mask, other=0.0)


@triton.jit
def masked_logits(
    queries, keys, scale, head, query, token, bias, bias_head, numbers, first, seed, softcap,
    inverse_tau, visible, n, back, CHANGES: tl.constexpr,
):  # fmt: skip
    """Return logits [ROWS, KEYS] after softcap, bias, noise, temperature and masks.

    queries: [ROWS, DB]. keys: [KEYS, DB]. head, query: [ROWS], of the rows; token: [KEYS]. bias,
    numbers, visible: where those of the batch row (and key/value head) begin. back: keys before
    the first query, N - T.
    """
    inside = token < n
    s = tl.dot(queries, tl.trans(keys), input_precision="ieee") * scale
    if CHANGES.softcap:  # tanh(x) = 1 - 2 / (exp(2 x) + 1)
        s = softcap - 2.0 * softcap / (tl.exp(s * (2.0 / softcap)) + 1.0)
    if CHANGES.bias:
        ptrs = bias + head.to(tl.int64)[:, None] * bias_head + token[None, :]
        s += tl.load(ptrs, mask=(inside & (token >= 0))[None, :] & (head >= 0)[:, None], other=0.0)
    if CHANGES.noise == 1:
        key = tl.load(numbers + token, mask=inside, other=0).to(tl.uint32)
        s += gumbel(
            tl.full([1, 1], seed, tl.int32).to(tl.uint32), head.to(tl.uint32)[:, None],
            (first + query).to(tl.uint32)[:, None], key[None, :], CHANGES.fixed,
        )  # fmt: skip
    if CHANGES.noise == 2:
        s += 0.5772156649015329
    s *= inverse_tau
    after = token[None, :] - (back + query)[:, None]  # 0 for the query's own key
    mask = tl.broadcast_to(inside[None, :], s.shape)
    if CHANGES.causal:
        mask = mask & (after <= 0)
    if CHANGES.visible:
        mask = mask & (tl.load(visible + token, mask=inside, other=0) != 0)[None, :]
    return tl.where(mask, s, float("-inf"))


@triton.jit(do_not_specialize=_VARY)
def row_lse(
    q, k, visible, bias, numbers, lse, scale, softcap, inverse_tau, seed, first,
    hq, r, t, n, D,
    q_row, q_head, q_token, k_row, k_head, k_token, visible_row, visible_head, bias_row, bias_head,
    number_row, number_head,
    DB: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, CHANGES: tl.constexpr,
):  # fmt: skip
    """Write the log-sum-exp of ROWS rows, lse [B, Hq, T]. Grid: (blocks of rows, batch x head)."""
    line = tl.program_id(1).to(tl.int64)
    row, head = line // hq, line % hq
    i = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    channel = tl.arange(0, DB)
    queries = load_rows(q + row * q_row + head * q_head, i, t, q_token, channel, D)
    k += row * k_row + head // r * k_head
    bias += row * bias_row
    numbers += row * number_row + head // r * number_head
    visible += row * visible_row + head // r * visible_head
    heads = tl.zeros([ROWS], tl.int32) + head.to(tl.int32)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    end = n
    if CHANGES.causal:
        end = tl.minimum(n, n - t + (tl.program_id(0) + 1) * ROWS)
    for lo in range(0, end, KEYS):
        j = lo + tl.arange(0, KEYS)
        s = masked_logits(
            queries, load_rows(k, j, n, k_token, channel, D), scale, heads, i, j, bias, bias_head,
            numbers, first, seed, softcap, inverse_tau, visible, n, n - t, CHANGES,
        )  # fmt: skip
        new = tl.maximum(top, tl.max(s, axis=1))
        base = tl.where(new == float("-inf"), 0.0, new)
        total = total * tl.exp(top - base) + tl.sum(tl.exp(s - base[:, None]), axis=1)
        top = new
    log_sums = tl.where(total > 0, top + tl.log(tl.where(total > 0, total, 1.0)), float("-inf"))
    tl.store(lse + line * t + i, log_sums, mask=i < t)


@triton.jit(do_not_specialize=_VARY)
def column_mass(
    q, k, visible, bias, numbers, lse, visible_queries, mass, scale, softcap, inverse_tau, seed,
    first, hq, r, t, n, D,
    q_row, q_head, q_token, k_row, k_head, k_token, visible_row, visible_head, bias_row, bias_head,
    number_row, number_head, nonpadding_row,
    DB: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, CHANGES: tl.constexpr,
    HAS_PADDING: tl.constexpr, REDUCE_MAX: tl.constexpr,
):  # fmt: skip
    """Write the mass of KEYS keys, mass [B, Hq, N]. Grid: (blocks of keys, batch x query head)."""
    line = tl.program_id(1).to(tl.int64)
    row, head = line // hq, line % hq
    j = tl.program_id(0) * KEYS + tl.arange(0, KEYS)
    channel = tl.arange(0, DB)
    keys = load_rows(k + row * k_row + head // r * k_head, j, n, k_token, channel, D)
    q += row * q_row + head * q_head
    bias += row * bias_row
    numbers += row * number_row + head // r * number_head
    visible += row * visible_row + head // r * visible_head
    heads = tl.zeros([ROWS], tl.int32) + head.to(tl.int32)
    masses = tl.zeros([KEYS], tl.float32)
    begin = 0
    if CHANGES.causal:
        begin = tl.maximum(0, tl.program_id(0) * KEYS - (n - t)) // ROWS * ROWS
    for lo in range(begin, t, ROWS):
        i = lo + tl.arange(0, ROWS)
        s = masked_logits(
            load_rows(q, i, t, q_token, channel, D), keys, scale, heads, i, j, bias, bias_head,
            numbers, first, seed, softcap, inverse_tau, visible, n, n - t, CHANGES,
        )  # fmt: skip
        counts = i < t
        if HAS_PADDING:
            counts = counts & (
                tl.load(visible_queries + row * nonpadding_row + i, mask=i < t, other=0) != 0
            )
        base = tl.load(lse + line * t + i, mask=counts, other=float("inf"))
        base = tl.where(base == float("-inf"), float("inf"), base)  # a row that sees nothing
        weights = tl.exp(s - base[:, None])
        if REDUCE_MAX:
            masses = tl.maximum(masses, tl.max(weights, axis=0))
        else:
            masses += tl.sum(weights, axis=0)
    tl.store(mass + line * n + j, masses, mask=j < n)


@triton.jit(do_not_specialize=_VARY)
def step_logits(
    q, k, visible, bias, numbers, logits, parts, scale, softcap, inverse_tau, seed, first,
    hk, r, t, n, D,
    q_row, q_head, q_token, k_row, k_head, k_token, visible_row, visible_head, bias_row, bias_head,
    number_row, number_head,
    DB: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, CHANGES: tl.constexpr,
):  # fmt: skip
    """Write logits [B, Hk, R * T, N] of KEYS keys, and log-sum-exp, parts [B, Hk, R * T, blocks].

    Grid: (blocks of keys, batch row and key/value head). All rows of the group are one tile.
    """
    line = tl.program_id(1).to(tl.int64)
    row, head = line // hk, line % hk
    rows = r * t
    row_in_group = tl.arange(0, ROWS)
    group, i = row_in_group // t, row_in_group % t
    j = tl.program_id(0) * KEYS + tl.arange(0, KEYS)
    channel = tl.arange(0, DB)
    heads = (head * r).to(tl.int32) + group
    offset = (
        row * q_row + heads.to(tl.int64)[:, None] * q_head + i[:, None] * q_token + channel[None, :]
    )
    mask = (row_in_group < rows)[:, None] & (channel < D)[None, :]
    queries = tl.load(q + offset, mask=mask, other=0.0)
    keys = load_rows(k + row * k_row + head * k_head, j, n, k_token, channel, D)
    heads = tl.where(row_in_group < rows, heads, -1)
    s = masked_logits(
        queries, keys, scale, heads, i, j, bias + row * bias_row, bias_head,
        numbers + row * number_row + head * number_head, first, seed, softcap, inverse_tau,
        visible + row * visible_row + head * visible_head, n, n - t, CHANGES,
    )  # fmt: skip
    offset = (line * rows + row_in_group)[:, None] * n + j[None, :]
    tl.store(logits + offset, s, mask=(row_in_group < rows)[:, None] & (j < n)[None, :])
    top = tl.max(s, axis=1)
    base = tl.where(top == float("-inf"), 0.0, top)
    total = tl.sum(tl.exp(s - base[:, None]), axis=1)
    part = tl.where(total > 0, base + tl.log(tl.where(total > 0, total, 1.0)), float("-inf"))
    offset = (line * rows + row_in_group) * tl.num_programs(0) + tl.program_id(0)
    tl.store(parts + offset, part, mask=row_in_group < rows)


@triton.jit(do_not_specialize=_VARY)
def step_mass(
    logits, lse, visible_queries, mass, hq, t, n, nonpadding_row,
    KEYS: tl.constexpr, HAS_PADDING: tl.constexpr, REDUCE_MAX: tl.constexpr,
):  # fmt: skip
    """Write the mass of KEYS keys, mass [B, Hq, N]. Grid: (blocks of keys, batch x query head).

    logits: [B, Hq, T, N]; lse: [B, Hq, T].
    """
    line = tl.program_id(1).to(tl.int64)
    j = tl.program_id(0) * KEYS + tl.arange(0, KEYS)
    masses = tl.zeros([KEYS], tl.float32)
    for i in range(t):
        base = tl.load(lse + line * t + i)
        base = tl.where(base == float("-inf"), float("inf"), base)
        if HAS_PADDING:
            counts = tl.load(visible_queries + line // hq * nonpadding_row + i) != 0
            base = tl.where(counts, base, float("inf"))
        s = tl.load(logits + (line * t + i) * n + j, mask=j < n, other=float("-inf"))
        weights = tl.exp(s - base)
        masses = tl.maximum(masses, weights) if REDUCE_MAX else masses + weights
    tl.store(mass + line * n + j, masses, mask=j < n)
