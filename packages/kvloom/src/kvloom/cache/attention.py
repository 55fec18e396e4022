"""How a step attends to the regions of a layer.

Chooses, in this order: a kernel that reads tokens as stored; torch's fused attention if all tokens
are exact; else, per region, the format's kernel or the reference.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ..kernels import dispatch, ops
from ..kernels.attend import reference
from ..kernels.attend.regions import Region
from ..kernels.limits import MAX_STEP
from ..kernels.plan import OpPlan
from ..store.formats import Format, FormatView


def attend_to(
    q: Tensor,
    regions: Sequence[Region],
    scale: float,
    softcap: float | None,
    products: bool = False,
    plan: OpPlan[..., reference.AttentionState] | None = None,
    sink_logits: Tensor | None = None,
    to_later: reference.AttentionState | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Attend q [B, Hq, T, D] to all regions.

    products: whether the kernel may return scale * q @ k too (see `ops.attend`). plan: the
    operation as a layer keeps it (None: bind it for this call). sink_logits: fp32 [Hq], of
    attention sinks that the model has learned. to_later: the attention of q to later tokens.
    Returns [B, Hq, T, D] in q's dtype; and, if a kernel returned them (else None), the products,
    and the log-sum-exp of a prompt's logits, fp32 [B, Hq, T], without attention sinks.
    """
    sole_region = regions[0] if len(regions) == 1 else None
    if sole_region is None or not _is_first_prompt(sole_region):
        plan = OpPlan(ops.attend) if plan is None else plan
        bound = plan.choose(q, regions, scale, softcap=softcap, sink_logits=sink_logits)
        if bound.kernel is not None:
            state = bound.run(
                q, regions, scale, softcap=softcap, products=products, sink_logits=sink_logits
            )
            out = state.out if to_later is None else reference.merge([state, to_later]).out
            return out if out.dtype == q.dtype else out.to(q.dtype), state.products, None
        if sole_region is not None and not _has_format(sole_region):
            dispatch.ran[bound.counted] += 1
    if sole_region is not None and to_later is None and _fused(sole_region, q.shape[2], softcap):
        prompt_state = _of_prompt(q, sole_region, scale)
        if prompt_state is not None:
            lse = prompt_state.lse
            if sink_logits is not None:
                prompt_state = reference.with_sinks(prompt_state, sink_logits)
            return prompt_state.out.to(q.dtype), None, lse
        out = reference.sdpa(
            q, sole_region.keys.tail, sole_region.values.tail, scale,
            causal=sole_region.step_tokens > 1, visible=sole_region.visible, bias=sole_region.bias,
            sink_logits=sink_logits,
        )  # fmt: skip
        return out, None, None
    states = [] if to_later is None else [to_later]
    for region in regions:
        if _has_format(region):
            states += _by_format(q, region, scale, softcap)
        elif sole_region is None or _is_first_prompt(sole_region):
            states.append(ops.attend(q, [region], scale, softcap=softcap))
        else:  # no kernel covers this case; `operations_run` has counted the reason
            states.append(reference.attend_regions(q, regions, scale, softcap=softcap))
    state = reference.merge(states)
    if sink_logits is not None:
        state = reference.with_sinks(state, sink_logits)
    return state.out.to(q.dtype), None, None


def _of_prompt(q: Tensor, region: Region, scale: float) -> reference.AttentionState | None:
    """Attend to a region whose last tokens the queries are; None if no kernel covers it."""
    k, v = region.keys.tail, region.values.tail
    if region.step_tokens != q.shape[2] or region.step_tokens <= MAX_STEP:
        return None
    bound = ops.attend_prompt.choose(q, k, v, scale)
    if bound.kernel is None:
        return None
    state: reference.AttentionState = bound.run(q, k, v, scale, visible=region.visible)
    return state


def _is_first_prompt(region: Region) -> bool:
    """Return whether all tokens of a region are the step's own."""
    return region.where is None and region.step_tokens == region.keys.tokens


def _has_format(region: Region) -> bool:
    """Return whether keys or values are packed in a format of another distribution."""
    packed = region.keys.packed, region.values.packed
    return region.where is None and any(isinstance(x, FormatView) for x in packed)


