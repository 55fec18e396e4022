"""Which formats the compiled kernels read, and what a kernel is compiled for.

A format that is not covered is refused with a reason, which `dispatch` keeps; so is a format with a
field that this module does not know. Importing this does not import Numba.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from ... import dispatch
from ...arguments import NUMBERS
from ...quantize.byte_layout import PACK_BLOCK
from ...quantize.spec import unknown_fields

META = ("fp32", "fp16", "bf16", "fp8")
_GROUPS = 128  # per token, that kernels look up by channel
WHEN = {"residual", "unit"}  # fields of a format that say when tokens are packed, not how
_HOW = {"bits", "axis", "group", "meta", "transform", "pre_rope", "boost", "balance"}
_TRANSFORM = {"span", "reorder", "clip", "smooth", "static", "rotate", "hadamard"}


@cache
def problems(d: int, heads: int, dtype: torch.dtype, *formats: Any) -> tuple[str, ...]:
    """Return why no kernel reads keys and values [B, heads, N, d] packed in these formats."""
    return tuple(of_sides(d, dtype, formats, lambda fmt: _of_format(fmt, d, heads)))


def step_problems(
    most: int,
    tokens: int,
    like: Tensor,
    formats: tuple[Any, Any],
    refuse: Callable[[Any], list[str]] = lambda fmt: [],
) -> list[str]:
    """Return why no kernel attends `tokens` queries, of `most`, to tokens in these formats.

    like: exact keys [B, Hk, N, D]. formats: of packed keys and values, or None. refuse: returns why
    a kernel does not read a format that others do.
    """
    reasons = list(problems(like.shape[3], like.shape[1], like.dtype, *formats))
    if not reasons:
        sides = zip(("keys", "values"), formats, strict=True)
        reasons = [f"{side}: {problem}" for side, fmt in sides for problem in refuse(fmt)]
    if not like.is_cpu:
        reasons.append(f"the tensors are on {like.device.type}")
    if tokens > most:
        few = f"{tokens} queries a step are not one"
        reasons.append(few if most == 1 else f"more than {most} queries a step")
    return reasons


def of_sides(
    d: int, dtype: torch.dtype, formats: Sequence[Any], of_format: Callable[[Any], list[str]]
) -> list[str]:
    """Return why no kernel reads heads of size d in a dtype, and what `of_format` finds."""
    reasons = []
    if d % 16 or d > 512:
        reasons.append(f"head_dim={d} is not a multiple of 16, up to 512")
    if dtype not in NUMBERS:
        reasons.append(f"keys and values are {dtype}, not fp32, fp16 or bf16")
    for side, fmt in zip(("keys", "values"), formats, strict=True):
        if fmt is not None:
            reasons += [f"{side}: {problem}" for problem in of_format(fmt)]
            axis = "channel" if side == "keys" else "token"
            if not reasons and fmt.balance and fmt.axis != axis:
                reasons.append(f"{side}: it reads balanced tiles per {axis}, not per {fmt.axis}")
    return reasons


def _of_format(fmt: Any, d: int, heads: int) -> list[str]:
    reasons = unknown_fields(fmt, _HOW | WHEN)
    if reasons:
        return reasons
    transform = fmt.transform
    if transform is not None:
        reasons += [f"transform: {problem}" for problem in unknown_fields(transform, _TRANSFORM)]
    if fmt.bits not in PACK_BLOCK:
        reasons.append(f"bits={fmt.bits} is none of {', '.join(map(str, PACK_BLOCK))}")
    if fmt.meta not in META:
        reasons.append(f"meta={fmt.meta} is none of {', '.join(META)}")
    if _in_runs(transform):
        group, whole = fmt.group or d, 128 if fmt.axis == "channel" else d
        if group % 16 or whole % group:
            reasons.append(f"group={group} is not a multiple of 16 that divides {whole}")
    elif not transform.static and across(fmt, d, heads) > _GROUPS:
        reasons.append(f"{across(fmt, d, heads)} groups a token are more than {_GROUPS}")
    if transform is not None and transform.rotate and fmt.bits == 8:
        reasons.append("8 bit have more levels than registers hold")
    if fmt.pre_rope and own_space(fmt):
        reasons.append("it does not read keys before RoPE that were divided or rotated")
    if fmt.boost % 16:
        reasons.append(f"boost={fmt.boost} is not a multiple of 16")
    if fmt.pre_rope and fmt.boost:
        reasons.append("it does not read keys before RoPE of which channels have more bits")
    return reasons


def across(fmt: Any, d: int, heads: int) -> int:
    """Return how many scales of a token a head reads, in a format per token."""
    if fmt.transform is not None and fmt.transform.span == "layer":
        return int(fmt.groups(heads, d))
    return d // (fmt.group or d)


def own_space(fmt: Any) -> bool:
    """Return whether packed tokens are in another space than exact ones: divided or rotated.

    Queries are transformed into the space of packed keys, and sums of packed values are transformed
    back. Static scales absorb the divisor instead.
    """
    transform = fmt.transform
    return transform is not None and (
        transform.rotate or transform.hadamard or (transform.smooth and not transform.static)
    )


def _in_runs(transform: Any) -> bool:
    """Return whether groups are consecutive channels of a head, or tokens of a channel."""
    return transform is None or transform.rotate or transform.hadamard


@cache
def kernel(
    d: int,
    heads: int,
    rows: int,
    dtype: torch.dtype,
    rope: tuple[int, bool],
    gathered: bool,
    *formats: Any,
    page: int = 0,
    ragged: bool = False,
) -> tuple[Any, int]:
    """Return the kernel for a case and the tokens of its tiles; compiles it on first use.

    rope: rotary channels of keys packed before RoPE, and whether pairs are interleaved. gathered:
    return the kernel that reads chosen tokens. page: of pages of so many tokens. ragged: heads have
    different numbers of tokens.
    """
    with dispatch.loading():
        from . import decode_kernel, gathered_kernel
        from .variant import Variant
    each = partial(of_both, formats)
    variant = Variant(
        d,
        min(4, 1 << (rows - 1).bit_length()),
        NUMBERS[dtype],
        dequant_spec(formats[0], d, heads, rope),
        dequant_spec(formats[1], d, heads),
        each(number_format, 0),
        each(lambda fmt: fmt.balance or (fmt.group if fmt.axis == "channel" else 0), 0),
        each(lambda fmt: fmt.transform is None or fmt.transform.span == "layer", True),
        each(own_space, False),
        0 if formats[0] is None else formats[0].boost,
        each(lambda fmt: fmt.balance > 0, False),
        page,
        ragged,
    )
    if gathered:
        return gathered_kernel.kernel(variant), gathered_kernel.TILE
    return decode_kernel.kernel(variant), variant.tile


def dequant_spec(fmt: Any, d: int, heads: int, rope: tuple[int, bool] = (0, False)) -> Any:
    """Return how tokens of a format become numbers, as `DequantSpec`; None: nothing is packed."""
    from .dequant import CHANNEL, MAP, RUN, DequantSpec

    if fmt is None:
        return DequantSpec()
    spec = DequantSpec(int(2 * fmt.bits), rope_dims=rope[0], interleaved=int(rope[1]))
    transform, width = fmt.transform, across(fmt, d, heads)
    if fmt.axis == "channel" or (transform is not None and transform.static):
        return spec._replace(by=CHANNEL)
    if _in_runs(transform):
        levels = int(transform is not None and transform.rotate)
        return spec._replace(by=RUN, group=fmt.group or d, across=width, levels=levels)
    return spec._replace(by=MAP, across=width)


def number_format(fmt: Any) -> int:
    """Return the number format of scale and zero; static ones are fp32."""
    return 0 if fmt.transform is not None and fmt.transform.static else META.index(fmt.meta)


def of_both(formats: Sequence[Any], of: Callable[[Any], Any], default: Any) -> Any:
    """Apply `of` to both formats; `default` where nothing is packed."""
    return tuple(default if fmt is None else of(fmt) for fmt in formats)
