"""Pages of packed tokens in a pool of blocks, and attention to them in plain torch.

An engine with paged memory gives each request a list of blocks. A full page is packed in its block;
the exact tokens of a page that is not full are in a block of their own.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .kv_view import KVView
from .reference import State, attend


class PageTable(NamedTuple):
    """Where the tokens of each batch row are.

    blocks: int64 [B, width], of its packed pages in order. packed: int64 [B], tokens in these,
    whole pages. tokens: int64 [B], packed and exact ones. tails: int64 [B], the block of its exact
    tokens. page: tokens of a page. longest: the most tokens of a row.
    """

    blocks: Tensor
    packed: Tensor
    tokens: Tensor
    tails: Tensor
    page: int
    longest: int


def attend_pages(
    q: Tensor, keys: KVView, values: KVView, table: PageTable, scale: float, *, skip: int = 0
) -> State:
    """Attend q [B, Hq, 1, D], each row to its own tokens.

    keys, values: of all blocks, packed [blocks, H, page, D], and as tails exact tokens
    [blocks, H, page, D]. skip: the first tokens of a row's first packed page that it does not read.
    """
    rows = []
    for i, (packed, tokens) in enumerate(
        zip(table.packed.tolist(), table.tokens.tolist(), strict=True)
    ):
        sides = [_tokens(view, table, i, packed, tokens) for view in (keys, values)]
        k, v = (x[:, :, min(skip, packed) :] for x in sides)
        rows.append(attend(q[i : i + 1], k, v, scale))
    return State(*(torch.cat(parts) for parts in zip(*rows, strict=True)))


def _tokens(view: KVView, table: PageTable, row: int, packed: int, tokens: int) -> Tensor:
    """Return one row's tokens, unpacked: [1, H, tokens, D]."""
    exact = view.tail[table.tails[row], :, : tokens - packed][None]
    pages = view.packed
    if not packed or pages is None:
        return exact
    blocks = table.blocks[row, : packed // table.page]
    chosen = pages._replace(  # type: ignore[attr-defined]
        codes=pages.codes[blocks], scale=pages.scale[blocks], zero=pages.zero[blocks]
    )
    old = chosen.tensor().transpose(0, 1).flatten(1, 2)[None]
    return torch.cat([old, exact], dim=2)
