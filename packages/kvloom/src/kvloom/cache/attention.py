"""How a step attends to the regions of a layer.

Decides what computes it: a kernel that reads tokens as they are stored, torch's fused attention for
exact tokens alone, else the reference, region by region.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..kernels import ops
from ..kernels.attend import reference
from ..kernels.attend.regions import Region
from ..kernels.plan import OpPlan


def attend_to(
    q: Tensor,
    regions: Sequence[Region],
    scale: float,
    softcap: float | None,
    products: bool = False,
    plan: OpPlan[..., reference.State] | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Attend q [B, Hq, T, D] to all regions.

    products: whether the kernel may return scale * q @ k too (see `ops.attend`). plan: the
    operation as a layer has bound it (None: bind it for this call). Returns [B, Hq, T, D] in q's
    dtype, and the products if a kernel returned them (else None).
    """
    only = regions[0] if len(regions) == 1 else None
    if only is None or only.where is not None or only.own < only.keys.tokens:
        run = ops.attend.bind(q, regions).run if plan is None else plan.bind(q, regions)
        if run is not None:
            state = run(q, regions, scale, softcap=softcap, products=products)
            out = state.out
            return out if out.dtype == q.dtype else out.to(q.dtype), state.products
    if only is not None and _fused(only, q.shape[2], softcap):
        out = reference.sdpa(
            q, only.keys.tail, only.values.tail, scale,
            causal=only.own > 1, visible=only.visible, bias=only.bias,
        )  # fmt: skip
        return out, None
    if only is not None:
        return reference.attend_regions(q, regions, scale, softcap=softcap).out.to(q.dtype), None
    states = [ops.attend(q, [region], scale, softcap=softcap) for region in regions]
    return reference.merge(states).out.to(q.dtype), None


def joined(regions: Sequence[Region]) -> Sequence[Region]:
    """Return exact regions as one, which torch's fused attention reads; others as they are."""
    if len(regions) == 1 or not all(map(_exact, regions)):
        return regions
    heads = max(1 if region.visible is None else region.visible.shape[1] for region in regions)
    masks = [_mask(region, heads) for region in regions]
    biases = [region.bias for region in regions if region.bias is not None]
    return [
        Region.exact(
            torch.cat([region.keys.tail for region in regions], dim=2),
            torch.cat([region.values.tail for region in regions], dim=2),
            visible=None if all(x.visible is None for x in regions) else torch.cat(masks, dim=2),
            bias=torch.cat(biases, dim=2) if biases else None,
            own=regions[-1].own,
        )
    ]


def _exact(region: Region) -> bool:
    packed = region.keys.packed, region.values.packed
    return region.where is None and packed == (None, None)


def _fused(region: Region, queries: int, softcap: float | None) -> bool:
    """Return whether torch's fused attention reads this region."""
    return _exact(region) and softcap is None and (region.bias is None or queries == 1)


def _mask(region: Region, heads: int) -> Tensor:
    """Return the mask of an exact region, bool [B, heads, N]."""
    if region.visible is not None:
        return region.visible.expand(-1, heads, -1)
    keys = region.keys.tail
    return keys.new_ones(keys.shape[0], heads, keys.shape[2], dtype=torch.bool)