def _by_format(
    q: Tensor, region: Region, scale: float, softcap: float | None
) -> Iterator[reference.AttentionState]:
    """Attend to stretches of a region in which keys, and values, are all packed or all exact."""
    keys, values = region.keys, region.values
    for lo, hi in pairwise(sorted({0, keys.prefix, values.prefix, keys.tokens})):
        sides: tuple[Any, Any] = keys.stored(lo, hi), values.stored(lo, hi)
        visible, bias = _masks(region, lo, hi)
        masks: dict[str, Any] = {"visible": visible, "bias": bias, "softcap": softcap}
        refused: list[str] = []
        for fmt in _formats(q, sides):
            problems = fmt.attend_problems(q, *sides, **masks)
            if not problems:
                dispatch.ran["attend", fmt.kind, "; ".join(refused)] += 1
                yield fmt.attend(q, *sides, scale, **masks)
                break
            refused += [f"{fmt.kind}: {problem}" for problem in problems]
        else:
            if refused:
                dispatch.ran["attend", "ref", "; ".join(dict.fromkeys(refused))] += 1
            packed = lo < max(keys.prefix, values.prefix)
            yield from _unpacked(
                q, region, lo, hi, reference.UNPACK if packed else hi, scale, softcap
            )


def _formats(q: Tensor, sides: tuple[Any, Any]) -> list[Format]:
    """Return the formats of other distributions whose kernels may attend to these tokens."""
    if dispatch.setting() == "ref" or dispatch.differentiated(q):
        return []
    return [side.fmt for side in sides if isinstance(side, FormatView)]


def _unpacked(
    q: Tensor, region: Region, lo: int, hi: int, at_once: int, scale: float, softcap: float | None
) -> Iterator[reference.AttentionState]:
    """Attend to tokens lo to hi of a region, of which so many are unpacked at once."""
    for begin in range(lo, hi, at_once):
        end = min(hi, begin + at_once)
        k, v = region.keys.tensor(begin, end), region.values.tensor(begin, end)
        visible, bias = _masks(region, begin, end)
        step_tokens = (
            region.step_tokens if end == region.keys.tokens else 0
        )  # packed tokens are of the past
        part = Region.exact(k, v, visible=visible, bias=bias, step_tokens=step_tokens)
        yield ops.attend(q, [part], scale, softcap=softcap)


def _masks(region: Region, lo: int, hi: int) -> tuple[Tensor | None, Tensor | None]:
    """Return the mask and the bias of tokens lo to hi of a region."""
    visible, bias = region.visible, region.bias
    return (
        None if visible is None else visible[..., lo:hi],
        None if bias is None else bias[..., lo:hi],
    )


def one_region(regions: Sequence[Region]) -> Sequence[Region]:
    """Return exact regions as one, which torch's fused attention reads; others as they are."""
    if len(regions) == 1 or not all(map(_exact, regions)):
        return regions
    heads = max(1 if region.visible is None else region.visible.shape[1] for region in regions)
    masks = [_full_mask(region, heads) for region in regions]
    biases = [region.bias for region in regions if region.bias is not None]
    return [
        Region.exact(
            torch.cat([region.keys.tail for region in regions], dim=2),
            torch.cat([region.values.tail for region in regions], dim=2),
            visible=None if all(x.visible is None for x in regions) else torch.cat(masks, dim=2),
            bias=torch.cat(biases, dim=2) if biases else None,
            step_tokens=regions[-1].step_tokens,
        )
    ]


def _exact(region: Region) -> bool:
    packed = region.keys.packed, region.values.packed
    return region.where is None and packed == (None, None)


def _fused(region: Region, queries: int, softcap: float | None) -> bool:
    """Return whether torch's fused attention reads this region."""
    return _exact(region) and softcap is None and (region.bias is None or queries == 1)


def _full_mask(region: Region, heads: int) -> Tensor:
    """Return the mask of an exact region, bool [B, heads, N]."""
    if region.visible is not None:
        return region.visible.expand(-1, heads, -1)
    keys = region.keys.tail
    return keys.new_ones(keys.shape[0], heads, keys.shape[2], dtype=torch.bool)
