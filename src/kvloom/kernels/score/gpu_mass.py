"""Triton: attention mass per key, in two passes over tiles of logits.

For rows i of one query head and keys j, with s the scaled logits, in this order: softcap, bias,
noise, 1 / tau, masks.

`row_lse`: lse_i = log sum_j exp(s_ij). A program owns ROWS query rows of a head and walks the keys.
`column_mass`: mass_j = sum_i exp(s_ij - lse_i). A program owns KEYS keys of a query head and walks
the rows that see them. Nothing of the size T x N is stored.

`step_logits` and `step_mass` do the same for a step of few queries, whose logits are small beside
the keys: a program owns KEYS keys of a key/value head, reads them once for all query rows of the
group, and keeps the logits and each row's (maximum, sum); then masses follow from the logits.

A row that sees nothing has lse -inf, and gives no key anything. Reference: `ref.column_mass`;
tolerance: relative 1e-4.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def hashed(x):
    """The finalizer of MurmurHash3 on uint32 (see `noise`)."""
    x ^= x >> 16
    x *= 0x85EBCA6B
    x ^= x >> 13
    x *= 0xC2B2AE35
    return x ^ (x >> 16)


@triton.jit
def gumbel(seed, head, query, key, FIXED: tl.constexpr):
    """Noise of query heads, queries and keys by number, int32 that broadcast, fp32."""
    state = hashed((seed + head * 0x9E3779B1).to(tl.uint32))
    if not FIXED:
        state = hashed(state + query.to(tl.uint32) * 0x85EBCA77)
    state = hashed(state + key.to(tl.uint32) * 0xC2B2AE3D) & 0xFFFFFF
    u = tl.minimum((state.to(tl.float32) + 0.5) * 5.9604644775390625e-08, 0.99999994)
    return -tl.log(-tl.log(u))


@triton.jit
def shaped(
    s, head, query, token, bias, noise_keys, first, seed, softcap, over_tau, inside,
    SOFTCAP: tl.constexpr, BIAS: tl.constexpr, NOISE: tl.constexpr, FIXED: tl.constexpr,
):  # fmt: skip
    """Scaled logits [ROWS, KEYS] with softcap, bias, noise and temperature.

    head, query: int32 [ROWS, 1], of the rows. token: [1, KEYS]. bias: where it begins for each row
    [ROWS, 1]; noise_keys: where the keys' numbers begin. inside: which tokens there are.
    """
    if SOFTCAP:  # tanh(x) = 2 sigmoid(2 x) - 1
        s = softcap * (2.0 * tl.sigmoid(2.0 * s / softcap) - 1.0)
    if BIAS:
        s += tl.load(bias + token, mask=inside & (bias == bias), other=0.0)
    if NOISE == 1:
        number = tl.load(noise_keys + token, mask=inside, other=0).to(tl.int32)
        s += gumbel(seed, head, first + query, number, FIXED)
    if NOISE == 2:
        s += 0.5772156649015329
    return s * over_tau
