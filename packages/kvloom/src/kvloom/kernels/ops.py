"""Every operation that has kernels: its reference, its backends and the cases they cover.

An operation has the signature of its reference. `ops.attend(...)` runs the kernel that covers the
case, else the reference; `ops.attend.choose(...)` returns what runs it, and why no kernel does.
Decides nothing about how a backend is chosen: see `dispatch`. Imports neither Numba nor Triton.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from . import dispatch
from .append import cpu as append_cpu
from .append import reference as append_reference
from .attend import reference as attend_reference
from .attend.cpu import attend as attend_cpu
from .attend.prompt import attend_prompt
from .attend.regions import Region
from .attend.triton import attend as attend_triton
from .dispatch import Backend, Binding, Op, differentiated
from .limits import MAX_STEP, Coverage
from .quantize.packed_view import pack, unpack
from .score import cpu as score_cpu
from .score import reference as score_reference
from .score import triton as score_triton
from .score.noise import Noise
from .select import cpu as select_cpu
from .select import reference as select_reference

P = ParamSpec("P")
R = TypeVar("R")


# --- operations of one kind ---------------------------------------------------------------------


def _scores_case(scores: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Hashable]:
    return scores, scores.dtype


def _scores_problem(scores: Tensor, *_: Any, **__: Any) -> str | None:
    return None if scores.dtype == torch.float32 else f"scores are {scores.dtype}, not fp32"


@dataclass(frozen=True)
class _CaseBinding:
    """`Backend.bind` of a function whose kernel `load` compiles for the same arguments."""

    run: Callable[..., Any]
    load: Callable[..., object]

    def __call__(self, *args: Any) -> Callable[..., Any]:
        """Compile, and return the function."""
        self.load(*args)
        return self.run


def _scores_op(
    reference: Callable[P, R],
    run: Callable[..., R],
    load: Callable[[], object],
    coverage: str = "scores in fp32",
) -> Op[P, R]:
    """Declare an operation on scores that has a CPU kernel only."""
    backend = Backend(Binding(run, load), Coverage((coverage, _scores_problem)))
    return Op(reference.__name__, reference, _scores_case, cpu=backend)


def _keys_case(x: Tensor, *_: Any) -> tuple[Tensor, Hashable]:
    return x, (x.shape[3], x.dtype)


def _queries_case(q: Tensor, x: Tensor, _: Tensor, query_heads: str) -> tuple[Tensor, Hashable]:
    return x, (x.shape[3], x.dtype, q.shape[1] // x.shape[1], query_heads)


def _select_op(
    reference: Callable[P, R],
    run: Callable[..., R],
    load: Callable[..., object],
    case: Callable[..., tuple[Tensor, Hashable]],
) -> Op[P, R]:
    """Declare an operation on keys, centroids or bounds that has a CPU kernel only."""
    coverage = select_cpu.COVERAGE.of(lambda *args: case(*args)[:1])
    return Op(reference.__name__, reference, case, cpu=Backend(_CaseBinding(run, load), coverage))


# --- append ---------------------------------------------------------------------------------------


def _append_case(new: tuple[Tensor, ...], *_: Any, **__: Any) -> tuple[Tensor, Hashable]:
    x, v = new
    _b, _h, tokens, d = x.shape
    return x, (x.dtype, min(tokens, MAX_STEP + 1), d, v.shape[3])  # no kernel covers more


append = Op(
    "append",
    append_reference.append,
    _append_case,
    cpu=Backend(
        append_cpu.bind, append_cpu.COVERAGE.of(lambda new, *_, **__: tuple(new)), bit_exact=True
    ),
)


# --- attend ---------------------------------------------------------------------------------------


def _attend_case(
    q: Tensor,
    regions: Sequence[Region],
    *_: Any,
    softcap: float | None = None,
    sink_logits: Tensor | None = None,
    **__: Any,
) -> tuple[Tensor, Hashable]:
    like = regions[0].keys.exact
    _b, heads, tokens, d = q.shape
    few = tokens if tokens <= MAX_STEP else MAX_STEP + 1  # all larger numbers are one case
    gradient = q.requires_grad and torch.is_grad_enabled()
    step = heads, few, d, q.dtype, gradient, softcap is None, sink_logits is None
    if len(regions) == 1:
        return like, (step, _region_case(regions[0]))
    return like, (step, *map(_region_case, regions))


def _region_case(region: Region) -> Hashable:
    keys, values, where, visible, bias, step_tokens = region
    packed, exact_keys, exact_values = keys.packed, keys.exact, values.exact
    rotation = kind = None
    if packed is not None and packed.rope is not None:
        rope, positions = packed.rope, packed.positions
        per_token = positions is not None and positions.shape[2] > 1
        rotation = rope.inv_freq.shape[0], rope.interleaved, per_token
    if where is not None:
        kind = where.kind
    return (
        exact_keys.shape[1], exact_values.shape[3], exact_keys.dtype, exact_values.dtype,
        keys.encoding, values.encoding, packed is None, values.packed is None, rotation, kind,
        visible is None, bias is None, step_tokens > 0,
    )  # fmt: skip


def _attend_coverage(words: str, problems: Callable[..., list[str]]) -> Coverage:
    """Return the coverage of attention kernels; problems: of queries, regions and the softcap."""

    def check(
        q: Tensor,
        regions: Sequence[Region],
        *_: Any,
        softcap: float | None = None,
        **__: Any,
    ) -> list[str]:
        reasons = problems(q, regions, softcap)
        if any(x.keys.exact.shape[3] != x.values.exact.shape[3] for x in regions):
            reasons = [*reasons, "keys and values have different head_dim"]
        dtypes = sorted({str(side.exact.dtype) for x in regions for side in (x.keys, x.values)})
        if len(dtypes) > 1:
            reasons = [*reasons, f"exact tokens have different dtypes: {', '.join(dtypes)}"]
        return reasons or ([dispatch.GRADIENT] if differentiated(q) else [])

    return Coverage((words, check))


attend = Op(
    "attend",
    attend_reference.attend_regions,
    _attend_case,
    cpu=Backend(
        attend_cpu.bind, _attend_coverage(attend_cpu.COVERAGE, attend_cpu.problems), keeps=True
    ),
    gpu=Backend(
        Binding(attend_triton.attend, attend_triton.kernels),
        _attend_coverage(attend_triton.COVERAGE, attend_triton.problems),
    ),
)


# --- score ----------------------------------------------------------------------------------------


def _mass_case(
    q: Tensor,
    k: Tensor,
    scale: float,
    *,
    noise: Noise | None = None,
    later_seen: Tensor | None = None,
    other_lse: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, Hashable]:
    fits = q.shape[1] % k.shape[1] == 0 and q.shape[2] <= k.shape[2] and q.shape[3] == k.shape[3]
    shape = q.shape[3] if fits else (q.shape, k.shape)
    kind = None if noise is None else noise.kind
    gradient = differentiated(q) or differentiated(k)
    return k, (shape, q.dtype, k.dtype, kind, later_seen is None, other_lse is None, gradient)


column_mass = Op(
    "column_mass",
    score_reference.column_mass,
    _mass_case,
    cpu=Backend(score_cpu.bind, score_cpu.COVERAGE),
    gpu=Backend(Binding(score_triton.column_mass, score_triton.kernels), score_triton.COVERAGE),
)


step_mass = _scores_op(
    score_reference.step_mass,
    score_cpu.step_mass,
    score_cpu.step_kernel,
    "products that `attend` leaves",
)
lowest = _scores_op(
    score_reference.lowest,
    score_cpu.lowest,
    score_cpu.lowest_kernel,
    "scores in fp32, indices in int32",
)


# --- select ---------------------------------------------------------------------------------------


kmeans = _select_op(select_reference.kmeans, select_cpu.kmeans, select_cpu.clustering, _keys_case)
page_bounds = _select_op(
    select_reference.page_bounds, select_cpu.page_bounds, select_cpu.bounding, _keys_case
)
cluster_scores = _select_op(
    select_reference.cluster_scores, select_cpu.cluster_scores, select_cpu.scoring_clusters,
    _queries_case,
)  # fmt: skip
page_scores = _select_op(
    select_reference.page_scores, select_cpu.page_scores, select_cpu.scoring_pages, _queries_case
)
select_clusters = _scores_op(
    select_reference.select_clusters, select_cpu.select_clusters, select_cpu.selecting
)
select_pages = _scores_op(
    select_reference.select_pages, select_cpu.select_pages, select_cpu.selecting
)

OPS: dict[str, Op[..., Any]] = {
    op.name: op
    for op in (
        append, attend, attend_prompt, pack, unpack, column_mass, step_mass, lowest, kmeans,
        page_bounds, cluster_scores, page_scores, select_clusters, select_pages,
    )
}  # fmt: skip
