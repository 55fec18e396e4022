"""What the compiled attention kernels cover, and what a kernel is compiled for.

A case that is not covered is refused with a reason, which `dispatch` keeps; so is an encoding with
a field that this module does not know. Importing this does not import Numba.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from ....encoding import Encoding, unknown_fields
from ... import dispatch
from ...arguments import DTYPE_CODES
from ...limits import (
    MAX_STEP,
    OF_ONE_HEAD,
    READ_FIELDS,
    Coverage,
    dtype_problem,
    head_dim_problem,
)
from ..regions import Paged, Region, Slots, Spans

_PAGE_TILE = 128  # tokens of a kernel's tile, where pages are read
_GROUPS = 128  # per token, that kernels look up by channel


def _many_queries(queries: int, where: Any) -> str | None:
    if queries == 1 or not isinstance(where, Slots | Paged):
        return None
    return f"{queries} queries a step are not one"


def _unfit_group(encoding: Encoding, d: int, heads: int) -> str | None:
    if encoding.regroups:
        return None
    group, whole = encoding.group or d, 128 if encoding.axis == "channel" else d
    if group % 16 == 0 and whole % group == 0:
        return None
    return f"group={group} is not a multiple of 16 that divides {whole}"


def _many_groups(encoding: Encoding, d: int, heads: int) -> str | None:
    if not encoding.regroups or encoding.static or encoding.groups_read(heads, d) <= _GROUPS:
        return None
    return f"{encoding.groups_read(heads, d)} groups a token are more than {_GROUPS}"


def _many_levels(encoding: Encoding, d: int, heads: int) -> str | None:
    rotated = encoding.rotation == "group" and encoding.bits == 8
    return "8 bit have more levels than registers hold" if rotated else None


def _moved_raw_keys(encoding: Encoding, d: int, heads: int) -> str | None:
    if encoding.pre_rope and encoding.own_space:
        return "it does not read keys before RoPE that were divided or rotated"
    return None


def _raw_keys(encoding: Encoding) -> str | None:
    return "it does not read keys before RoPE by spans" if encoding.pre_rope else None


def _exact_pages(encoding: Encoding | None) -> str | None:
    return "pages of exact tokens are not read by the table" if encoding is None else None


def _split_bytes(encoding: Encoding | None) -> str | None:
    shared = encoding is not None and encoding.bits == 1.5
    return "at 1.5 bit, tokens share bytes across the tiles of a page" if shared else None


def _odd_page(queries: int, where: Any) -> str | None:
    if not isinstance(where, Paged) or where.table.page % _PAGE_TILE == 0:
        return None
    return f"a page of {where.table.page} tokens is not a multiple of {_PAGE_TILE}"


def _scattered_raw_keys(region: Region) -> str | None:
    packed = region.keys.packed
    if region.where is None and packed is not None and packed.rope is not None:
        positions = packed.positions
        if positions is not None and positions.shape[2] > 1:
            return "it reads keys before RoPE at consecutive positions only"
    return None


STEPS = Coverage(
    (f"1–{MAX_STEP} queries, one for `Slots` and `Paged`", _many_queries),
    (f"pages of a multiple of {_PAGE_TILE} tokens", _odd_page),
)
HEADS = Coverage(
    ("`head_dim` a multiple of 16, up to 512", lambda d, dtype: head_dim_problem(d)),
    (
        "exact tokens all in fp32, fp16 or bf16",
        lambda d, dtype: dtype_problem(dtype, "keys and values are"),
    ),
)
ENCODINGS = Coverage(
    ("groups of a multiple of 16, along the tokens up to 128", _unfit_group),
    (f"up to {_GROUPS} groups per token", _many_groups),
    ("rotated groups up to 4 bits", _many_levels),
    ("keys before RoPE neither divided nor rotated", _moved_raw_keys),
)
POSITIONS = Coverage(
    ("keys before RoPE at consecutive positions, except for `Slots`", _scattered_raw_keys)
)
SPANS = Coverage(("keys after RoPE", _raw_keys), OF_ONE_HEAD)
PAGES = Coverage(("both sides packed", _exact_pages), ("not at 1.5 bits", _split_bytes))
WORDS = f"{STEPS}; {HEADS}; {ENCODINGS}; {POSITIONS}; `Spans`: {SPANS}; `Paged`: {PAGES}"


def problems(queries: int, region: Region) -> list[str]:
    """Return why no kernel attends `queries` queries of a head to a region; empty if one does."""
    like, where = region.keys.exact, region.where
    encodings = region.keys.encoding, region.values.encoding
    reasons = list(encoding_problems(like.shape[3], like.shape[1], like.dtype, *encodings))
    if not reasons:
        for side, encoding in zip(("keys", "values"), encodings, strict=True):
            found = []
            if isinstance(where, Spans) and encoding is not None:
                found = SPANS.problems(encoding)
            elif isinstance(where, Paged):
                found = PAGES.problems(encoding)
            reasons += [f"{side}: {reason}" for reason in found]
    return reasons + STEPS.problems(queries, where) + POSITIONS.problems(region)


@cache
def encoding_problems(d: int, heads: int, dtype: torch.dtype, *encodings: Any) -> tuple[str, ...]:
    """Return why no kernel reads keys and values [B, heads, N, d] in these encodings."""
    reasons = HEADS.problems(d, dtype)
    for side, encoding in zip(("keys", "values"), encodings, strict=True):
        if encoding is not None:
            unknown = unknown_fields(encoding, READ_FIELDS)
            found = unknown or ENCODINGS.problems(encoding, d, heads)
            reasons += [f"{side}: {reason}" for reason in found]
    return tuple(reasons)


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
        from .lookup import by_table
        from .variant import SideConstants, Variant
    sides = [
        SideConstants() if encoding is None else SideConstants.of(encoding, heads, d, angles)
        for encoding, angles in zip(formats, (rope, (0, False)), strict=True)
    ]
    if not gathered:
        sides = [by_table(side) for side in sides]
    many = min(4, 1 << (rows - 1).bit_length())
    variant = Variant(d, many, DTYPE_CODES[dtype], sides[0], sides[1], page, lead, spans)
    if gathered:
        return gathered_kernel.kernel(variant), gathered_kernel.TILE
    return decode_kernel.kernel(variant), variant.tile
