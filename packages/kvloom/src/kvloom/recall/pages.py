"""Pages of consecutive tokens (Quest, arXiv:2406.10774, section 3).

The index stores the least and the largest of a page's keys in every channel, which bound q . k for
all of them. Departures: key/value heads choose for their group of queries (the paper's code: every
query head); a page that is not full is always read; a step reads the pages that fit the budget (the
paper's code: three at least).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..kernels import ops
from ..registry.fields import check_whole
from .index import Finder, Index, grown


@dataclass(frozen=True)
class Pages(Index):
    """Bounds of pages of consecutive tokens (Quest, arXiv:2406.10774, section 3).

    Attributes:
        page: Tokens of a page.
    """

    page: int = 16
    kind: ClassVar[str] = "pages"

    def __post_init__(self) -> None:
        check_whole("page", self.page, 1)

    def finder(self) -> PageFinder:
        """Return an empty index."""
        return PageFinder(self)

    @property
    def unit(self) -> int:
        """The tokens of a page."""
        return self.page

    def nbytes(self, tokens: int, head_dim: int, itemsize: int) -> int:
        """Return the bytes of two bounds per page and channel."""
        return 2 * (tokens // self.page) * head_dim * itemsize


class PageFinder(Finder):
    """Bounds low, high [B, Hk, pages, D] of one layer's keys, in their dtype."""

    tensors = ("low", "high")
    low: Tensor
    high: Tensor

    def __init__(self, options: Pages) -> None:
        super().__init__()
        self.page = options.page

    def extend(self, keys: Tensor, nonpadding: Tensor) -> None:
        """Add the bounds of whole pages of keys [B, Hk, T, D]."""
        bounds = ops.page_bounds(keys, self.page, nonpadding)
        for name, new in zip(self.tensors, bounds, strict=True):
            setattr(self, name, grown(getattr(self, name) if self.tokens else None, new))
        self.tokens += keys.shape[2]

    def parts(self) -> Tensor:
        """Return the page of each slot, int64 [B, Hk, N]."""
        page = torch.arange(self.tokens, device=self.low.device) // self.page
        return page.expand(*self.low.shape[:2], -1)

    def find(self, q: Tensor, tokens: int, query_heads: str, keys: Callable[[], Tensor]) -> Tensor:
        """Return the tokens of the pages with the largest bounds."""
        return self.choose(self.scores(q, query_heads), tokens)

    def scores(self, q: Tensor, query_heads: str) -> Tensor:
        """Return upper bounds of q . k in the pages, q [B, Hq, D], see `select.reference`."""
        return ops.page_scores(q, self.low, self.high, query_heads)

    def choose(self, scores: Tensor, tokens: int) -> Tensor:
        """Return slots int64 [B, Hk or Hq, tokens] of the best pages, by scores of `scores`."""
        return ops.select_pages(scores, tokens // self.page, self.page)
