"""The rows of one step: where their tokens, pages and tails are. Built once for all layers."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from ..kernels import PageTable


@dataclass
class PagedRow:
    """One request's tokens of a step.

    at: its row in the engine's block tables. begin, end: of its tokens in the step's tensors.
    start, stop: the numbers of these tokens in the request. blocks: int64, of its pages.
    """

    at: int
    begin: int
    end: int
    start: int
    stop: int
    blocks: Tensor


@dataclass
class PagedStep:
    """All rows of a step; `single` are those of one token, in the order of `Rows` of them."""

    rows: list[PagedRow]
    page: int
    many: list[PagedRow] = field(init=False)

    def __post_init__(self) -> None:
        self.single = [row for row in self.rows if row.end - row.begin == 1]
        self.many = [row for row in self.rows if row.end - row.begin > 1]

    @cached_property
    def decode(self) -> Decode | None:
        """The rows of one token together, or None."""
        return Decode(self.single, self.page) if self.single else None


class Decode:
    """The rows of one token each, as tensors.

    at, tokens: int64 [R], the rows in block tables and in the step's tensors. inside: int64 [R],
    the token's place in its page. full: the rows whose page this token fills, with the blocks that
    it fills and their numbers in the request; fills: whether there are any. paged: the rows with a
    full page before the token, and firsts: int64, their first pages.
    """

    def __init__(self, rows: list[PagedRow], page: int) -> None:
        self.at = torch.tensor([row.at for row in rows])
        begin, end = rows[0].begin, rows[-1].end
        self.tokens: slice | Tensor = slice(begin, end)
        if end - begin > len(rows):  # other rows between them
            self.tokens = torch.tensor([row.begin for row in rows])
        starts = torch.tensor([row.start for row in rows])
        self.inside = starts % page
        self.starts, self.counts, self.page = starts, starts // page, page
        self.rows = rows
        self.longest = int(starts.max()) + 1
        self._tables: dict[int, tuple[Tensor, PageTable]] = {}
        self.paged = (self.counts > 0).nonzero()[:, 0]
        self.firsts = torch.tensor([int(rows[i].blocks[0]) for i in self.paged.tolist()]).long()
        self.full = (self.inside == page - 1).nonzero()[:, 0]
        self.fills = len(self.full) > 0
        self.filled = torch.tensor(
            [int(rows[i].blocks[self.counts[i]]) for i in self.full.tolist()]
        )
        self.filled = self.filled.long()
        self.filled_numbers = self.counts[self.full]

    def table(self, tails: Tensor) -> PageTable:
        """Return where the tokens of each row are.

        tails: int64, of the tails of all rows of a step; layers whose tails share blocks share it.
        """
        cached = self._tables.get(id(tails))
        if cached is None:
            table = PageTable(*self._pages, tails[self.at], self.page, self.longest)
            cached = self._tables[id(tails)] = tails, table
        return cached[1]

    @cached_property
    def _pages(self) -> tuple[Tensor, Tensor, Tensor]:
        """The rows' packed blocks, and how many packed tokens and tokens in all they have."""
        blocks = torch.zeros(len(self.rows), max(1, int(self.counts.max())), dtype=torch.long)
        for i, row in enumerate(self.rows):
            count = row.start // self.page
            blocks[i, :count] = row.blocks[:count]
        return blocks, self.counts * self.page, self.starts + 1

    @cached_property
    def apart(self) -> Apart:
        """The pages and the exact tokens of all rows, for attention to them one by one."""
        return Apart(self)


class Apart:
    """All full pages of the rows of one token.

    pages: int64 [P]; numbers: int64 [P], of these in their rows; owner: int64 [P], their rows;
    first: int64, the places of first pages among these. longest: the most exact tokens of a row;
    seen: bool [R, longest], those that it has.
    """

    def __init__(self, step: Decode) -> None:
        self.longest = int(step.inside.max()) + 1
        self.seen = torch.arange(self.longest) <= step.inside[:, None]
        self.pages = torch.cat([row.blocks[: row.start // step.page] for row in step.rows])
        self.numbers = torch.cat([torch.arange(count) for count in step.counts.tolist()])
        self.owner = torch.repeat_interleave(torch.arange(len(step.rows)), step.counts)
        self.first = (step.counts.cumsum(0) - step.counts)[step.paged]
