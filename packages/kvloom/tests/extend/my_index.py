"""An index: pages of consecutive tokens, found by their mean key."""

from dataclasses import dataclass
from typing import ClassVar

import kvloom
from kvloom.recall import Finder, Index, dots, grown, reduce_query_heads, select_pages


class MeanFinder(Finder):  # mean keys [B, Hk, pages, D]; padding counts as keys of zeros
    unit, means, tensors = 0, None, ("means",)

    def extend(self, keys, nonpadding):  # keys [B, Hk, T, D], nonpadding: bool [B, 1, T]
        pages = (keys * nonpadding.unsqueeze(-1)).unflatten(2, (-1, self.unit)).mean(dim=3)
        self.means = grown(self.means, pages)
        self.tokens += keys.shape[2]

    def find(self, q, tokens, query_heads, keys):  # q [B, Hq, D] -> slots [B, Hk, tokens]
        scores = reduce_query_heads(dots(q, self.means), self.means.shape[1], query_heads)
        return select_pages(scores, tokens // self.unit, self.unit)


@kvloom.register_index
@dataclass(frozen=True)
class Means(Index):
    """Pages of `unit` tokens; the base class indexes whole units."""

    unit: int = 8
    kind: ClassVar[str] = "means"

    def finder(self):
        finder = MeanFinder()
        finder.unit = self.unit
        return finder

    def nbytes(self, tokens, head_dim, itemsize):  # one mean key a page
        return tokens // self.unit * head_dim * itemsize
