"""How a step attends to the regions of a layer.

Chooses the first of these that reads the regions:

1. One kernel of the operation `attend`, which reads all regions as they are stored.
2. For exact tokens alone: on a CPU the kernel of a prompt, else torch's fused attention.
3. Region by region, by the kernel of a format, or by `attend`: a kernel, else the reference.

A first prompt begins at the second. The attention states of the third are merged.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ..kernels import dispatch, ops
from ..kernels.attend import reference
from ..kernels.attend.reference import AttentionState
from ..kernels.attend.regions import Region
from ..kernels.limits import MAX_STEP
from ..kernels.plan import OpPlan
from ..store.formats import FormatView
from .segment import joined_mask


def attend_to(
    q: Tensor,
    regions: Sequence[Region],
    scale: float,
    softcap: float | None,
    products: bool = False,
    plan: OpPlan[..., AttentionState] | None = None,
    sink_logits: Tensor | None = None,
    to_later: AttentionState | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Attend q [B, Hq, T, D] to all regions.

    products: whether the kernel may return scale * q @ k too (see `ops.attend`). plan: the
    operation as a layer keeps it (None: bind it for this call). sink_logits: fp32 [Hq], of
    attention sinks that the model has learned. to_later: the attention of q to later tokens.
    Returns [B, Hq, T, D] in q's dtype; and, if a kernel returned them (else None), the products,
    and the log-sum-exp of a prompt's logits, fp32 [B, Hq, T], without attention sinks.
    """
    sole_region = regions[0] if len(regions) == 1 else None
    bound = None
    if sole_region is None or not _is_first_prompt(sole_region):
        plan = OpPlan(ops.attend) if plan is None else plan
        bound = plan.choose(q, regions, scale, softcap=softcap, sink_logits=sink_logits)
        if bound.kernel is not None:
            state = bound.run(
                q, regions, scale, softcap=softcap, products=products, sink_logits=sink_logits
            )
            out = state.out if to_later is None else reference.merge([state, to_later]).out
            return out if out.dtype == q.dtype else out.to(q.dtype), state.products, None
    if sole_region is not None and to_later is None and _fits_torch(q, sole_region, softcap):
        if bound is not None:
            dispatch.ran[bound.counted] += 1
        out, lse = _exact_attention(q, sole_region, scale, sink_logits)
        return out, None, lse
    states = [] if to_later is None else [to_later]
    for region in regions:
        if not _has_format(region):
            states.append(ops.attend(q, [region], scale, softcap=softcap))
        elif region.where is None:
            states += _by_format(q, region, scale, softcap)
        else:
            states.append(_without_kernel_of_format(q, region, scale, softcap))
    state = reference.merge(states)
    if sink_logits is not None:
        state = reference.with_sinks(state, sink_logits)
    return state.out.to(q.dtype), None, None


def _is_first_prompt(region: Region) -> bool:
    """Return whether all tokens of a region are the step's own."""
    return region.where is None and region.step_tokens == region.keys.tokens


def _is_exact(region: Region) -> bool:
    """Return whether all tokens of a region are exact, and all are read."""
    return region.where is None and region.keys.packed is None and region.values.packed is None


def _fits_torch(q: Tensor, region: Region, softcap: float | None) -> bool:
    """Return whether torch's fused attention reads this region."""
    return _is_exact(region) and softcap is None and (region.bias is None or q.shape[2] == 1)


