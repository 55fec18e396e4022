"""Decode attention on CPU tensors by compiled kernels: how they are called.

A step of few queries attends to a packed prefix and an exact tail in one pass; `fused` says how,
`forms` which formats. Importing this does not import Numba, the first call does.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..quant.rotated import levels, matrix
from . import forms
from .ref import State
from .strand import Channelwise, Codes, Strand
from .turns import tables

MOST = 8  # query rows of a step: more, and reading the keys is no longer what takes time
# Elements of keys and values that are worth a thread.
_WORTH = 1 << 18


def problems(tokens: int, like: Tensor, keys: Any = None, values: Any = None) -> list[str]:
    """Why no kernel attends so many queries a step to tokens in these formats.

    like: exact keys [B, Hk, N, D]. keys, values: formats of packed tokens, or None.
    """
    _, heads, _, d = like.shape
    found = list(forms.problems(d, heads, like.dtype, keys, values))
    if not like.is_cpu:
        found.append(f"the tensors are on {like.device.type}")
    if tokens > MOST:
        found.append(f"{tokens} queries a step are more than {MOST}")
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
    turned, kfmt = (0, False), keys.fmt
    if keys.packed is not None and (rope := keys.packed.rope) is not None:
        turned = (2 * rope.inv_freq.shape[0], rope.interleaved)
    elif keys.packed is None and kfmt is not None and kfmt.pre_rope:
        kfmt = None
    kernel, tile, bits = forms.kernel(d, hk, rows, dtype, turned, kfmt, values.fmt)
    threads = min(torch.get_num_threads(), 1 + 2 * b * hk * n * d // _WORTH)
    splits = 1 if threads == 1 else min(-(-n // tile), -(-4 * threads // (b * hk)))
    queries = q.float().contiguous()
    meeting = queries
    if keys.packed is not None and kfmt is not None and forms.own_space(kfmt):
        meeting = _into(queries, keys.packed.channelwise)
    sets = 1 + (values.fmt is not None and forms.own_space(values.fmt))
    shape = (b, hq, t, d) if sets == 1 else (b, hk, sets, rows, d)
    out = q.new_empty(shape, dtype=torch.float32)
    parts = q.new_empty(b * hk * splits * rows * (sets * d + 32), dtype=torch.float32)
    if valid is not None:
        valid = _padded(valid).expand(b, hk, -1)
    if bias is not None:
        bias = _padded(bias.float()).expand(b, hq, -1)
    left = None
    if products is not None:
        left = q.new_empty(b, hq, t, -(-n // 16) * 16, dtype=torch.float32)
        products.append(left)
    (at_keys, alive), (at_values, alive_too) = _strand(keys), _strand(values)
    at_turns, alive_as_well = _turns(keys.packed, b, d)
    kernel.run(
        (
            b, hk, rows, t, n, int(causal), splits, bits(scale), bits(softcap or 0.0),
            queries.data_ptr(), meeting.data_ptr(), out.data_ptr(), lse.data_ptr(),
            parts.data_ptr(), *_place(bias, 2), *_place(valid, 2), *at_keys, *at_turns, *at_values,
            0 if left is None else left.data_ptr(), -(-n // 16) * 64,
        ),
        b * hk,
        threads,
    )  # fmt: skip
    del alive, alive_too, alive_as_well
    if sets == 1:
        return State(out, lse)
    whole = out[:, :, 0]
    if values.packed is not None:
        whole = whole + _out_of(out[:, :, 1], values.packed.channelwise)
    return State(whole.reshape(b, hq, t, d), lse)


def _into(q: Tensor, how: Channelwise) -> Tensor:
    """Queries [B, Hq, T, D] as they meet packed keys."""
    if how.rotated:
        return (q.unflatten(-1, (-1, how.rotated)) @ matrix(how.rotated)).flatten(-2).contiguous()
    assert how.divisor is not None
    by_head = q.unflatten(1, (len(how.divisor), -1)) * how.divisor[:, None]
    return by_head.flatten(1, 2).contiguous()


def _out_of(sums: Tensor, how: Channelwise) -> Tensor:
    """Sums [B, Hk, rows, D] of packed values as sums of values."""
    if how.rotated:
        return (sums.unflatten(-1, (-1, how.rotated)) @ matrix(how.rotated).T).flatten(-2)
    assert how.divisor is not None
    return sums * how.divisor


def _padded(x: Tensor) -> Tensor:
    """x [..., N] with room for whole vectors of 16 behind it."""
    more = -x.shape[-1] % 16
    return F.pad(x, (0, more)) if more else x.contiguous()


def _strand(strand: Strand) -> tuple[tuple[int, ...], tuple[Tensor | None, ...]]:
    """Where a strand lies, as a job says it, and the tensors that must live meanwhile."""
    tail, packed = strand.tail, strand.packed
    if tail.stride(3) != 1:
        tail = tail.contiguous()
    if packed is None:
        return (*(0,) * 12, *_place(tail, 3), 0, 0, 0), (tail,)
    how, scale, zero = packed.channelwise, packed.scale, packed.zero
    table: Tensor | None = None
    first: Tensor | None = None
    step = 0
    if how.fixed is not None:
        scale, zero = how.multiplied
    elif how.rotated:
        table = _levels(strand.fmt.bits)
    elif how.group_of is not None:
        by = how.by_layer if strand.fmt.transform.span == "layer" else how.by_head
        table, first, step = *by, 4 * tail.shape[3]
    codes, scale, zero = (_rowwise(x) for x in (packed.codes, scale, zero))
    row = 0 if how.fixed is not None else scale.shape[3] * scale.element_size()
    where = (
        *_place(codes, 3), packed.hi, *_place(scale, 2), *_place(zero, 2), row,
        *_place(tail, 3), *_place(table, 0), step, *_place(first, 0),
    )  # fmt: skip
    return where, (codes, scale, zero, tail, table, first)


def _rowwise(x: Tensor) -> Tensor:
    """x [., ., rows, .] with rows one behind the other."""
    _, _, row, one = x.stride()
    return x if one == 1 and row == x.shape[3] else x.contiguous()


@cache
def _levels(bits: float) -> Tensor:
    """The levels of a code, fp32 [16]."""
    found = levels(bits)
    return F.pad(found, (0, 16 - len(found)))


def _turns(packed: Codes | None, b: int, d: int) -> tuple[tuple[int, ...], tuple[Tensor, ...]]:
    """Where the tables for keys packed before RoPE and each row's first position lie."""
    if packed is None or packed.rope is None:
        return (0, 0, 0), ()
    assert packed.at is not None
    assert packed.at.shape[1:] == (1, 1), "each token stands one behind the one before"
    at = packed.at[:, 0, 0].expand(b).contiguous()
    held = (*tables(packed.rope, d, int(at.max()) + packed.hi), at)
    return tuple(x.data_ptr() for x in held), held


def _place(x: Tensor | None, dims: int) -> tuple[int, ...]:
    """A tensor's address and the bytes from one element to the next along its first `dims`.

    Where a batch or heads share one element, there is no next.
    """
    if x is None:
        return (0,) * (dims + 1)
    if not dims:
        return (x.data_ptr(),)
    size, shape, steps = x.element_size(), x.shape, x.stride()
    batch = steps[0] * size if shape[0] > 1 else 0
    head = steps[1] * size if shape[1] > 1 else 0
    return (x.data_ptr(), batch, head, *(step * size for step in steps[2:dims]))
