"""Attention mass on CPU tensors by compiled kernels: which cases, and how they are called.

What is not covered is said in sentences, which `dispatch` shows. Importing this does not import
Numba, the first call does.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ... import dispatch
from ..noise import Noise

_FORMATS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
_NOISE = {"constant": 0, "gumbel": 1, "gaussian": 2}  # what is constant changes no softmax
# Multiplications that are worth a thread.
_WORTH = 1 << 21
# Numbers of a head's logits that a thread holds at once, and of keys laid out in panels.
_HELD, _PANELS = 1 << 21, 1 << 22


def problems(q: Tensor, k: Tensor, noise: Noise | None) -> list[str]:
    """Why no kernel adds up what queries q [B, Hq, T, D] give to keys k [B, Hk, N, D]."""
    found = []
    if q.shape[1] % k.shape[1] or q.shape[2] > k.shape[2] or q.shape[3] != k.shape[3]:
        found.append(f"queries {tuple(q.shape)} and keys {tuple(k.shape)} do not fit together")
    if q.dtype not in _FORMATS or q.dtype != k.dtype:
        found.append(f"queries are {q.dtype} and keys {k.dtype}, not both fp32, fp16 or bf16")
    if k.device.type != "cpu":
        found.append(f"the tensors are on {k.device.type}")
    if noise is not None and noise.kind not in _NOISE:
        found.append(f"noise {noise.kind!r} is none of {', '.join(_NOISE)}")
    if q.requires_grad and torch.is_grad_enabled():
        found.append("a gradient is asked for; call under torch.no_grad()")
    return found


def column_mass(
    q: Tensor,
    k: Tensor,
    scale: float,
    *,
    valid: Tensor | None = None,
    real: Tensor | None = None,
    softcap: float | None = None,
    bias: Tensor | None = None,
    window: int | None = None,
    noise: Noise | None = None,
    tau: float = 1.0,
) -> Tensor:
    """Add up as `ref.column_mass` does. Only cases without `problems`."""
    b, hq, t, d = q.shape
    hk, n = k.shape[1], k.shape[2]
    if not (b and hq and t and n):
        return q.new_zeros(b, hq, n, dtype=torch.float32)
    kernels = _kernels()
    tiles, rows = -(-n // kernels.tile), kernels.rows
    blocks = max(1, min(4, -(-t // rows), _HELD // (rows * n)))
    threads = min(torch.get_num_threads(), 1 + b * hq * t * n * d // _WORTH)
    splits = 1 if threads == 1 else min(-(-t // (rows * blocks)), -(-4 * threads // (b * hq)))
    heads = max(1, min(hk, _PANELS // (b * tiles * kernels.tile * d)))  # at once
    mass = q.new_zeros(splits, b, hq, tiles * kernels.tile, dtype=torch.float32)
    panels = q.new_empty(b * heads * tiles * kernels.tile * d, dtype=torch.float32)
    held = rows * blocks * (tiles * (kernels.tile + 1) + d + 2)
    scratch = q.new_empty(threads, held, dtype=torch.float32)
    options, alive = _options(b, hq, hk, t, n, valid, real, bias, noise)
    for h0 in range(0, hk, heads):
        h1 = min(hk, h0 + heads)
        numbers = (
            b, hq // hk, t, n, d, h0, h1, splits, blocks, hq, *_place(q, 4), *_place(k, 4),
            _FORMATS[q.dtype], panels.data_ptr(), mass.data_ptr(), scratch.data_ptr(), 4 * held,
            *options, kernels.bits(scale), kernels.bits(softcap or 0.0), kernels.bits(1 / tau),
            window or 0,
        )  # fmt: skip
        kernels.panels.run(numbers, 0, threads)
        kernels.mass.run(numbers, 1, threads)
    del alive
    return (mass[0] if splits == 1 else mass.sum(dim=0))[..., :n]


def step_mass(
    products: Tensor,
    n: int,
    hk: int,
    *,
    valid: Tensor | None = None,
    real: Tensor | None = None,
    softcap: float | None = None,
    bias: Tensor | None = None,
    noise: Noise | None = None,
    tau: float = 1.0,
) -> Tensor:
    """Add up as `ref.step_mass` does; products [B, Hq, T, N + room for whole vectors of 16]."""
    b, hq, t, width = products.shape
    if not (b and hq and t and n):
        return products.new_zeros(b, hq, n)
    kernels = _kernels()
    padded = -(-n // 16) * 16
    assert width >= padded
    assert products.is_contiguous()
    mass = products.new_empty(b, hq, padded)
    worth = 64 if noise is None else 256  # multiplications
    threads = min(torch.get_num_threads(), 1 + worth * b * hq * t * n // _WORTH)
    scratch = products.new_empty(threads, padded) if t > 1 else mass
    options, alive = _options(b, hq, hk, t, n, valid, real, bias, noise)
    numbers = (
        b, hq // hk, t, n, 0, 0, hk, 1, 1, hq, *(0,) * 10, 4 * width, products.data_ptr(),
        mass.data_ptr(), scratch.data_ptr(), 4 * padded, *options, 0,
        kernels.bits(softcap or 0.0), kernels.bits(1 / tau), 0,
    )  # fmt: skip
    kernels.step.run(numbers, 1, threads)
    del alive
    return mass[..., :n]


def lowest(scores: Tensor, index: Tensor, before: int, see: Tensor | None = None) -> Tensor:
    """Find the slot that `ref.lowest` finds; N above 0."""
    b, h, n = scores.shape
    if n < 16:  # a whole vector, of which the last lanes may not go
        more = (0, 16 - n)
        see = None if see is None else F.pad(see, more, value=True)
        return lowest(F.pad(scores, more, value=torch.inf), F.pad(index, more), before, see)
    scores, index = scores.contiguous(), index.contiguous()
    see = None if see is None else see.contiguous()
    found = torch.empty(b, h, 1, dtype=torch.int64)
    numbers = (
        b * h, n, before, scores.data_ptr(), index.data_ptr(),
        0 if see is None else see.data_ptr(), found.data_ptr(),
    )  # fmt: skip
    _kernels().lowest.run(numbers, 0, 1)
    return found


def _options(
    b: int,
    hq: int,
    hk: int,
    t: int,
    n: int,
    valid: Tensor | None,
    real: Tensor | None,
    bias: Tensor | None,
    noise: Noise | None,
) -> tuple[tuple[int, ...], tuple[Tensor | None, ...]]:
    """Where options lie, as a job says it, and the tensors that must live meanwhile."""
    if valid is None and real is None and bias is None and noise is None:
        return (0,) * 15, ()
    keys, drawn = None, (0, 0, 0, 0)
    if valid is not None:
        valid = _padded(valid.expand(b, -1, n)).expand(b, hk, -1)
    if real is not None:
        real = real.expand(b, 1, t)[:, 0].float().contiguous()
    if bias is not None:
        bias = _padded(bias.expand(-1, hq, n).float()).expand(b, hq, -1)
    if noise is not None and _NOISE[noise.kind]:
        keys = _padded(noise.keys.expand(-1, -1, n).int()).expand(b, hk, -1)
        drawn = (_NOISE[noise.kind], noise.seed % (1 << 32), noise.first, int(noise.fixed))
    return (
        *_place(bias, 2), *_place(valid, 2), *_place(real, 1), *_place(keys, 2), *drawn
    ), (bias, valid, real, keys)  # fmt: skip


def _padded(x: Tensor) -> Tensor:
    """x [..., N] with room for whole vectors of 16 behind it."""
    more = -x.shape[-1] % 16
    return F.pad(x, (0, more)) if more else x.contiguous()


def _place(x: Tensor | None, dims: int) -> tuple[int, ...]:
    """A tensor's address and the bytes from one element to the next along its first `dims`."""
    if x is None:
        return (0,) * (dims + 1)
    size = x.element_size()
    return (x.data_ptr(), *(step * size for step in x.stride()[:dims]))


class _Kernels(NamedTuple):
    """What the first call compiles, and what it takes to call them."""

    panels: Any
    mass: Any
    step: Any
    lowest: Any
    bits: Any
    tile: int
    rows: int


@cache
def _kernels() -> _Kernels:
    with dispatch.loading():
        from ... import cpu_runtime as team
        from . import mass_kernel as mass
        from . import microkernel as micro
    rows, vectors = micro.AT_ONCE
    return _Kernels(
        mass.panels(vectors), mass.mass(rows, vectors), mass.step(), mass.lowest(), team.bits,
        mass.TILE, rows,
    )  # fmt: skip
