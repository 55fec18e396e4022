"""Decode attention on CPU tensors by compiled kernels: how they are called.

A step of few queries attends to a packed prefix and an exact tail in one pass; `fused` says how,
`forms` which formats. Importing this does not import Numba, the first call does.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..kv_view import Strand
from ..reference import State
from . import coverage as forms
from .arguments import WORTH, into, padded, place, side, turning, turns, whole

MOST = 8  # query rows of a step: more, and reading the keys is no longer what takes time


def problems(tokens: int, like: Tensor, keys: Any = None, values: Any = None) -> list[str]:
    """Why no kernel attends so many queries a step to tokens in these formats.

    like: exact keys [B, Hk, N, D]. keys, values: formats of packed tokens, or None.
    """
    _, heads, _, d = like.shape
    found = list(forms.problems(d, heads, like.dtype, keys, values))
    if not like.is_cpu:
        found.append(f"the tensors are on {like.device.type}")
    if tokens > MOST:
        found.append(f"more than {MOST} queries a step")
    return found


def attend(
    q: Tensor,
    keys: Strand,
    values: Strand,
    scale: float,
    *,
    causal: bool = False,
    valid: Tensor | None = None,
    softcap: float | None = None,
    bias: Tensor | None = None,
    products: list[Tensor] | None = None,
) -> State:
    """Attend q [B, Hq, T, D] as `ref.attend` does to the N tokens of two strands.

    Only cases without `problems`. Packed tokens are not rounded to the dtype of the exact ones.
    products: where scale * q @ k is left, as `run.attend` says.
    """
    b, hq, t, d = q.shape
    hk, n, dtype = keys.tail.shape[1], keys.tokens, keys.tail.dtype
    rows = hq // hk * t
    lse = q.new_empty(b, hq, t, dtype=torch.float32)
    if not n or not b:
        out = q.new_zeros(b, hq, t, d, dtype=torch.float32)
        return State(out, lse.fill_(-torch.inf))
    turned, kfmt = turning(keys)
    kernel, tile, bits = forms.kernel(d, hk, rows, dtype, turned, kfmt, values.fmt)
    threads = min(torch.get_num_threads(), 1 + 2 * b * hk * n * d // WORTH)
    splits = 1 if threads == 1 else min(-(-n // tile), -(-4 * threads // (b * hk)))
    queries = q.float().contiguous()
    meeting = queries
    if keys.packed is not None and kfmt is not None and forms.own_space(kfmt):
        meeting = into(queries, keys.packed.channelwise)
    sets = 1 + (values.fmt is not None and forms.own_space(values.fmt))
    shape = (b, hq, t, d) if sets == 1 else (b, hk, 1, sets, rows, d)
    out = q.new_empty(shape, dtype=torch.float32)
    parts = q.new_empty(b * hk * splits * rows * (sets * d + 32), dtype=torch.float32)
    if valid is not None:
        valid = padded(valid).expand(b, hk, -1)
    if bias is not None:
        bias = padded(bias.float()).expand(b, hq, -1)
    left = None
    if products is not None:
        left = q.new_empty(b, hq, t, -(-n // 16) * 16, dtype=torch.float32)
        products.append(left)
    (at_keys, alive), (at_values, alive_too) = side(keys), side(values)
    at_turns, alive_as_well = turns(keys.packed, b, d)
    kernel.run(
        (
            b, hk, rows, t, n, int(causal), splits, bits(scale), bits(softcap or 0.0),
            queries.data_ptr(), meeting.data_ptr(), out.data_ptr(), lse.data_ptr(),
            parts.data_ptr(), *place(bias, 2), *place(valid, 2), *at_keys, *at_turns, *at_values,
            0 if left is None else left.data_ptr(), -(-n // 16) * 64,
        ),
        b * hk,
        threads,
    )  # fmt: skip
    del alive, alive_too, alive_as_well
    if sets == 1:
        return State(out, lse)
    if values.packed is None:
        return State(out[:, :, 0, 0].reshape(b, hq, t, d), lse)
    return State(whole(out, values.packed.channelwise).view(b, hq, t, d), lse)
