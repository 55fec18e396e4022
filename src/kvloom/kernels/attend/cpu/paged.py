"""Decode attention to pages of packed tokens on CPU tensors: the cases covered, and the call.

Each batch row has its own pages, by a table of blocks, and its own number of tokens.
`decode_kernel` does it, `coverage` names the formats. Importing this does not import Numba.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ...arguments import MATRIX, TOKENS, strides
from ..kv_view import KVView
from ..pages import PageTable, contiguous_rows
from ..reference import First, State
from . import coverage
from .arguments import PAGED
from .layer import KernelAttention

_NO_SINKS = ((0,) * TOKENS.numbers,) * 2
_NO_TOKEN = ((0,) * MATRIX.numbers,) * 2

_TILE = 128  # tokens that the kernel reads at a time, where codes fill bytes in powers of two


def problems(
    tokens: int, like: Tensor, page: int, keys: Any = None, values: Any = None
) -> list[str]:
    """Return why no kernel reads pages of `page` tokens in these formats.

    like: exact keys [blocks, H, page, D]. keys, values: formats of packed tokens, or None.
    """
    found = list(coverage.problems(like.shape[-1], like.shape[1], like.dtype, keys, values))
    if not like.is_cpu:
        found.append(f"the tensors are on {like.device.type}")
    if tokens != 1:
        found.append(f"{tokens} queries a step are not one")
    for side, fmt in (("keys", keys), ("values", values)):
        if fmt is None:
            found.append(f"{side}: pages of exact tokens are not read by the table")
        elif fmt.bits == 1.5:
            found.append(f"{side}: at 1.5 bit, tokens share bytes across the tiles of a page")
    if page % _TILE:
        found.append(f"a page of {page} tokens is not a multiple of {_TILE}")
    return found


class Paged:
    """Attention of one layer to pages: keeps what does not change between its steps."""

    def __init__(self, q: Tensor, keys: KVView, values: KVView, table: PageTable) -> None:
        heads = keys.tail.shape[1]
        self._layer = KernelAttention(q, keys, values, heads, PAGED, table.page)

    def __call__(
        self,
        q: Tensor,
        keys: KVView,
        values: KVView,
        table: PageTable,
        scale: float,
        *,
        sinks: First | None = None,
        new: First | None = None,
    ) -> State:
        """Attend as `attend` does."""
        blocks, packed, lengths, tails = table.contiguous
        count, like = 0, keys.tail.dtype
        sink_keys, sink_values = _NO_SINKS
        if sinks is not None:
            count = sinks[0].shape[2]
            sinks = contiguous_rows(sinks[0], like), contiguous_rows(sinks[1], like)
            sink_keys, sink_values = strides(sinks[0], 3), strides(sinks[1], 3)
        new_keys, new_values = _NO_TOKEN
        if new is not None:
            new = contiguous_rows(new[0], like), contiguous_rows(new[1], like)
            new_keys, new_values = strides(new[0], 2), strides(new[1], 2)
        return self._layer.run(
            q, keys, values, table.longest, scale, None, None, None, False, causal=0,
            table=blocks.data_ptr(), table_row=8 * blocks.shape[1], packed=packed.data_ptr(),
            lengths=lengths.data_ptr(), tails=tails.data_ptr(), sinks=count, sink_keys=sink_keys,
            sink_values=sink_values, new_keys=new_keys, new_values=new_values,
        )  # fmt: skip


def attend(
    q: Tensor, keys: KVView, values: KVView, table: PageTable, scale: float, **options: Any
) -> State:
    """Attend q [B, Hq, 1, D] as `reference.attend_pages` does; packed tokens are not rounded."""
    return Paged(q, keys, values, table)(q, keys, values, table, scale, **options)
