"""Pages of consecutive tokens (Quest, arXiv:2406.10774, section 3), and the exact top k.

A page is known by the least and the largest of its keys in every channel, which bound q . k for all
of them. Departures: key/value heads choose for their group of queries (the paper's code: every
query head); a page that is not full is always read; so many pages are read as fit the budget (the
paper's code: three at least).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..kernels import ops
from ..kernels.select import reference as ref
from .index import Finder, Index, grown, whole


@dataclass(frozen=True)
class Pages(Index):
    """Bounds of pages of `page` tokens."""

    page: int = 16
    kind: ClassVar[str] = "pages"

    def __post_init__(self) -> None:
        whole("page", self.page, 1)

    def finder(self) -> PageFinder:
        """Return an empty index."""
        return PageFinder(self)

    @property
    def unit(self) -> int:
        """A page."""
        return self.page

    def nbytes(self, tokens: int, head_dim: int, itemsize: int) -> int:
        """Two bounds a page and channel."""
        return 2 * (tokens // self.page) * head_dim * itemsize


class PageFinder(Finder):
    """Bounds low, high [B, Hk, pages, D] of one layer's keys, in their dtype."""

    low: Tensor
    high: Tensor

    def __init__(self, options: Pages) -> None:
        super().__init__()
        self.page = options.page

    @property
    def tensors(self) -> tuple[str, ...]:
        """Names of the attributes that are tensors."""
        return ("low", "high")

    def extend(self, keys: Tensor, real: Tensor) -> None:
        """Add the bounds of whole pages of keys [B, Hk, T, D]."""
        bounds = ops.page_bounds(keys, self.page, real)
        for name, new in zip(self.tensors, bounds, strict=True):
            setattr(self, name, grown(getattr(self, name) if self.tokens else None, new))
        self.tokens += keys.shape[2]

    def parts(self) -> Tensor:
        """The page of each slot, int64 [B, Hk, N]."""
        page = torch.arange(self.tokens, device=self.low.device) // self.page
        return page.expand(*self.low.shape[:2], -1)

    def find(self, q: Tensor, tokens: int, group: str, keys: Callable[[], Tensor]) -> Tensor:
        """The tokens of the pages with the largest bounds."""
        return self.choose(self.scores(q, group), tokens)

    def scores(self, q: Tensor, group: str) -> Tensor:
        """The most that the queries' products [B, Hq, D] can be in the pages: [B, Hk or Hq, P]."""
        return ops.page_scores(q, self.low, self.high, group)

    def choose(self, scores: Tensor, tokens: int) -> Tensor:
        """The tokens of the best pages."""
        return ops.select_pages(scores, tokens // self.page, self.page)


@dataclass(frozen=True)
class TopK(Index):
    """No index: every key is read to find those with the largest q . k. The oracle of the others.

    ALiBi's bias does not enter.
    """

    kind: ClassVar[str] = "topk"
    reads_keys: ClassVar[bool] = True

    def finder(self) -> TopKFinder:
        """Return an empty index."""
        return TopKFinder()

    def nbytes(self, tokens: int, head_dim: int, itemsize: int) -> int:
        """Which tokens are padding."""
        return 0


class TopKFinder(Finder):
    """Nothing but which tokens are padding: bool [B, 1, N], where there is any."""

    def __init__(self) -> None:
        super().__init__()
        self.real: Tensor | None = None

    @property
    def tensors(self) -> tuple[str, ...]:
        """Names of the attributes that are tensors."""
        return () if self.real is None else ("real",)

    def extend(self, keys: Tensor, real: Tensor) -> None:
        """Count keys [B, Hk, T, D], and note padding."""
        if self.real is not None or not bool(real.all()):
            known = real.new_ones(real.shape[0], 1, self.tokens) if self.real is None else self.real
            self.real = torch.cat([known, real], dim=2)
        self.tokens += keys.shape[2]

    def find(self, q: Tensor, tokens: int, group: str, keys: Callable[[], Tensor]) -> Tensor:
        """The tokens with the largest q . k."""
        k = keys()
        scores = ref.together(ref.dots(q, k), k.shape[1], group)
        if self.real is not None:
            scores = scores.masked_fill(~self.real, -torch.inf)
        return scores.topk(tokens, dim=-1).indices
