"""Every operation that has kernels: its reference, its backends and the cases they cover.

An operation has the signature of its reference. `ops.attend(...)` runs the kernel that covers the
case, else the reference; `ops.attend.bind(...)` returns what would run it, and why no kernel does.
Decides nothing about how a backend is chosen: see `dispatch`. Imports neither Numba nor Triton.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from . import dispatch
from .append import reference as append_reference
from .append.cpu import append as append_cpu
from .attend import reference as attend_reference
from .attend.cpu import attend as attend_cpu
from .attend.regions import Region
from .attend.triton import attend as attend_triton
from .declare import only, rows_op, scores_op
from .dispatch import Backend, Op
from .quantize import reference as quantize_reference
from .quantize.cpu import pack as pack_cpu
from .quantize.encoding import LayerEncoding
from .quantize.triton import pack as pack_triton
from .score import reference as score_reference
from .score.cpu import mass as mass_cpu
from .score.noise import Noise
from .score.triton import mass as mass_triton
from .select import reference as select_reference
from .select.cpu import select as select_cpu

R = TypeVar("R")
_GRADIENT = ["q requires a gradient; call under torch.no_grad()"]
_MANY = 9  # queries or tokens per step: more are covered by no kernel, and are one case


# --- append ---------------------------------------------------------------------------------------


def _append_case(new: tuple[Tensor, ...], *_: Any, **__: Any) -> tuple[Tensor, Hashable]:
    x = new[0]
    _b, _h, tokens, d = x.shape
    return x, (x.dtype, tokens if tokens < _MANY else _MANY, d)


append = Op(
    "append",
    append_reference.append,
    _append_case,
    cpu=Backend(
        append_cpu.append,
        only(lambda new: append_cpu.problems(new[0])),
        only(lambda new: append_cpu.compiled(new[0].dtype)),
        "1 to 8 tokens a step in fp32, fp16, bf16; head_dim a multiple of 16",
    ),
)


# --- attend ---------------------------------------------------------------------------------------


def _attend_case(
    q: Tensor, regions: Sequence[Region], *_: Any, **__: Any
) -> tuple[Tensor, Hashable]:
    like = regions[0].keys.exact
    _b, heads, tokens, d = q.shape
    few = tokens if tokens < _MANY else _MANY
    gradient = q.requires_grad and torch.is_grad_enabled()
    if len(regions) == 1:
        return like, (heads, few, d, like.dtype, gradient, _region_case(regions[0]))
    return like, (heads, few, d, like.dtype, gradient, *map(_region_case, regions))


def _region_case(region: Region) -> Hashable:
    keys, values, where, _visible, _bias, own = region
    packed, like = keys.packed, keys.exact
    rotation = how = None
    if packed is not None and packed.rope is not None:
        rope, per_token = packed.rope, packed.at is not None and packed.at.shape[2] > 1
        rotation = rope.inv_freq.shape[0], rope.interleaved, per_token
    if where is not None:
        how = where.kind
    return (
        like.shape[1], keys.encoding, values.encoding, packed is None, values.packed is None,
        rotation, how, own > 0,
    )  # fmt: skip


def _attend_problems(module: Any) -> Any:
    """Return `Backend.problems` of an attention module, which asks `problems` of the module."""

    def problems(q: Tensor, regions: Sequence[Region], *_: Any, **__: Any) -> list[str]:
        reasons: list[str] = module.problems(q, regions)
        return reasons or (_GRADIENT if dispatch.differentiated(q) else [])

    return problems


attend = Op(
    "attend",
    attend_reference.attend_regions,
    _attend_case,
    cpu=Backend(
        attend_cpu.attend,
        _attend_problems(attend_cpu),
        only(attend_cpu.Attend),
        "1 to 8 queries a step, one for chosen tokens and for pages; head_dim a multiple of 16 up "
        "to 512; exact tokens in fp32, fp16, bf16; packed in any encoding but rotated 8 bit, keys "
        "before RoPE that are divided, rotated or boosted, a boost of 8, balanced keys per token, "
        "balanced values per channel, and more than 128 groups a token; chosen tokens without "
        "boost and balanced tiles; spans of heads after RoPE, each head by itself; pages of whole "
        "128 tokens, both sides packed and not at 1.5 bit; padding, softcap, bias, causal",
        only(attend_cpu.Attend),
    ),
    gpu=Backend(
        attend_triton.attend,
        _attend_problems(attend_triton),
        only(attend_triton.kernels),
        "1 to 8 queries a step, one for chosen tokens and for pages; head_dim 16 to 256, in fp32 "
        "to 128; exact tokens in fp32, fp16, bf16; packed in any encoding but boosted, balanced "
        "and before RoPE; pages with both sides packed; padding, softcap, bias, causal",
    ),
)


# --- quantize -------------------------------------------------------------------------------------

_FORMATS = (
    "tokens in fp32, fp16, bf16, however they lie; 1, 1.5, 2, 3, 4, 8 bit per channel or per "
    "token, any group of one head or of all, clipped, smoothed or static, metadata fp32, fp16, "
    "bf16, fp8; padding"
)

pack = Op(
    "pack",
    quantize_reference.pack,
    lambda x, layer, *_, **__: (x, (layer.encoding, x.dtype)),
    cpu=Backend(
        pack_cpu.pack,
        only(lambda x, layer: pack_cpu.problems(layer, x.device, x.dtype)),
        only(pack_cpu.compiled),
        f"{_FORMATS}; rotated groups and heads; balanced tiles",
        only(pack_cpu.Packer),
    ),
    gpu=Backend(
        pack_triton.pack,
        only(lambda x, layer: pack_triton.problems(layer, x.device, x.dtype)),
        only(pack_triton.kernels),
        _FORMATS,
    ),
)


def _unpack_case(
    packed: Any, layer: LayerEncoding, lo: int, hi: int, dtype: torch.dtype, *_: Any, **__: Any
) -> tuple[Tensor, Hashable]:
    return packed.codes, (layer.encoding, dtype)


def _unpack_problems(module: Any) -> Callable[..., list[str]]:
    def problems(packed: Any, layer: LayerEncoding, lo: int, hi: int, dtype: torch.dtype) -> Any:
        return module.problems(layer, packed.codes.device, dtype)

    return only(problems)


unpack = Op(
    "unpack",
    quantize_reference.unpack,
    _unpack_case,
    cpu=Backend(
        pack_cpu.unpack,
        _unpack_problems(pack_cpu),
        only(pack_cpu.compiled),
        f"{_FORMATS}; rotated groups and heads; balanced tiles",
    ),
    gpu=Backend(
        pack_triton.unpack,
        _unpack_problems(pack_triton),
        only(pack_triton.kernels),
        _FORMATS,
    ),
)


# --- score ----------------------------------------------------------------------------------------


def _mass_case(
    q: Tensor, k: Tensor, scale: float, *, noise: Noise | None = None, **_: Any
) -> tuple[Tensor, Hashable]:
    fits = q.shape[1] % k.shape[1] == 0 and q.shape[2] <= k.shape[2] and q.shape[3] == k.shape[3]
    shape = q.shape[3] if fits else (q.shape, k.shape)
    kind = None if noise is None else noise.kind
    return k, (shape, q.dtype, k.dtype, kind, q.requires_grad and torch.is_grad_enabled())


column_mass = Op(
    "column_mass",
    score_reference.column_mass,
    _mass_case,
    cpu=Backend(
        mass_cpu.column_mass,
        only(lambda q, k, *, noise=None: mass_cpu.problems(q, k, noise)),
        only(mass_cpu.compiled),
        "queries and keys both in fp32, fp16 or bf16, any head_dim; noise gumbel, gaussian, "
        "constant; tau, window, padding, softcap, bias",
    ),
    gpu=Backend(
        mass_triton.column_mass,
        only(lambda q, k, *, noise=None: mass_triton.problems(q, k, noise)),
        only(mass_triton.kernels),
        "queries and keys in one of fp32, fp16, bf16, head_dim up to 256; noise gumbel, constant; "
        "tau, window, padding, softcap, bias",
    ),
)


step_mass = scores_op(
    score_reference.step_mass,
    mass_cpu.step_mass,
    mass_cpu.compiled,
    "products that `attend` leaves",
)
lowest = scores_op(
    score_reference.lowest, mass_cpu.lowest, mass_cpu.compiled, "scores in fp32, indices in int32"
)


# --- select ---------------------------------------------------------------------------------------


_SELECT = select_cpu.select_kernels
kmeans = rows_op(select_reference.kmeans, select_cpu.kmeans, select_cpu.kmeans_kernels)
page_bounds = rows_op(select_reference.page_bounds, select_cpu.page_bounds, _SELECT)
cluster_scores = rows_op(select_reference.cluster_scores, select_cpu.cluster_scores, _SELECT, 1)
page_scores = rows_op(select_reference.page_scores, select_cpu.page_scores, _SELECT, 1)
select_clusters = scores_op(select_reference.select_clusters, select_cpu.select_clusters, _SELECT)
select_pages = scores_op(select_reference.select_pages, select_cpu.select_pages, _SELECT)

OPS: dict[str, Op[..., Any]] = {
    op.name: op
    for op in (
        append, attend, pack, unpack, column_mass, step_mass, lowest, kmeans, page_bounds,
        cluster_scores, page_scores, select_clusters, select_pages,
    )
}  # fmt: skip
