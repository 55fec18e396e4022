"""Addresses of one head's keys or values, as the attention kernels read them.

Importing this imports Numba.
"""

from __future__ import annotations

from numba import njit

from ...cpu_runtime import at, load_int


@njit(inline="always")
def head_view(side, b, h, size):  # type: ignore[no-untyped-def]
    """Return (codes, row, packed, scale, zero, meta_row, table, tail, tail_row) of a head.

    side: a record of `SIDE`. size: bytes of a scale if a head's scales begin at its `first_group`
    among those of all heads, else 0. packed: tokens of the prefix. Rows are in bytes.
    """
    prefix = side.prefix
    scale, zero = at(prefix.scale, b, h), at(prefix.zero, b, h)
    if size and side.packed > 0:
        first = size * load_int(prefix.first_group, h)
        scale += first
        zero += first
    codes, tail = at(prefix.codes, b, h), at(side.tail, b, h)
    table = prefix.table + h * prefix.table_head
    return (
        codes, prefix.codes.row, side.packed, scale, zero, prefix.meta_row, table, tail,
        side.tail.row,
    )  # fmt: skip