def _exact_attention(
    q: Tensor, region: Region, scale: float, sink_logits: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Attend to exact tokens; the second value is the log-sum-exp, where a kernel returns it."""
    k, v = region.keys.tail, region.values.tail
    if MAX_STEP < region.step_tokens == q.shape[2]:
        bound = ops.attend_prompt.choose(q, k, v, scale, visible=region.visible)
        if bound.kernel is not None and bound.backend != "gpu":  # on a GPU, torch's is faster
            state = bound.run(q, k, v, scale, visible=region.visible)
            lse = state.lse
            state = state if sink_logits is None else reference.with_sinks(state, sink_logits)
            return state.out.to(q.dtype), lse
    out = reference.sdpa(
        q, k, v, scale, causal=region.step_tokens > 1, visible=region.visible, bias=region.bias,
        sink_logits=sink_logits,
    )  # fmt: skip
    return out, None


def _has_format(region: Region) -> bool:
    """Return whether tokens are packed in a format of another distribution."""
    packed = region.keys.packed, region.values.packed
    return any(isinstance(x, FormatView) for x in packed)


def _by_format(
    q: Tensor, region: Region, scale: float, softcap: float | None
) -> Iterator[AttentionState]:
    """Attend to stretches of a region in which keys, and values, are all packed or all exact.

    The kernel of a format reads packed tokens as they are stored; without one, they are unpacked.
    """
    keys, values = region.keys, region.values
    for lo, hi in pairwise(sorted({0, keys.prefix, values.prefix, keys.tokens})):
        state = _by_kernel_of_format(q, region, lo, hi, scale, softcap)
        if state is not None:
            yield state
            continue
        at_once = reference.UNPACK_TOKENS if lo < max(keys.prefix, values.prefix) else hi
        for begin in range(lo, hi, at_once):
            part = region.unpacked(begin, min(hi, begin + at_once))
            yield ops.attend(q, [part], scale, softcap=softcap)


def _by_kernel_of_format(
    q: Tensor, region: Region, lo: int, hi: int, scale: float, softcap: float | None
) -> AttentionState | None:
    """Attend to the tokens lo to hi by their format's kernel; return None if it has no kernel.

    Counts in `operations_run` which format it was, or why each has no kernel.
    """
    if dispatch.setting() == "ref" or dispatch.differentiated(q):
        return None
    sides: tuple[Any, Any] = region.keys.stored(lo, hi), region.values.stored(lo, hi)
    visible, bias = region.masks(lo, hi)
    masks: dict[str, Any] = {"visible": visible, "bias": bias, "softcap": softcap}
    refused: list[str] = []
    for fmt in [side.fmt for side in sides if isinstance(side, FormatView)]:
        problems = fmt.attend_problems(q, *sides, **masks)
        if not problems:
            dispatch.ran["attend", fmt.kind, "; ".join(refused)] += 1
            return fmt.attend(q, *sides, scale, **masks)
        refused += [f"{fmt.kind}: {problem}" for problem in problems]
    if refused:
        dispatch.ran["attend", "ref", "; ".join(dict.fromkeys(refused))] += 1
    return None


def _without_kernel_of_format(
    q: Tensor, region: Region, scale: float, softcap: float | None
) -> AttentionState:
    """Attend to a region of which a step reads some tokens; count why no format's kernel does."""
    bound = ops.attend.choose(q, [region], scale, softcap=softcap)
    if bound.kernel is None and dispatch.setting() != "ref" and not dispatch.differentiated(q):
        packed = region.keys.packed, region.values.packed
        kinds = dict.fromkeys(x.fmt.kind for x in packed if isinstance(x, FormatView))
        reasons = [
            f"{kind}: a format's kernel reads no {type(region.where).__name__}" for kind in kinds
        ]
        bound = bound._replace(counted=("attend", "ref", "; ".join(reasons)))
    return bound.run(q, [region], scale, softcap=softcap)


def one_region(regions: Sequence[Region]) -> Sequence[Region]:
    """Return exact regions as one, which torch's fused attention reads; others as they are."""
    if len(regions) == 1 or not all(map(_is_exact, regions)):
        return regions
    heads = max(1 if region.visible is None else region.visible.shape[1] for region in regions)
    tokens, like = [region.keys.tokens for region in regions], regions[0].keys.tail[:, :heads]
    biases = [region.bias for region in regions if region.bias is not None]
    return [
        Region.exact(
            torch.cat([region.keys.tail for region in regions], dim=2),
            torch.cat([region.values.tail for region in regions], dim=2),
            visible=joined_mask([region.visible for region in regions], tokens, like),
            bias=torch.cat(biases, dim=2) if biases else None,
            step_tokens=regions[-1].step_tokens,
        )
    ]
