"""Decode attention on CPU tensors: which cases the compiled kernels cover, and their call.

A step of few queries attends to a packed prefix and an exact tail in one pass; `decode_kernel` does
it, `coverage` names the formats. Importing this does not import Numba; the first call does.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...arguments import address, padded, strides
from ..kv_view import KVView
from ..reference import State
from . import coverage
from .arguments import (
    DECODE,
    NUMBERS_PER_THREAD,
    contiguous_positions,
    from_packed_space,
    rope_of,
    side,
    to_packed_space,
)

MAX_QUERIES = 8  # per step: with more, reading keys no longer dominates


def problems(tokens: int, like: Tensor, keys: Any = None, values: Any = None) -> list[str]:
    """Return why no kernel attends so many queries a step to tokens in these formats.

    like: exact keys [B, Hk, N, D]. keys, values: formats of packed tokens, or None.
    """
    _, heads, _, d = like.shape
    found = list(coverage.problems(d, heads, like.dtype, keys, values))
    if not like.is_cpu:
        found.append(f"the tensors are on {like.device.type}")
    if tokens > MAX_QUERIES:
        found.append(f"more than {MAX_QUERIES} queries a step")
    return found


def load(q: Tensor, keys: KVView, values: KVView) -> None:
    """Compile the kernel for a case."""
    hk = keys.tail.shape[1]
    _kernel(q.shape[3], hk, q.shape[1] // hk * q.shape[2], keys, values)


def _kernel(d: int, hk: int, rows: int, keys: KVView, values: KVView) -> tuple[Any, int]:
    """Return the kernel for a case and the tokens of its tiles."""
    rope, key_format = rope_of(keys)
    return coverage.kernel(d, hk, rows, keys.tail.dtype, rope, key_format, values.fmt)


def attend(
    q: Tensor,
    keys: KVView,
    values: KVView,
    scale: float,
    *,
    causal: bool = False,
    valid: Tensor | None = None,
    softcap: float | None = None,
    bias: Tensor | None = None,
    products: list[Tensor] | None = None,
) -> State:
    """Attend q [B, Hq, T, D] as `reference.attend` does to the N tokens of two views.

    Packed tokens are not rounded to the dtype of the exact ones. products: a list to which
    scale * q @ k is appended, fp32 [B, Hq, T, N padded to whole vectors of 16].
    """
    b, hq, t, d = q.shape
    hk, n = keys.tail.shape[1], keys.tokens
    rows = hq // hk * t
    lse = q.new_empty(b, hq, t, dtype=torch.float32)
    if not n or not b:
        out = q.new_zeros(b, hq, t, d, dtype=torch.float32)
        return State(out, lse.fill_(-torch.inf))
    kernel, tile = _kernel(d, hk, rows, keys, values)
    threads = min(torch.get_num_threads(), 1 + 2 * b * hk * n * d // NUMBERS_PER_THREAD)
    splits = 1 if threads == 1 else min(-(-n // tile), -(-4 * threads // (b * hk)))
    queries = q.float().contiguous()
    packed_queries = queries
    if keys.packed is not None and coverage.own_space(keys.fmt):
        packed_queries = to_packed_space(queries, keys.packed.channelwise)
    sets = 1 + (values.fmt is not None and coverage.own_space(values.fmt))
    shape = (b, hq, t, d) if sets == 1 else (b, hk, 1, sets, rows, d)
    out = q.new_empty(shape, dtype=torch.float32)
    states = q.new_empty(b * hk * splits * rows * (sets * d + 32), dtype=torch.float32)
    if valid is not None:
        valid = padded(valid).expand(b, hk, -1)
    if bias is not None:
        bias = padded(bias.float()).expand(b, hq, -1)
    logits = None
    if products is not None:
        logits = q.new_empty(b, hq, t, -(-n // 16) * 16, dtype=torch.float32)
        products.append(logits)
    (key_side, key_tensors), (value_side, value_tensors) = side(keys), side(values)
    (near, far, position), rope_tensors = contiguous_positions(keys.packed, b, d)
    numbers = DECODE.pack(
        batch=b, kv_heads=hk, rows=rows, queries=t, tokens=n, causal=int(causal), splits=splits,
        scale=scale, softcap=softcap or 0.0, q=queries.data_ptr(),
        q_packed=packed_queries.data_ptr(), out=out.data_ptr(), lse=lse.data_ptr(),
        states=states.data_ptr(), bias=strides(bias, 2), valid=strides(valid, 2), keys=key_side,
        near=near, far=far, position=position, values=value_side, logits=address(logits),
        logits_row=-(-n // 16) * 64,
    )  # fmt: skip
    kernel.run(numbers, b * hk, threads)
    del key_tensors, value_tensors, rope_tensors
    if sets == 1:
        return State(out, lse)
    if values.packed is None:
        return State(out[:, :, 0, 0].reshape(b, hq, t, d), lse)
    return State(from_packed_space(out, values.packed.channelwise).view(b, hq, t, d), lse)
