"""Attention to packed tokens on the CPU, a tile at a time, compiled by Numba.

A format gives a *reader*: a compiled function that writes some tokens of a head to memory as fp32.
The kernel multiplies them with all queries of the head and keeps a running softmax, so no more than
a tile is ever unpacked.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from numba import njit
from torch import Tensor

from kvloom.kernels import AttentionState

TILE = 128
"""Tokens that are read at a time."""
MAX_QUERIES = 8
"""Of a step: for more, unpacked tokens are faster."""
_POOL = ThreadPoolExecutor(thread_name_prefix="kvloom-formats")


class Side(NamedTuple):
    """Keys or values as the kernel reads them.

    read: compiled; read(arrays, head, begin, count, out) writes tokens to out, fp32 [count, D].
    arrays: NumPy arrays, the first dimension of each is batch rows times key/value heads.
    skip: Tokens of the arrays that stand before those to attend to.
    """

    read: Callable[..., None]
    arrays: tuple[np.ndarray, ...]
    skip: int = 0


def problems(q: Tensor, bias: Tensor | None, softcap: float | None) -> list[str]:
    """Return why the kernel does not attend q [B, Hq, T, D] to tokens; empty if it does."""
    refused = {
        f"queries are on {q.device.type}": not q.is_cpu,
        f"more than {MAX_QUERIES} queries a step": q.shape[2] > MAX_QUERIES,
        "it adds no bias to the logits": bias is not None,
        "it has no softcap": softcap is not None,
    }
    return [reason for reason, holds in refused.items() if holds]


def heads_first(x: Tensor) -> np.ndarray:
    """Return x [B, Hk, ...] as an array [B * Hk, ...]; numbers in fp32, codes as they are."""
    x = x if x.dtype == torch.uint8 else x.float()
    return x.detach().contiguous().flatten(0, 1).numpy()


@njit(nogil=True, fastmath=True, cache=True)
def read_exact(arrays, head, begin, count, out):
    """Write exact tokens; arrays: fp32 [heads, N, D]."""
    out[:count] = arrays[0][head, begin : begin + count]


def exact(x: Tensor) -> Side:
    """Return exact tokens [B, Hk, N, D] as the kernel reads them."""
    return Side(read_exact, (heads_first(x),))


def in_threads(count: int, run: Callable[[int, int], None]) -> None:
    """Call run(first, last) for parts of range(count), on as many threads as torch uses."""
    threads = min(count, torch.get_num_threads())
    ends = [i * count // threads for i in range(threads + 1)]
    others = [_POOL.submit(run, *ends[i : i + 2]) for i in range(1, threads)]
    run(0, ends[1])
    for other in others:
        other.result()


def attend(
    q: Tensor, tokens: int, keys: Side, values: Side, scale: float, visible: Tensor | None = None
) -> AttentionState:
    """Attend q fp32 [B, Hq, T, D] to `tokens` tokens; visible: bool [B, 1 or Hk, tokens]."""
    b, hq, t, d = q.shape
    heads = len(keys.arrays[0])
    rows = (q * scale).reshape(heads, -1, d).contiguous().numpy()
    mask = np.ones((1, 1), np.bool_)  # one number for all tokens
    if visible is not None:
        mask = visible.expand(b, heads // b, tokens).reshape(heads, tokens).contiguous().numpy()
    out, lse = np.empty_like(rows), np.empty(rows.shape[:2], np.float32)
    kernel = _kernel(keys.read, values.read)
    stored = keys.arrays, keys.skip, values.arrays, values.skip

    def run(first: int, last: int) -> None:
        kernel(first, last, tokens, rows, *stored, mask, out, lse)

    in_threads(heads, run)
    return AttentionState(
        torch.from_numpy(out).view(b, hq, t, d), torch.from_numpy(lse).view(b, hq, t)
    )


@cache
def _kernel(read_keys: Any, read_values: Any) -> Any:
    """Compile the kernel for a reader of keys and one of values."""

    @njit(nogil=True, fastmath={"reassoc", "contract", "nsz", "arcp"})
    def kernel(first, last, tokens, q, keys, key_skip, values, value_skip, mask, out, lse):
        rows, d = q.shape[1:]
        k, v = np.empty((TILE, d), np.float32), np.empty((TILE, d), np.float32)
        weights = np.empty((rows, TILE), np.float32)
        top, total = np.empty(rows, np.float32), np.empty(rows, np.float32)
        for head in range(first, last):
            top[:], total[:], out[head] = -np.inf, 0.0, 0.0
            for begin in range(0, tokens, TILE):
                count = min(TILE, tokens - begin)
                read_keys(keys, head, key_skip + begin, count, k)
                read_values(values, head, value_skip + begin, count, v)
                for r in range(rows):
                    highest = top[r]
                    for t in range(count):
                        product = np.float32(0.0)
                        for c in range(d):
                            product += q[head, r, c] * k[t, c]
                        if mask.size > 1 and not mask[head, begin + t]:
                            product = np.float32(-np.inf)
                        weights[r, t] = product
                        highest = max(highest, product)
                    if highest == -np.inf:
                        continue
                    shrink = np.exp(top[r] - highest)
                    top[r] = highest
                    total[r] *= shrink
                    for c in range(d):
                        out[head, r, c] *= shrink
                    for t in range(count):
                        weight = np.exp(weights[r, t] - highest)
                        total[r] += weight
                        for c in range(d):
                            out[head, r, c] += weight * v[t, c]
            for r in range(rows):
                lse[head, r] = top[r] + np.log(total[r]) if total[r] > 0 else -np.inf
                for c in range(d):
                    out[head, r, c] /= total[r] if total[r] > 0 else np.float32(1.0)

    return kernel
