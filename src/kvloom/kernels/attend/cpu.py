"""Decode attention on CPU tensors by compiled kernels: which cases, and how they are called.

A step of few queries attends to a packed prefix and an exact tail in one pass; `fused` says how.
What is not covered is said in sentences, which `dispatch` shows. Importing this does not import
Numba, the first call does.
"""

from __future__ import annotations

import time
from dataclasses import MISSING, fields
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .ref import State
from .strand import Strand

MOST = 8  # query rows of a step: more, and reading the keys is no longer what takes time
_NUMBERS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
_BITS = (2, 3, 4, 8)
_WHEN = {"residual", "unit"}  # fields of a format that say when tokens are packed, not how
_HOW = {"bits", "axis", "group", "meta"}
_META = ("fp32", "fp16", "bf16", "fp8")  # as kernels.lanes numbers them
# Elements of keys and values that are worth a thread.
_WORTH = 1 << 18


def problems(tokens: int, like: Tensor, keys: Any = None, values: Any = None) -> list[str]:
    """Why no kernel attends so many queries a step to tokens in these formats.

    like: exact keys [B, Hk, N, D]. keys, values: formats of packed tokens, or None.
    """
    found = list(_of_formats(like.shape[-1], like.dtype, keys, values))
    if like.device.type != "cpu":
        found.append(f"the tensors are on {like.device.type}")
    if tokens > MOST:
        found.append(f"{tokens} queries a step are more than {MOST}")
    return found


@cache
def _of_formats(d: int, dtype: torch.dtype, *formats: Any) -> tuple[str, ...]:
    found = []
    if d % 16 or d > 512:
        found.append(f"head_dim={d} is not a multiple of 16, up to 512")
    if dtype not in _NUMBERS:
        found.append(f"keys and values are {dtype}, not fp32, fp16 or bf16")
    for side, fmt in zip(("keys", "values"), formats, strict=True):
        if fmt is not None:
            found += [f"{side}: {problem}" for problem in _of_format(fmt, d)]
    return tuple(found)


def _of_format(fmt: Any, d: int) -> list[str]:
    """What a kernel does not know of a format; a field it has never heard of is one such thing."""
    found = []
    if fmt.bits not in _BITS:
        found.append(f"bits={fmt.bits} is none of {', '.join(map(str, _BITS))}")
    if fmt.meta not in _META:
        found.append(f"meta={fmt.meta} is none of {', '.join(_META)}")
    group, whole = fmt.group or d, 128 if fmt.axis == "channel" else d
    if group % 16 or whole % group:
        found.append(f"group={group} is not a multiple of 16 that divides {whole}")
    for field in fields(fmt):
        value = getattr(fmt, field.name)
        plain = field.default is not MISSING and value == field.default
        if field.name not in _HOW | _WHEN and not plain:
            found.append(f"{field.name}={value} is not known to it")
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
    out = q.new_empty(b, hq, t, d, dtype=torch.float32)
    lse = q.new_empty(b, hq, t, dtype=torch.float32)
    if not n or not b:
        return State(out.zero_(), lse.fill_(-torch.inf))
    threads = min(torch.get_num_threads(), 1 + 2 * b * hk * n * d // _WORTH)
    tiles = -(-n // 128)
    splits = 1 if threads == 1 else min(tiles, -(-4 * threads // (b * hk)))
    queries = q.float().contiguous()
    parts = q.new_empty(b * hk * splits * rows * (d + 32), dtype=torch.float32)
    if valid is not None:
        valid = _padded(valid).expand(b, hk, -1)
    if bias is not None:
        bias = _padded(bias.float()).expand(b, hq, -1)
    left = None
    if products is not None:
        left = q.new_empty(b, hq, t, -(-n // 16) * 16, dtype=torch.float32)
        products.append(left)
    (at_keys, alive), (at_values, alive_too) = _strand(keys), _strand(values)
    kernel, bits = _kernel(d, rows, dtype, keys.fmt, values.fmt)
    kernel.run(
        (
            b, hk, rows, t, n, int(causal), splits, bits(scale), bits(softcap or 0.0),
            queries.data_ptr(), out.data_ptr(), lse.data_ptr(), parts.data_ptr(),
            *_place(bias, 2), *_place(valid, 2), *at_keys, *at_values,
            0 if left is None else left.data_ptr(), -(-n // 16) * 64,
        ),
        b * hk,
        threads,
    )  # fmt: skip
    del alive, alive_too
    return State(out, lse)


@cache
def _kernel(d: int, rows: int, dtype: torch.dtype, *formats: Any) -> tuple[Any, Any]:
    """The kernel for a case, and what writes a number into its job."""
    begin = time.perf_counter()
    from .. import team
    from .fused import Form, kernel

    team.seconds.setdefault("loading Numba", time.perf_counter() - begin)

    def each(of: Any, default: Any) -> Any:
        return tuple(default if fmt is None else of(fmt) for fmt in formats)

    form = Form(
        d,
        min(4, 1 << (rows - 1).bit_length()),
        _NUMBERS[dtype],
        each(lambda fmt: int(fmt.bits), 0),
        each(lambda fmt: fmt.group or d, 0),
        each(lambda fmt: fmt.axis == "channel", False),
        each(lambda fmt: _META.index(fmt.meta), 0),
    )
    return kernel(form), team.bits


def _padded(x: Tensor) -> Tensor:
    """x [..., N] with room for whole vectors of 16 behind it."""
    more = -x.shape[-1] % 16
    return F.pad(x, (0, more)) if more else x.contiguous()


def _strand(strand: Strand) -> tuple[tuple[int, ...], tuple[Tensor, ...]]:
    """Where a strand lies, as a job says it, and the tensors that must live meanwhile."""
    tail, packed = strand.tail, strand.packed
    if tail.stride(3) != 1:
        tail = tail.contiguous()
    if packed is None:
        return (*(0,) * 11, *_place(tail, 3)), (tail,)
    codes, scale, zero = (
        x if x.stride(3) == 1 and x.stride(2) == x.shape[3] else x.contiguous()
        for x in (packed.codes, packed.scale, packed.zero)
    )
    where = (*_place(codes, 3), *_place(scale, 2), *_place(zero, 2), packed.hi, *_place(tail, 3))
    return where, (codes, scale, zero, tail)


def _place(x: Tensor | None, dims: int) -> tuple[int, ...]:
    """A tensor's address and the bytes from one element to the next along its first `dims`."""
    if x is None:
        return (0,) * (dims + 1)
    size = x.element_size()
    return (x.data_ptr(), *(step * size for step in x.stride()[:dims]))
