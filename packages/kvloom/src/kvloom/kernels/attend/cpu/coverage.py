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
from ...quantize.encoding import META, Encoding, unknown_fields

_GROUPS = 128  # per token, that kernels look up by channel
_KNOWN = (
    "bits", "axis", "group", "meta", "span", "reorder", "clip", "smooth", "static", "rotation",
    "pre_rope", "boost", "balance",
)  # fmt: skip


@cache
def problems(d: int, heads: int, dtype: torch.dtype, *formats: Any) -> tuple[str, ...]:
    """Return why no kernel reads keys and values [B, heads, N, d] packed in these formats."""
    return tuple(of_sides(d, dtype, formats, lambda fmt: _of_encoding(fmt, d, heads)))


def step_problems(
    most: int,
    tokens: int,
    like: Tensor,
    formats: tuple[Any, Any],
    refuse: Callable[[Any], list[str]] | None = None,
) -> list[str]:
    """Return why no kernel attends `tokens` queries, of `most`, to tokens in these formats.

    like: exact keys [B, Hk, N, D]. formats: of packed keys and values, or None. refuse: returns why
    a kernel does not read a format that others do.
    """
    reasons = list(problems(like.shape[3], like.shape[1], like.dtype, *formats))
    if not reasons and refuse is not None:
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


def _of_encoding(how: Encoding, d: int, heads: int) -> list[str]:
    reasons = unknown_fields(how, _KNOWN)
    if reasons:
        return reasons
    if not how.regroups:
        group, whole = how.group or d, 128 if how.axis == "channel" else d
        if group % 16 or whole % group:
            reasons.append(f"group={group} is not a multiple of 16 that divides {whole}")
    elif not how.static and across(how, d, heads) > _GROUPS:
        reasons.append(f"{across(how, d, heads)} groups a token are more than {_GROUPS}")
    if how.rotation == "group" and how.bits == 8:
        reasons.append("8 bit have more levels than registers hold")
    if how.pre_rope and own_space(how):
        reasons.append("it does not read keys before RoPE that were divided or rotated")
    if how.boost % 16:
        reasons.append(f"boost={how.boost} is not a multiple of 16")
    if how.pre_rope and how.boost:
        reasons.append("it does not read keys before RoPE of which channels have more bits")
    return reasons


def by_token(how: Encoding | None) -> list[str]:
    """Return why an encoding is not read token by token."""
    sizes = {} if how is None else {"boost": how.boost, "balance": how.balance}
    return [f"{name}={size} is not read token by token" for name, size in sizes.items() if size]


def by_span(how: Encoding | None) -> list[str]:
    """Return why an encoding is not read where heads have different numbers of tokens."""
    if how is None:
        return []
    reasons = []
    if how.pre_rope:
        reasons.append("it does not read keys before RoPE by spans")
    if how.regroups:
        reasons.append("channels of a layer's heads that are grouped or scaled together")
    return reasons


def by_page(how: Encoding | None) -> list[str]:
    """Return why an encoding is not read in pages."""
    if how is None:
        return ["pages of exact tokens are not read by the table"]
    if how.bits == 1.5:
        return ["at 1.5 bit, tokens share bytes across the tiles of a page"]
    return []


def across(how: Encoding, d: int, heads: int) -> int:
    """Return how many scales of a token a head reads, in an encoding per token."""
    return how.groups(heads if how.span == "layer" else 1, d)


def own_space(how: Encoding) -> bool:
    """Return whether packed tokens are in another space than exact ones: divided or rotated.

    Queries are transformed into the space of packed keys, and sums of packed values are transformed
    back. Static scales absorb the divisor instead.
    """
    return how.rotation != "none" or (how.smooth and not how.static)


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
    lead: bool = False,
    spans: bool = False,
) -> tuple[Any, int]:
    """Return the kernel for a case and the tokens of its tiles; compiles it on first use.

    rope: rotary channels of keys packed before RoPE, and whether pairs are interleaved. gathered:
    return the kernel that reads chosen tokens. page: of pages of so many tokens. lead, spans: which
    regions stand before and behind.
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
        each(lambda how: not how.regroups or how.span == "layer", True),
        each(own_space, False),
        0 if formats[0] is None else formats[0].boost,
        each(lambda fmt: fmt.balance > 0, False),
        page,
        lead,
        spans,
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
    if fmt.axis == "channel" or fmt.static:
        return spec._replace(by=CHANNEL)
    width = across(fmt, d, heads)
    if fmt.regroups:
        return spec._replace(by=MAP, across=width)
    levels = int(fmt.rotation == "group")
    return spec._replace(by=RUN, group=fmt.group or d, across=width, levels=levels)


def number_format(fmt: Any) -> int:
    """Return the number format of scale and zero; static ones are fp32."""
    return 0 if fmt.static else list(META).index(fmt.meta)


def of_both(formats: Sequence[Any], of: Callable[[Any], Any], default: Any) -> Any:
    """Apply `of` to both formats; `default` where nothing is packed."""
    return tuple(default if fmt is None else of(fmt) for fmt in formats)
