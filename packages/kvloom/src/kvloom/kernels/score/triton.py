"""Attention mass on CUDA tensors: which cases the Triton kernels cover, and their calls.

Importing this does not import Triton; the first call does.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import dispatch
from .. import triton_runtime as cuda
from ..arguments import contiguous_rows
from ..limits import MAX_STEP, Coverage
from .noise import Noise
from .reference import MassOptions, dtypes_problem, later_problem, noise_problem

_KINDS = ("gumbel", "constant")
WIDEST = 256  # head dimension


def _wide_head(q: Tensor, k: Tensor, *_: Any, **__: Any) -> str | None:
    d = k.shape[-1]
    return None if 1 <= d <= WIDEST else f"head_dim={d} is not between 1 and {WIDEST}"


def _other_noise(*_: Any, noise: Noise | None = None, **__: Any) -> str | None:
    return noise_problem(_KINDS, noise)


class Changes(NamedTuple):
    """What changes logits, as in `MassOptions`; a kernel is compiled for it."""

    softcap: bool
    bias: bool
    noise: int  # 0: none; else 1 + its place in `_KINDS`
    fixed: bool
    visible: bool
    causal: bool


COVERAGE = Coverage(
    (f"`head_dim` up to {WIDEST}", _wide_head),
    ("queries and keys both in fp32, fp16 or bf16", dtypes_problem),
    (f"noise: {', '.join(_KINDS)}", _other_noise),
    ("causal queries", later_problem),
    ("no gradient", dispatch.gradient_problem),
)


def column_mass(q: Tensor, k: Tensor, scale: float, **options: Any) -> Tensor:
    """Sum attention as `reference.column_mass` does; up to `MAX_STEP` queries in one pass."""
    given_options = MassOptions(**options)
    visible, visible_queries, softcap, bias, noise, tau, reduce_max, *_ = given_options
    other_lse = given_options.other_lse
    (b, hq, t, d), (hk, n) = q.shape, k.shape[1:3]
    mass = q.new_empty(b, hq, n, dtype=torch.float32)
    if not mass.numel() or not t:
        return mass.zero_()
    q, k = contiguous_rows(q), contiguous_rows(k)
    masks, steps = _options(q, visible, bias, noise)
    nonpadding, nonpadding_row = q, 0
    if visible_queries is not None:
        nonpadding = visible_queries.contiguous().view(torch.uint8)
        nonpadding_row = t if visible_queries.shape[0] > 1 else 0
    capped, seed, first = float(softcap or 1.0), 0, 0
    if noise is not None:
        seed = (noise.first_seed(hq // hk) + (1 << 31)) % (1 << 32) - (1 << 31)
        first = noise.first
    numbers = (float(scale), capped, 1.0 / tau, seed, first)
    strides = (*q.stride()[:3], *k.stride()[:3], *steps)
    kind = 0 if noise is None else 1 + _KINDS.index(noise.kind)
    changes = Changes(
        softcap is not None, bias is not None, kind, noise is not None and noise.fixed,
        visible is not None, other_lse is None,
    )  # fmt: skip
    form: dict[str, Any] = {"DB": cuda.padded_size(d), "CHANGES": changes}
    module = kernels()
    has: dict[str, Any] = {"HAS_PADDING": visible_queries is not None, "REDUCE_MAX": reduce_max}
    exact = q.dtype == torch.float32
    if t <= MAX_STEP:
        rows, keys = hq // hk * t, 32 if exact else 64
        logits = mass.new_empty(b, hq, t, n)
        parts = mass.new_empty(b, hq, t, -(-n // keys))
        cuda.launch(
            module.step_logits, (parts.shape[3], b * hk), q,
            q, k, *masks, logits, parts, *numbers, hk, hq // hk, t, n, d, *strides,
            ROWS=cuda.padded_size(rows), KEYS=keys, **form,
        )  # fmt: skip
        lse = _joined(parts.logsumexp(dim=-1), other_lse)
        cuda.launch(
            module.step_mass, (-(-n // 512), b * hq), q,
            logits, lse, nonpadding, mass, hq, t, n, nonpadding_row, KEYS=512, **has,
        )  # fmt: skip
        return mass
    side = 64 >> (exact + (d > 128))
    form |= {"ROWS": side, "KEYS": side}
    shape: dict[str, Any] = {"warps": 4, "stages": 2 if exact or d > 128 else 3}
    lse = mass.new_empty(b, hq, t)
    cuda.launch(
        module.row_lse, (-(-t // form["ROWS"]), b * hq), q,
        q, k, *masks, lse, *numbers, hq, hq // hk, t, n, d, *strides, **shape, **form,
    )  # fmt: skip
    cuda.launch(
        module.column_mass, (-(-n // form["KEYS"]), b * hq), q,
        q, k, *masks, _joined(lse, other_lse), nonpadding, mass, *numbers, hq, hq // hk, t, n, d,
        *strides,
        nonpadding_row, **shape, **form, **has,
    )  # fmt: skip
    return mass


def _joined(lse: Tensor, other_lse: Tensor | None) -> Tensor:
    """Return the log-sum-exp of keys, and of the others if there are any."""
    return lse if other_lse is None else lse.logaddexp(other_lse)


def _options(
    q: Tensor, visible: Tensor | None, bias: Tensor | None, noise: Noise | None
) -> tuple[tuple[Tensor, Tensor, Tensor], tuple[int, ...]]:
    """Return masks, bias and key indices as kernels read them, and their strides."""
    masks, steps = [], []
    for x in (
        None if visible is None else visible.view(torch.uint8),
        None if bias is None else bias.float(),
        None if noise is None else noise.keys,
    ):
        masks.append(q if x is None else x.contiguous())
        for i in (0, 1):
            steps.append(0 if x is None or x.shape[i] == 1 else masks[-1].stride(i))
    return (masks[0], masks[1], masks[2]), tuple(steps)


@cache
def kernels() -> Any:
    """Import the kernels, and with them Triton."""
    from . import triton_kernel

    return triton_kernel
