"""Addresses of one head's keys or values, as the attention kernels read them.

Importing this imports Numba.
"""

from __future__ import annotations

from typing import NamedTuple

from ...cpu_runtime import head_address, kernel_step, load_int


class HeadView(NamedTuple):
    """Where the tokens of a head are; rows are in bytes."""

    codes: int
    row: int
    packed: int  # tokens of the prefix
    scale: int
    zero: int
    meta_row: int
    table: int
    tail: int
    tail_row: int


@kernel_step
def head_view(side, b, h, size):  # type: ignore[no-untyped-def]
    """Return the `HeadView` of head h in batch row b.

    side: a record of `SIDE`. size: bytes of a scale if a head's scales begin at its `first_group`
    among those of all heads, else 0.
    """
    prefix = side.prefix
    scale, zero = head_address(prefix.scale, b, h), head_address(prefix.zero, b, h)
    if size and side.packed > 0:
        first = size * load_int(prefix.first_group, h)
        scale += first
        zero += first
    return HeadView(
        head_address(prefix.codes, b, h), prefix.codes.row, side.packed, scale, zero,
        prefix.meta_row, prefix.table + h * prefix.table_head, head_address(side.tail, b, h),
        side.tail.row,
    )  # fmt: skip


@kernel_step
def moved(view, codes, scale, zero, tail):  # type: ignore[no-untyped-def]
    """Return a view whose parts begin so many bytes further on."""
    return HeadView(
        view.codes + codes, view.row, view.packed, view.scale + scale, view.zero + zero,
        view.meta_row, view.table, view.tail + tail, view.tail_row,
    )  # fmt: skip


@kernel_step
def with_packed(view, packed, table):  # type: ignore[no-untyped-def]
    """Return a view with another number of packed tokens and another table."""
    return HeadView(
        view.codes, view.row, packed, view.scale, view.zero, view.meta_row, table, view.tail,
        view.tail_row,
    )  # fmt: skip
