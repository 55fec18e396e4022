"""The rows of one step: where their tokens, pages and tails are. Built once for all layers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ..kernels import PageTable


@dataclass
class PagedRow:
    """One request's tokens of a step.

    Attributes:
        table_row: The request's row in the engine's block tables.
        batch_begin: Of its tokens in the step's tensors.
        batch_end: Likewise.
        token_begin: The index of the first of these tokens in the request.
        token_end: The index after the last one.
        blocks: int64, the blocks of its pages.
    """

    table_row: int
    batch_begin: int
    batch_end: int
    token_begin: int
    token_end: int
    blocks: Tensor


@dataclass
class PagedStep:
    """All rows of a step; those of one token have the order of `SingleTokenRows`."""

    rows: list[PagedRow]
    page: int

    @cached_property
    def multi_token_rows(self) -> list[PagedRow]:
        """The rows of several tokens."""
        return [row for row in self.rows if row.batch_end - row.batch_begin > 1]

    @cached_property
    def single_rows(self) -> SingleTokenRows | None:
        """The rows of one token, or None."""
        rows = [row for row in self.rows if row.batch_end - row.batch_begin == 1]
        return SingleTokenRows.of_rows(rows, self.page) if rows else None


class SingleTokenRows:
    """Rows of one token each, as tensors.

    starts: int64 [R], the tokens before it. blocks: int64 [R, width], of each row's pages, one at
    least. table_rows, tokens: int64 [R], the rows in block tables and in the step's tensors (None:
    in this order).

    page_offset: int64 [R], the token's place in its page. completed_rows: the rows whose page this
    token completes; completed_blocks, completed_page_indices: int64, the blocks of these pages, and
    their indices in the request. rows_with_pages: the rows with a full page before the token;
    first_blocks: int64, the first blocks of these rows.
    """

    def __init__(
        self,
        starts: Tensor,
        blocks: Tensor,
        page: int,
        table_rows: Tensor | None = None,
        tokens: slice | Tensor | None = None,
    ) -> None:
        self.starts, self.blocks, self.page = starts, blocks, page
        everything = slice(None)
        self.table_rows = everything if table_rows is None else table_rows
        self.tokens = everything if tokens is None else tokens
        self.page_offset, self.counts = starts % page, starts // page
        self.longest = int(starts.max()) + 1
        self._tables: dict[int, tuple[Tensor, PageTable]] = {}
        self.rows_with_pages = (self.counts > 0).nonzero()[:, 0]
        self.first_blocks = blocks[self.rows_with_pages, 0]
        self.completed_rows = (self.page_offset == page - 1).nonzero()[:, 0]
        self.completes_page = len(self.completed_rows) > 0
        self.completed_page_indices = self.counts[self.completed_rows]
        self.completed_blocks = blocks[self.completed_rows, self.completed_page_indices]

    @classmethod
    def of_rows(cls, rows: list[PagedRow], page: int) -> SingleTokenRows:
        """Return rows that share their pages in all layers."""
        begin, end = rows[0].batch_begin, rows[-1].batch_end
        tokens: slice | Tensor = slice(begin, end)
        if end - begin > len(rows):  # other rows between them
            tokens = torch.tensor([row.batch_begin for row in rows])
        starts = torch.tensor([row.token_begin for row in rows])
        blocks = torch.zeros(len(rows), int(starts.max()) // page + 1, dtype=torch.long)
        for i, row in enumerate(rows):
            count = row.token_end // page
            blocks[i, :count] = row.blocks[:count]
        table_rows = torch.tensor([row.table_row for row in rows])
        return cls(starts, blocks, page, table_rows, tokens)

    def table(self, tails: Tensor) -> PageTable:
        """Return where the tokens of each row are.

        tails: int64, of the tails of all rows of a step; layers whose tails share blocks share it.
        """
        cached = self._tables.get(id(tails))
        if cached is None:
            packed, tokens = self.counts * self.page, self.starts + 1
            own = tails[self.table_rows]
            table = PageTable(self.blocks, packed, tokens, own, self.page, self.longest)
            cached = self._tables[id(tails)] = tails, table
        return cached[1]

    @cached_property
    def unrolled(self) -> UnrolledPages:
        """The pages and the exact tokens of all rows, for attention to them one by one."""
        return UnrolledPages(self)


class UnrolledPages:
    """All full pages of the rows of one token.

    pages: int64 [P]. page_indices: int64 [P], of these in their requests. owners: int64 [P], their
    rows. first_pages: int64, where first pages are among these. longest: the most exact tokens of a
    row. seen: bool [R, longest], those that it has.
    """

    def __init__(self, step: SingleTokenRows) -> None:
        self.longest = int(step.page_offset.max()) + 1
        self.seen = torch.arange(self.longest) <= step.page_offset[:, None]
        full = torch.arange(step.blocks.shape[1]) < step.counts[:, None]
        self.pages, (self.owners, self.page_indices) = step.blocks[full], full.nonzero().unbind(1)
        self.first_pages = (step.counts.cumsum(0) - step.counts)[step.rows_with_pages]
