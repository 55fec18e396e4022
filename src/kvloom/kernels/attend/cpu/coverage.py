"""Which formats the compiled kernels read, and what a kernel is compiled for.

What is not covered is said in sentences, which `dispatch` shows; a field of a format that nobody
here has heard of is one such thing. Importing this does not import Numba.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import MISSING, fields
from functools import cache, partial
from typing import Any

import torch

from ... import dispatch
from ...quantize.reference import ATOM

DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}  # as kernels.simd numbers them
META = ("fp32", "fp16", "bf16", "fp8")
_GROUPS = 128  # groups of a token whose scales are looked up by channel
WHEN = {"residual", "unit"}  # fields of a format that say when tokens are packed, not how
_HOW = {"bits", "axis", "group", "meta", "transform", "pre_rope"}
_TRANSFORM = {"span", "reorder", "clip", "smooth", "static", "rotate"}


@cache
def problems(d: int, heads: int, dtype: torch.dtype, *formats: Any) -> tuple[str, ...]:
    """Why no kernel reads keys and values [B, heads, N, d] of a dtype, packed in these formats."""
    return tuple(of_sides(d, dtype, formats, lambda fmt: _of_format(fmt, d, heads)))


def of_sides(
    d: int, dtype: torch.dtype, formats: Sequence[Any], of_format: Callable[[Any], list[str]]
) -> list[str]:
    """Why no kernel reads heads of size d in a dtype, and what `of_format` says of either side."""
    found = []
    if d % 16 or d > 512:
        found.append(f"head_dim={d} is not a multiple of 16, up to 512")
    if dtype not in DTYPES:
        found.append(f"keys and values are {dtype}, not fp32, fp16 or bf16")
    for side, fmt in zip(("keys", "values"), formats, strict=True):
        if fmt is not None:
            found += [f"{side}: {problem}" for problem in of_format(fmt)]
    return found


def _of_format(fmt: Any, d: int, heads: int) -> list[str]:
    found = [*unknown(fmt, _HOW | WHEN)]
    transform = fmt.transform
    if transform is not None:
        found += [f"transform: {problem}" for problem in unknown(transform, _TRANSFORM)]
    if fmt.bits not in ATOM:
        found.append(f"bits={fmt.bits} is none of {', '.join(map(str, ATOM))}")
    if fmt.meta not in META:
        found.append(f"meta={fmt.meta} is none of {', '.join(META)}")
    if transform is None or transform.rotate:
        group, whole = fmt.group or d, 128 if fmt.axis == "channel" else d
        if group % 16 or whole % group:
            found.append(f"group={group} is not a multiple of 16 that divides {whole}")
    elif not transform.static and across(fmt, d, heads) > _GROUPS:
        found.append(f"{across(fmt, d, heads)} groups a token are more than {_GROUPS}")
    if transform is not None and transform.rotate and fmt.bits == 8:
        found.append("8 bit are more levels than are looked up in registers")
    if fmt.pre_rope and own_space(fmt):
        found.append("keys before RoPE that were divided or rotated are not known to it")
    return found


def unknown(what: Any, known: set[str]) -> list[str]:
    """Fields of a dataclass beside the known ones that are set."""
    found = []
    for field in fields(what):
        value = getattr(what, field.name)
        plain = field.default is not MISSING and value == field.default
        if field.name not in known and not plain:
            found.append(f"{field.name}={value} is not known to it")
    return found


def across(fmt: Any, d: int, heads: int) -> int:
    """Scales of a token that a head's channels choose from, or has, of a format by token."""
    if fmt.transform is not None and fmt.transform.span == "layer":
        return int(fmt.groups(heads, d))
    return d // (fmt.group or d)


def own_space(fmt: Any) -> bool:
    """Whether queries meet, or sums are taken of, packed tokens in another space than exact ones.

    Keys that were divided meet a query that is multiplied, rotated ones a rotated query; sums of
    values are multiplied or rotated back. Fixed scales are multiplied themselves.
    """
    transform = fmt.transform
    return transform is not None and (
        transform.rotate or (transform.smooth and not transform.static)
    )


@cache
def kernel(
    d: int, heads: int, rows: int, dtype: torch.dtype, turned: tuple[int, bool], *formats: Any
) -> tuple[Any, int, Any]:
    """The kernel for a case, the tokens of its tiles, and what writes a number into its job.

    turned: rotary channels of keys packed before RoPE, and whether pairs are interleaved.
    """
    with dispatch.loading():
        from ... import cpu_runtime as team
        from .decode_kernel import Form
        from .decode_kernel import kernel as compiled
        from .dequant import Way
    each = partial(of_both, formats)
    form = Form(
        d,
        min(4, 1 << (rows - 1).bit_length()),
        Way(kind=DTYPES[dtype]),
        way(formats[0], d, heads, turned),
        way(formats[1], d, heads),
        each(number_format, 0),
        each(lambda fmt: fmt.group if fmt.axis == "channel" else 0, 0),
        each(lambda fmt: fmt.transform is None or fmt.transform.span == "layer", True),
        each(own_space, False),
    )
    return compiled(form), form.tile, team.bits


def way(fmt: Any, d: int, heads: int, turned: tuple[int, bool] = (0, False)) -> Any:
    """How tokens of a format become numbers, as `ways.Way`; None: nothing is packed."""
    from .dequant import CHANNEL, MAP, RUN, Way

    if fmt is None:
        return Way()
    its = Way(int(2 * fmt.bits), turned=turned[0], interleaved=int(turned[1]))
    transform, width = fmt.transform, across(fmt, d, heads)
    if fmt.axis == "channel" or (transform is not None and transform.static):
        return its._replace(by=CHANNEL)
    if transform is None or transform.rotate:
        levels = int(transform is not None)
        return its._replace(by=RUN, group=fmt.group or d, across=width, levels=levels)
    return its._replace(by=MAP, across=width)


def number_format(fmt: Any) -> int:
    """In which number format kernels find scale and zero: fixed ones in fp32."""
    return 0 if fmt.transform is not None and fmt.transform.static else META.index(fmt.meta)


def of_both(formats: Sequence[Any], of: Callable[[Any], Any], default: Any) -> Any:
    """Something of both formats, `default` where nothing is packed."""
    return tuple(default if fmt is None else of(fmt) for fmt in formats)
