"""Decode attention over chosen tokens on CPU tensors: which cases, and how the kernel is called.

Tokens are read where they lie, in a dense or a packed store; nothing is gathered into memory first.
`staged` says how. What is not covered is said in sentences. Importing this does not import Numba.
"""

from __future__ import annotations

import time
from functools import cache
from typing import Any

import torch
from torch import Tensor

from .forms import DTYPES, META, WHEN, of_sides, unknown
from .job import WORTH, padded, place, rowwise
from .ref import First, State
from .strand import Strand


def problems(tokens: int, like: Tensor, keys: Any = None, values: Any = None) -> list[str]:
    """Why no kernel reads chosen tokens of these formats for so many queries a step.

    like: exact keys [B, Hk, N, D]. keys, values: formats of packed tokens, or None.
    """
    found = list(_of_formats(like.shape[-1], like.dtype, keys, values))
    if like.device.type != "cpu":
        found.append(f"the tensors are on {like.device.type}")
    if tokens != 1:
        found.append(f"{tokens} queries a step are not one")
    return found


@cache
def _of_formats(d: int, dtype: torch.dtype, *formats: Any) -> tuple[str, ...]:
    return tuple(of_sides(d, dtype, formats, lambda fmt: _of_format(fmt, d)))


def _of_format(fmt: Any, d: int) -> list[str]:
    """What a kernel does not know of a format; a field it has never heard of is one such thing."""
    found = []
    if fmt.meta not in META:
        found.append(f"meta={fmt.meta} is none of {', '.join(META)}")
    group = fmt.group or d
    if fmt.axis == "token" and (group % 16 or d % group):
        found.append(f"group={group} is not a multiple of 16 that divides {d}")
    return [*found, *unknown(fmt, {"bits", "axis", "group", "meta"} | WHEN)]


def attend(
    q: Tensor,
    keys: Strand,
    values: Strand,
    slots: Tensor,
    begin: int,
    scale: float,
    *,
    first: First | None = None,
    valid: Tensor | None = None,
    softcap: float | None = None,
    bias: Tensor | None = None,
) -> State:
    """Attend as `ref.attend_gathered` does, without gathering.

    Only cases without `problems`. Packed tokens are not rounded to the dtype of the exact ones.
    """
    b, hq, _, d = q.shape
    h, m = slots.shape[1:]
    hk, dtype = keys.tail.shape[1], keys.tail.dtype
    rows, s = hq // h, 0 if first is None else first[0].shape[2]
    n = s + m + keys.tokens - begin
    out = q.new_empty(b, hq, 1, d, dtype=torch.float32)
    lse = q.new_empty(b, hq, 1, dtype=torch.float32)
    if not n or not b:
        return State(out.zero_(), lse.fill_(-torch.inf))
    threads = min(torch.get_num_threads(), 1 + 2 * b * hk * n * d // WORTH)
    tiles = -(-n // 128)
    splits = 1 if threads == 1 else min(tiles, -(-4 * threads // (b * h)))
    queries = q.float().contiguous()
    parts = q.new_empty(b * h * splits * rows * (d + 32), dtype=torch.float32)
    if valid is not None:
        valid = padded(valid).expand(b, h, -1)
    if bias is not None:
        bias = padded(bias.float()).expand(b, hq, -1)
    slots = slots if slots.stride(2) == 1 else slots.contiguous()
    lead: list[Any] = [x if x.stride(3) == 1 else x.contiguous() for x in first or ()]
    lead = lead or [None, None]
    (at_keys, alive), (at_values, alive_too) = _strand(keys), _strand(values)
    kernel, bits = _kernel(d, rows, dtype, keys.fmt, values.fmt)
    kernel.run(
        (
            b, h, rows, h // hk, s, m, begin, n, splits, bits(scale), bits(softcap or 0.0),
            queries.data_ptr(), out.data_ptr(), lse.data_ptr(), parts.data_ptr(),
            *place(bias, 2), *place(valid, 2), *place(slots, 2),
            *place(lead[0], 3), *place(lead[1], 3), *at_keys, *at_values,
        ),
        b * h,
        threads,
    )  # fmt: skip
    del alive, alive_too
    return State(out, lse)


@cache
def _kernel(d: int, rows: int, dtype: torch.dtype, *formats: Any) -> tuple[Any, Any]:
    """The kernel for a case, and what writes a number into its job."""
    start = time.perf_counter()
    from .. import team
    from .staged import Form, kernel

    team.seconds.setdefault("loading Numba", time.perf_counter() - start)

    def each(of: Any, default: Any) -> Any:
        return tuple(default if fmt is None else of(fmt) for fmt in formats)

    form = Form(
        d,
        min(4, 1 << (rows - 1).bit_length()),
        DTYPES[dtype],
        each(lambda fmt: fmt.bits, 0),
        each(lambda fmt: fmt.group or d, 0),
        each(lambda fmt: fmt.axis == "channel", False),
        each(lambda fmt: META.index(fmt.meta), 0),
    )
    return kernel(form), team.bits


def _strand(strand: Strand) -> tuple[tuple[int, ...], tuple[Tensor, ...]]:
    """Where a strand lies, as a job says it, and the tensors that must live meanwhile."""
    tail, packed = strand.tail, strand.packed
    if tail.stride(3) != 1:
        tail = tail.contiguous()
    if packed is None:
        return (*(0,) * 11, *place(tail, 3)), (tail,)
    codes, scale, zero = (rowwise(x) for x in (packed.codes, packed.scale, packed.zero))
    where = (*place(codes, 3), *place(scale, 2), *place(zero, 2), packed.hi, *place(tail, 3))
    return where, (codes, scale, zero, tail)
