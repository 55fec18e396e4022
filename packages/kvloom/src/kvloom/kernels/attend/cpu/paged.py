"""Decode attention to pages of packed tokens on CPU tensors: the cases covered, and the call.

Each batch row has its own pages, by a table of blocks, and its own number of tokens.
`decode_kernel` does it, `coverage` names the formats. Importing this does not import Numba.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ...arguments import MATRIX, TOKENS, contiguous_rows, strides
from ...dispatch import once
from ...quantize.encoding import Encoding
from ..kv_view import KVView
from ..pages import PageTable
from ..reference import First, State
from . import coverage
from .arguments import PAGED
from .layer import KernelAttention

_NO_SINKS = ((0,) * TOKENS.numbers,) * 2
_NO_TOKEN = ((0,) * MATRIX.numbers,) * 2

_TILE = 128  # tokens that the kernel reads at a time, where codes fill bytes in powers of two


def problems(tokens: int, like: Tensor, keys: Any, values: Any, page: int) -> list[str]:
    """Return why no kernel reads pages of `page` tokens in these formats.

    like: exact keys [blocks, H, page, D]. keys, values: formats of packed tokens, or None.
    """
    found = coverage.step_problems(1, tokens, like, (keys, values), _refuse)
    if page % _TILE:
        found.append(f"a page of {page} tokens is not a multiple of {_TILE}")
    return found


def _refuse(how: Encoding | None) -> list[str]:
    if how is None:
        return ["pages of exact tokens are not read by the table"]
    if how.bits == 1.5:
        return ["at 1.5 bit, tokens share bytes across the tiles of a page"]
    return []


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
        """Attend q [B, Hq, 1, D] as `pages.attend_pages` does; packed tokens are not rounded."""
        blocks, packed, lengths, tails = table.contiguous
        count, like = 0, keys.tail.dtype
        sink_keys, sink_values = _NO_SINKS
        if sinks is not None:
            count = sinks[0].shape[2]
            sinks = contiguous_rows(sinks[0].to(like)), contiguous_rows(sinks[1].to(like))
            sink_keys, sink_values = strides(sinks[0], 3), strides(sinks[1], 3)
        new_keys, new_values = _NO_TOKEN
        if new is not None:
            new = contiguous_rows(new[0].to(like)), contiguous_rows(new[1].to(like))
            new_keys, new_values = strides(new[0], 2), strides(new[1], 2)
        return self._layer.run(
            q, keys, values, table.longest, scale,
            table=blocks.data_ptr(), table_row=8 * blocks.shape[1], packed=packed.data_ptr(),
            lengths=lengths.data_ptr(), tails=tails.data_ptr(), sinks=count, sink_keys=sink_keys,
            sink_values=sink_values, new_keys=new_keys, new_values=new_values,
        )  # fmt: skip


attend = once(Paged)
