"""Choose one item of each layer: the least cost within a number of bytes, exactly.

Dynamic programming over bytes: after each layer, the least cost of all layers so far for every
number of bytes. Bytes are counted in their greatest common divisor; where that makes too many
cells, in a larger unit and rounded up, so that the bound holds in any case.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

CELLS = 1 << 19


class Knapsack:
    """Items of layers: their bytes, int64 [layers, items], and costs >= 0, float64 [same]."""

    def __init__(self, nbytes: np.ndarray, costs: np.ndarray) -> None:
        self.nbytes, self.costs = nbytes, costs
        self.fewest = int(nbytes.min(axis=1).sum())
        """The bytes of the smallest items."""
        self.most = int(nbytes.max(axis=1).sum())
        self.useful = [_undominated(b, c) for b, c in zip(nbytes, costs, strict=True)]

    def within(self, nbytes: int) -> list[int] | None:
        """Return the items with the least total cost in `nbytes` bytes; None: none fit."""
        if nbytes < self.fewest:
            return None
        least = self.nbytes.min(axis=1)
        extra = [self.nbytes[i, items] - least[i] for i, items in enumerate(self.useful)]
        room = min(nbytes, self.most) - self.fewest
        unit = max(math.gcd(*(int(x) for one in extra for x in one)), 1)
        unit = max(unit, -(-room // CELLS))
        cells = room // unit + 1
        best, taken = np.zeros(cells), []
        for i, items in enumerate(self.useful):
            found, choice = np.full(cells, np.inf), np.zeros(cells, np.int16)
            for item, more in zip(items, extra[i], strict=True):
                skip = -(-int(more) // unit)
                if skip >= cells:
                    continue
                cost = best[: cells - skip] + self.costs[i, item]
                better = cost < found[skip:]
                found[skip:][better], choice[skip:][better] = cost[better], item
            best = found
            taken.append(choice)
        return self._traced(taken, extra, unit, int(best.argmin()))

    def reaching(self, cost: float) -> list[int] | None:
        """Return items of the fewest bytes whose total cost is at most `cost`; None: none are.

        The bytes are found to within a thousandth.
        """
        if self.costs.min(axis=1).sum() > cost:
            return None
        low, high = self.fewest - 1, self.most  # too few, and enough
        best = self.within(high)
        while high - low > max(1, self.most // 1000):
            middle = (low + high) // 2
            found = self.within(middle)
            if found is not None and self.cost(found) <= cost:
                best, high = found, self.size(found)
            else:
                low = middle
        return best

    def cost(self, items: Sequence[int]) -> float:
        """Return the total cost of one item a layer."""
        return float(self.costs[range(len(items)), items].sum())

    def size(self, items: Sequence[int]) -> int:
        """Return the total bytes of one item a layer."""
        return int(self.nbytes[range(len(items)), items].sum())

    def _traced(
        self, taken: list[np.ndarray], extra: list[np.ndarray], unit: int, cell: int
    ) -> list[int]:
        """Return the items that lead to a cell of the last layer."""
        found = []
        for i in reversed(range(len(taken))):
            item = int(taken[i][cell])
            more = extra[i][list(self.useful[i]).index(item)]
            cell -= -(-int(more) // unit)
            found.append(item)
        return found[::-1]


def _undominated(nbytes: np.ndarray, costs: np.ndarray) -> list[int]:
    """Return the items than which no other is both cheaper and as small, by bytes."""
    found: list[int] = []
    for item in np.lexsort((costs, nbytes)):
        if not found or costs[item] < costs[found[-1]]:
            found.append(int(item))
    return found
