"""Every operation that has kernels: its reference, its backends and the cases they cover.

An operation has the signature of its reference. `ops.attend(...)` runs the kernel that covers the
case, else the reference; `ops.attend.bind(...)` returns what would run it, and why no kernel does.
Decides nothing about how a backend is chosen: see `dispatch`. Imports neither Numba nor Triton.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import torch
from torch import Tensor

from . import dispatch
from .append import reference as append_reference
from .append.cpu import append as append_cpu
from .attend import pages as attend_pages_reference
from .attend import ragged as attend_ragged_reference
from .attend import reference as attend_reference
from .attend.cpu import decode as attend_cpu
from .attend.cpu import gathered as gathered_cpu
from .attend.cpu import paged as paged_cpu
from .attend.cpu import ragged as ragged_cpu
from .attend.kv_view import KVView
from .attend.pages import PageTable
from .attend.ragged import Spans
from .attend.triton import decode as attend_triton
from .attend.triton import paged as paged_triton
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
    q: Tensor, keys: KVView, values: KVView, *_: Any, **__: Any
) -> tuple[Tensor, Hashable]:
    like, packed = keys.exact, keys.packed
    rotation = None
    if packed is not None and packed.rope is not None:
        rotation = packed.rope.inv_freq.shape[0], packed.rope.interleaved
    _b, heads, tokens, d = q.shape
    few = tokens if tokens < _MANY else _MANY
    gradient = q.requires_grad and torch.is_grad_enabled()
    return like, (
        heads, few, d, like.shape[1], like.dtype, keys.encoding, values.encoding, packed is None,
        rotation, gradient,
    )  # fmt: skip


def _gathered_case(
    q: Tensor, keys: KVView, values: KVView, slots: Tensor, *_: Any, **__: Any
) -> tuple[Tensor, Hashable]:
    like, rest = _attend_case(q, keys, values)
    return like, (rest, slots.shape[1])


def _nothing(*_: Any) -> tuple[Any, ...]:
    return ()


def _attend_problems(module: Any, extra: Callable[..., tuple[Any, ...]] = _nothing) -> Any:
    """Return `Backend.problems` of an attention module, which asks `problems` of the module.

    extra: takes the operation's arguments behind values, and returns those that the module's
    function takes behind the formats.
    """

    def problems(q: Tensor, keys: KVView, values: KVView, *rest: Any, **__: Any) -> list[str]:
        formats = keys.encoding, values.encoding
        reasons: list[str] = module.problems(q.shape[2], keys.exact, *formats, *extra(*rest))
        return reasons or (_GRADIENT if dispatch.differentiated(q) else [])

    return problems


def _attend_cpu(
    module: Any,
    layer: Callable[..., Any],
    coverage: str,
    extra: Callable[..., tuple[Any, ...]] = _nothing,
) -> Backend:
    """Return the CPU backend of an attention module.

    layer: the class that plans a layer's steps; making one compiles its kernel. extra: as in
    `_attend_problems`.
    """
    prepare = only(layer)
    return Backend(module.attend, _attend_problems(module, extra), prepare, coverage, prepare)


_ATTEND_GPU = (
    "1 to 8 queries a step; head_dim 16 to 256, in fp32 to 128; exact tokens in fp32, fp16, bf16; "
    "packed at 1, 1.5, 2, 3, 4, 8 bit per channel or per token, any transform, no "
    "boost, no balanced tiles, not before RoPE, "
    "metadata fp32, fp16, bf16, fp8; padding, softcap, bias, causal; chosen tokens"
)

attend = Op(
    "attend",
    attend_reference.attend_views,
    _attend_case,
    cpu=_attend_cpu(
        attend_cpu,
        attend_cpu.Decode,
        "1 to 8 queries a step; head_dim a multiple of 16 up to 512; exact tokens in fp32, fp16, "
        "bf16; packed in any format of the store but rotated 8 bit, keys before RoPE that are "
        "divided, rotated or boosted, a boost of 8, balanced keys per token, balanced values per "
        "channel, and more than 128 groups a token; padding, softcap, bias, causal",
    ),
    gpu=Backend(
        attend_triton.attend,
        _attend_problems(attend_triton),
        only(attend_triton.kernels),
        _ATTEND_GPU,
    ),
)

attend_gathered = Op(
    "attend_gathered",
    attend_reference.attend_gathered,
    _gathered_case,
    cpu=_attend_cpu(
        gathered_cpu,
        gathered_cpu.Gathered,
        "one query a step; otherwise as `attend` but no boost and no balanced tiles, and keys "
        "before RoPE at positions with gaps",
    ),
    gpu=Backend(
        attend_triton.attend_gathered,
        _attend_problems(attend_triton),
        only(attend_triton.kernels),
        _ATTEND_GPU,
    ),
)


def _paged_case(
    q: Tensor, keys: KVView, values: KVView, table: PageTable, *_: Any, **__: Any
) -> tuple[Tensor, Hashable]:
    like, rest = _attend_case(q, keys, values)
    return like, (rest, table.page)


def _page(table: PageTable, *_: Any) -> tuple[int]:
    return (table.page,)


attend_pages = Op(
    "attend_pages",
    attend_pages_reference.attend_pages,
    _paged_case,
    cpu=_attend_cpu(
        paged_cpu,
        paged_cpu.Paged,
        "one query a row; pages of whole 128 tokens, both sides packed and not at 1.5 bit; "
        "otherwise as `attend`, without padding, softcap and bias",
        _page,
    ),
    gpu=Backend(
        paged_triton.attend,
        _attend_problems(paged_triton, _page),
        lambda *_, **__: paged_triton.kernel(),
        "one query a row; pages of any number of tokens, both sides packed; otherwise as `attend`, "
        "without padding, softcap and bias",
    ),
)


def _ragged_case(
    q: Tensor, keys: KVView, values: KVView, spans: Spans, *_: Any, **__: Any
) -> tuple[Tensor, Hashable]:
    like, rest = _attend_case(q, keys, values)
    return like, (rest, spans.bounds.shape[1])


attend_ragged = Op(
    "attend_ragged",
    attend_ragged_reference.attend_ragged,
    _ragged_case,
    cpu=_attend_cpu(
        ragged_cpu,
        ragged_cpu.Ragged,
        "1 to 8 queries a step; exact tokens, or packed after RoPE, per channel or per token, "
        "rotated or without a transform; otherwise as `attend`, without bias",
    ),
)


def count_fallback(q: Tensor, keys: Any, values: Any) -> None:
    """Count in `dispatch.ran` that the reference attends to a part, which no kernel can read.

    keys, values: formats of the part's packed tokens, None if all are exact.
    """
    name, why = dispatch.candidate(q)
    problems = {"cpu": attend_cpu.problems, "gpu": attend_triton.problems}.get(name)
    if not why and problems is not None:
        why = problems(q.shape[2], q, keys, values)
    why = why or ["the packed tokens are in several pieces"]
    dispatch.ran["attend", "ref", "; ".join(why)] += 1


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
        append, attend, attend_gathered, attend_pages, attend_ragged, pack, unpack, column_mass,
        step_mass, lowest, kmeans, page_bounds, cluster_scores, page_scores, select_clusters,
        select_pages,
    )
}  # fmt: skip
