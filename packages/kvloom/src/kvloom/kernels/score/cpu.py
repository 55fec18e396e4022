"""Attention mass on CPU tensors: which cases the compiled kernels cover, and their calls.

Importing this does not import Numba; the first call does.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import dispatch
from ..arguments import DTYPE_CODES, address, padded, strides
from ..limits import Coverage
from .arguments import (
    GAUSSIAN,
    GUMBEL,
    LOWEST,
    MASS,
    NO_NOISE,
    NUMBERS,
    OPTIONS,
    PAIRS,
    PANELS,
    STEP_MASS,
    TILES,
)
from .noise import Noise
from .reference import MassOptions, dtypes_problem, later_problem, noise_problem

_NOISE = {"constant": NO_NOISE, "gumbel": GUMBEL, "gaussian": GAUSSIAN}
_PRODUCTS_PER_THREAD = 1 << 21
_LOGITS = 1 << 21  # numbers of a head's logits that a thread holds at once
_PANEL_NUMBERS = 1 << 22  # numbers of keys that are laid out in panels at once


def _unfit_shapes(q: Tensor, k: Tensor, *_: Any, **__: Any) -> str | None:
    if q.shape[1] % k.shape[1] or q.shape[2] > k.shape[2] or q.shape[3] != k.shape[3]:
        return f"queries {tuple(q.shape)} and keys {tuple(k.shape)} do not fit together"
    return None


def _other_noise(*_: Any, noise: Noise | None = None, **__: Any) -> str | None:
    return noise_problem(_NOISE, noise)


COVERAGE = Coverage(
    ("any `head_dim`", _unfit_shapes),
    ("queries and keys both in fp32, fp16 or bf16", dtypes_problem),
    (f"noise: {', '.join(_NOISE)}", _other_noise),
    ("no gradient", dispatch.gradient_problem),
    ("causal queries", later_problem),
)


def bind(q: Tensor, k: Tensor, *_: Any, **__: Any) -> Callable[..., Tensor]:
    """Return `column_mass`, once the kernels for such queries and keys are compiled."""
    compiled(_unit(q, k))
    return column_mass


def column_mass(q: Tensor, k: Tensor, scale: float, **options: Any) -> Tensor:
    """Sum as `reference.column_mass` does."""
    settings = MassOptions(**options)
    b, hq, t, d = q.shape
    hk, n = k.shape[1], k.shape[2]
    if not (b and hq and t and n):
        return q.new_zeros(b, hq, n, dtype=torch.float32)
    kernels = compiled(_unit(q, k))
    if kernels.pairs:
        q, k, d = q.view(torch.float32), k.view(torch.float32), d // 2
    dtype_code, queries, keys = DTYPE_CODES[q.dtype], strides(q, 4), strides(k, 4)
    tiles, rows = -(-n // kernels.tile), kernels.rows
    blocks = max(1, min(4, -(-t // rows), _LOGITS // (rows * n)))
    threads = min(torch.get_num_threads(), 1 + b * hq * t * n * d // _PRODUCTS_PER_THREAD)
    splits = 1 if threads == 1 else min(-(-t // (rows * blocks)), -(-4 * threads // (b * hq)))
    tile_numbers = kernels.tile * d
    heads = max(1, min(hk, _PANEL_NUMBERS // (b * tiles * tile_numbers)))  # at once
    mass = q.new_zeros(splits, b, hq, tiles * kernels.tile, dtype=torch.float32)
    panels = q.new_empty(b * heads * tiles * tile_numbers, dtype=torch.float32)
    size = rows * blocks * (tiles * (kernels.tile + 1) + d + 2)
    scratch = q.new_empty(threads, size, dtype=torch.float32)
    packed_options, tensors = _options(b, hq, hk, t, n, settings)
    other_lse = None if settings.other_lse is None else settings.other_lse.float().contiguous()
    for h0 in range(0, hk, heads):
        h1 = min(hk, h0 + heads)
        packed = PANELS.pack(
            batch=b, tokens=n, head_dim=d, first_head=h0, end_head=h1,
            dtype_code=dtype_code, keys=keys, panels=panels.data_ptr(),
        )  # fmt: skip
        kernels.panels.run(packed, 0, threads)
        packed = MASS.pack(
            batch=b, group=hq // hk, queries=t, tokens=n, head_dim=d, first_head=h0, end_head=h1,
            query_heads=hq, splits=splits, blocks=blocks, dtype_code=dtype_code, q=queries,
            panels=panels.data_ptr(), mass=mass.data_ptr(), scratch=scratch.data_ptr(),
            scratch_bytes=4 * size, other_lse=address(other_lse),
            reduce_max=settings.reduce_max, scale=scale, softcap=settings.softcap or 0.0,
            inverse_tau=1 / settings.tau, options=packed_options,
        )  # fmt: skip
        kernels.mass.run(packed, 1, threads)
    del tensors
    return (mass.amax(dim=0) if settings.reduce_max else mass.sum(dim=0))[..., :n]


def _has_pairs(x: Tensor) -> bool:
    """Return whether x is of bf16 numbers whose pairs can be read as fp32 numbers."""
    steps = x.stride()
    even = not any(size % 2 for size in (x.shape[3], x.storage_offset(), *steps[:3]))
    return x.dtype == torch.bfloat16 and steps[3] == 1 and even


def _unit(q: Tensor, k: Tensor) -> int:
    """Return what of q and k can be multiplied at once, if the machine does."""
    if not (_has_pairs(q) and _has_pairs(k)):
        return NUMBERS
    return PAIRS if q.shape[3] % 32 else TILES


def step_mass(products: Tensor, n: int, hk: int, **options: Any) -> Tensor:
    """Sum as `reference.step_mass` does; products are padded to whole vectors of 16 keys."""
    settings = MassOptions(**options)
    assert not settings.reduce_max, "a step sums weights"
    b, hq, t, width = products.shape
    if not (b and hq and t and n):
        return products.new_zeros(b, hq, n)
    width_used = -(-n // 16) * 16
    assert width >= width_used
    assert products.is_contiguous()
    mass = products.new_empty(b, hq, width_used)
    cost = 64 if settings.noise is None else 256  # of a logit, in multiplications
    threads = min(torch.get_num_threads(), 1 + cost * b * hq * t * n // _PRODUCTS_PER_THREAD)
    scratch = products.new_empty(threads, width_used) if t > 1 else mass
    packed_options, tensors = _options(b, hq, hk, t, n, settings)
    packed = STEP_MASS.pack(
        batch=b, group=hq // hk, queries=t, tokens=n, query_heads=hq,
        products=products.data_ptr(), product_row=4 * width, mass=mass.data_ptr(),
        scratch=scratch.data_ptr(), scratch_bytes=4 * width_used, softcap=settings.softcap or 0.0,
        inverse_tau=1 / settings.tau, options=packed_options,
    )  # fmt: skip
    step_kernel().run(packed, 1, threads)
    del tensors
    return mass[..., :n]


def lowest(scores: Tensor, index: Tensor, before: int, visible: Tensor | None = None) -> Tensor:
    """Find the slot that `reference.lowest` finds; N above 0."""
    b, h, n = scores.shape
    if n < 16:  # pad to one vector; infinite scores are not the lowest
        padding = (0, 16 - n)
        visible = None if visible is None else F.pad(visible, padding, value=True)
        scores, index = F.pad(scores, padding, value=torch.inf), F.pad(index, padding)
        return lowest(scores, index, before, visible)
    scores, index = scores.contiguous(), index.contiguous()
    visible = None if visible is None else visible.contiguous()
    slots = torch.empty(b, h, 1, dtype=torch.int64, device="cpu")
    packed = LOWEST.pack(
        heads=b * h, tokens=n, before=before, scores=scores.data_ptr(), index=index.data_ptr(),
        visible=address(visible), slots=slots.data_ptr(),
    )  # fmt: skip
    lowest_kernel().run(packed, 0, 1)
    return slots


def _options(
    b: int, hq: int, hk: int, t: int, n: int, options: MassOptions
) -> tuple[tuple[int, ...], tuple[Tensor | None, ...]]:
    """Pack the options, and return the tensors that must outlive the call."""
    visible, visible_queries, _, bias, noise, *_ = options
    if visible is None and visible_queries is None and bias is None and noise is None:
        return (0,) * OPTIONS.numbers, ()
    keys, kind, seed, first, fixed = None, 0, 0, 0, 0
    if visible is not None:
        visible = padded(visible.expand(b, -1, n)).expand(b, hk, -1)
    if visible_queries is not None:
        visible_queries = visible_queries.expand(b, 1, t)[:, 0].float().contiguous()
    if bias is not None:
        bias = padded(bias.expand(-1, hq, n).float()).expand(b, hq, -1)
    if noise is not None and _NOISE[noise.kind]:
        keys = padded(noise.keys.expand(-1, -1, n).int()).expand(b, hk, -1)
        kind, seed = _NOISE[noise.kind], noise.first_seed(hq // hk)
        first, fixed = noise.first, int(noise.fixed)
    numbers = OPTIONS.pack(
        bias=strides(bias, 2), visible=strides(visible, 2), row_weights=strides(visible_queries, 1),
        key_index=strides(keys, 2), noise=kind, seed=seed, first_query=first, fixed_noise=fixed,
    )  # fmt: skip
    return numbers, (bias, visible, visible_queries, keys)


class _Kernels(NamedTuple):
    """The kernels of `column_mass` and the shape of their tiles: keys, and query rows at once."""

    panels: Any
    mass: Any
    tile: int
    rows: int
    pairs: bool


@cache
def compiled(unit: int) -> _Kernels:
    """Compile the kernels of `column_mass`; they cover every case.

    unit: what is multiplied at once; less, if the machine cannot.
    """
    with dispatch.loading():
        from ..simd import has_pairs, has_tiles
        from . import cpu_kernel, cpu_microkernel
    if unit == TILES and not has_tiles():
        unit = PAIRS
    if unit == PAIRS and not has_pairs():
        unit = NUMBERS
    rows, vectors = cpu_microkernel.AT_ONCE
    if unit == TILES:
        rows, vectors = cpu_microkernel.TILES_AT_ONCE
    return _Kernels(
        cpu_kernel.panels(vectors),
        cpu_kernel.mass(rows, vectors, unit),
        cpu_kernel.TILE,
        rows,
        unit != NUMBERS,
    )


@cache
def step_kernel() -> Any:
    """Compile the kernel of `step_mass`."""
    with dispatch.loading():
        from . import cpu_kernel
    return cpu_kernel.step()


@cache
def lowest_kernel() -> Any:
    """Compile the kernel of `lowest`."""
    with dispatch.loading():
        from . import cpu_kernel
    return cpu_kernel.lowest()
