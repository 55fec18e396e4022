"""Pages of packed tokens in a pool of blocks, and attention to them in plain torch.

An engine with paged memory gives each request a list of blocks. A full page is packed in its block;
the exact tokens of a page that is not full are in a block of their own.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from .kv_view import KVView
from .reference import First, State, attend


@dataclass(frozen=True, eq=False)
class PageTable:
    """Where the tokens of each batch row are; the layers of a step may share it.

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

    @cached_property
    def contiguous(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The four tensors, contiguous, as kernels read them by address."""
        return (
            self.blocks.contiguous(), self.packed.contiguous(), self.tokens.contiguous(),
            self.tails.contiguous(),
        )  # fmt: skip


def attend_pages(
    q: Tensor,
    keys: KVView,
    values: KVView,
    table: PageTable,
    scale: float,
    *,
    sinks: First | None = None,
    new: First | None = None,
) -> State:
    """Attend q [B, Hq, 1, D], each row to its own tokens.

    keys, values: of all blocks, packed [blocks, H, page, D], and as tails exact tokens
    [blocks, H, page, D]. sinks: exact keys and values [blocks, H, S, D], S up to `page`: a row
    reads those of its first packed page in place of the page's first S tokens. Keys before RoPE
    are rotated to their places in the row. new: keys and values
    [B, H, 1, D] of the last token of each row, which are stored in its tail before it attends.
    """
    rows = []
    for i, (packed, tokens) in enumerate(
        zip(table.packed.tolist(), table.tokens.tolist(), strict=True)
    ):
        sides = []
        for view, first, last in zip(
            (keys, values), sinks or (None, None), new or (None, None), strict=True
        ):
            if last is not None:
                view.tail[table.tails[i], :, tokens - packed - 1] = last[i, :, 0]
            x = _tokens(view, table, i, packed, tokens)
            if first is not None and packed:
                x[0, :, : first.shape[2]] = first[table.blocks[i, 0]]
            sides.append(x)
        rows.append(attend(q[i : i + 1], sides[0], sides[1], scale))
    return State(torch.cat([row.out for row in rows]), torch.cat([row.lse for row in rows]))


def _tokens(view: KVView, table: PageTable, row: int, packed: int, tokens: int) -> Tensor:
    """Return a copy of one row's tokens, unpacked: [1, H, tokens, D]."""
    exact = view.tail[table.tails[row], :, : tokens - packed][None]
    pages = view.packed
    if not packed or pages is None:
        return exact.clone()
    blocks = table.blocks[row, : packed // table.page]
    begin = table.page * torch.arange(len(blocks), device=blocks.device)
    chosen = pages._replace(  # type: ignore[attr-defined]
        codes=pages.codes[blocks], scale=pages.scale[blocks], zero=pages.zero[blocks],
        at=None if pages.rope is None else begin[:, None, None],
    )  # fmt: skip
    old = chosen.tensor().transpose(0, 1).flatten(1, 2)[None]
    return torch.cat([old, exact], dim=2)
