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
        token_begin: How many tokens the request stores before the step.
        token_end: How many it stores after it.
        blocks: int64, the blocks of its pages.
    """

    table_row: int
    batch_begin: int
    batch_end: int
    token_begin: int
    token_end: int
    blocks: Tensor

    @property
    def evicts(self) -> bool:
        """Whether these tokens are a prompt, of which some are not stored."""
        return self.token_end - self.token_begin < self.batch_end - self.batch_begin


@dataclass
class PagedStep:
    """All rows of a step: those of one token, those that evict, and the others."""

    rows: list[PagedRow]
    page: int

    def __post_init__(self) -> None:
        self.single = [row for row in self.rows if row.batch_end - row.batch_begin == 1]
        self.evicting = [row for row in self.rows if row.evicts]
        others = (row for row in self.rows if row.batch_end - row.batch_begin > 1)
        self.many = [row for row in others if not row.evicts]

    @cached_property
    def single_rows(self) -> SingleTokenRows | None:
        """The rows of one token, or None."""
        return SingleTokenRows(self.single, self.page) if self.single else None


class SingleTokenRows:
    """The rows of one token each, as tensors.

    table_rows, tokens: int64 [R], the rows in block tables and in the step's tensors. page_offset:
    int64 [R], the token's place in its page. completed_rows: the rows whose page this token
    completes; completed_blocks, completed_page_indices: int64, the blocks of these pages, and their
    indices in the request. rows_with_pages: the rows with a full page before the token;
    first_blocks: int64, the first blocks of these rows.
    """

    def __init__(self, rows: list[PagedRow], page: int) -> None:
        self.table_rows = torch.tensor([row.table_row for row in rows])
        begin, end = rows[0].batch_begin, rows[-1].batch_end
        self.tokens: slice | Tensor = slice(begin, end)
        if end - begin > len(rows):  # other rows between them
            self.tokens = torch.tensor([row.batch_begin for row in rows])
        starts = torch.tensor([row.token_begin for row in rows])
        self.page_offset = starts % page
        self.starts, self.counts, self.page = starts, starts // page, page
        self.rows = rows
        self.longest = int(starts.max()) + 1
        self._tables: dict[int, tuple[Tensor, PageTable]] = {}
        self.rows_with_pages = (self.counts > 0).nonzero()[:, 0]
        with_pages = [rows[i] for i in self.rows_with_pages.tolist()]
        self.first_blocks = torch.tensor([int(row.blocks[0]) for row in with_pages]).long()
        self.completed_rows = (self.page_offset == page - 1).nonzero()[:, 0]
        self.completes_page = len(self.completed_rows) > 0
        completed = [int(rows[i].blocks[self.counts[i]]) for i in self.completed_rows.tolist()]
        self.completed_blocks = torch.tensor(completed).long()
        self.completed_page_indices = self.counts[self.completed_rows]

    def table(self, tails: Tensor) -> PageTable:
        """Return where the tokens of each row are.

        tails: int64, of the tails of all rows of a step; layers whose tails share blocks share it.
        """
        cached = self._tables.get(id(tails))
        if cached is None:
            table = PageTable(*self._pages, tails[self.table_rows], self.page, self.longest)
            cached = self._tables[id(tails)] = tails, table
        return cached[1]

    @cached_property
    def _pages(self) -> tuple[Tensor, Tensor, Tensor]:
        """The rows' packed blocks, and how many packed tokens and tokens in all they have."""
        blocks = torch.zeros(len(self.rows), max(1, int(self.counts.max())), dtype=torch.long)
        for i, row in enumerate(self.rows):
            count = row.token_begin // self.page
            blocks[i, :count] = row.blocks[:count]
        return blocks, self.counts * self.page, self.starts + 1

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
        self.pages = torch.cat([row.blocks[: row.token_begin // step.page] for row in step.rows])
        self.page_indices = torch.cat([torch.arange(count) for count in step.counts.tolist()])
        self.owners = torch.repeat_interleave(torch.arange(len(step.rows)), step.counts)
        self.first_pages = (step.counts.cumsum(0) - step.counts)[step.rows_with_pages]
