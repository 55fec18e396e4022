"""Choose one item of each layer: the least cost within a number of bytes, exactly.

Dynamic programming over bytes: after each layer, the least cost of all layers so far for every
number of bytes. Bytes are counted in their greatest common divisor; where that makes too many
cells, in a larger unit and rounded up, so that the bound holds in any case.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

CELLS = 1 << 17


class Knapsack:
    """Items of layers: their bytes, int64 [layers, items], and costs, float64 [same]."""

    def __init__(self, nbytes: np.ndarray, costs: np.ndarray) -> None:
        self.nbytes, self.costs = nbytes, costs
        self.fewest = int(nbytes.min(axis=1).sum())
        """The bytes of the smallest items."""
        self.most = int(nbytes.max(axis=1).sum())
        self.useful = [_undominated(b, c) for b, c in zip(nbytes, costs, strict=True)]

    def within(self, nbytes: int) -> list[int] | None:
        """Return the items with the least total cost in `nbytes` bytes; None if none fit."""
        if nbytes < self.fewest:
            return None
        table = self._table(min(nbytes, self.most) - self.fewest, CELLS)
        return self._traced(table, len(table.best) - 1)

    def reaching(self, cost: float) -> list[int] | None:
        """Return items of the fewest bytes whose total cost is at most `cost`, or None."""
        if self.costs.min(axis=1).sum() > cost:
            return None
        table = self._table(self.most - self.fewest, CELLS)
        return self._traced(table, int((table.best <= cost).argmax()))

    def front(self, count: int) -> list[list[int]]:
        """Return the items of the least cost for `count` numbers of bytes, ascending."""
        table = self._table(self.most - self.fewest, CELLS // 4)
        most = len(table.best) - 1
        cells = np.geomspace(self.fewest, self.most, count) - self.fewest
        return [self._traced(table, min(most, int(x // table.unit))) for x in cells]

    def cost(self, items: Sequence[int]) -> float:
        """Return the total cost of one item a layer."""
        return float(self.costs[range(len(items)), items].sum())

    def size(self, items: Sequence[int]) -> int:
        """Return the total bytes of one item a layer."""
        return int(self.nbytes[range(len(items)), items].sum())

    def _table(self, room: int, cells: int) -> _Table:
        """Fill the table for all numbers of bytes up to `room` more than the fewest."""
        least = self.nbytes.min(axis=1)
        extra = [self.nbytes[i, items] - least[i] for i, items in enumerate(self.useful)]
        unit = max(math.gcd(*(int(x) for sizes in extra for x in sizes)), -(-room // cells), 1)
        skips = [[-(-int(x) // unit) for x in sizes] for sizes in extra]
        best, taken = np.zeros(room // unit + 1), []
        for i, items in enumerate(self.useful):
            lowest, choice = np.full(len(best), np.inf), np.zeros(len(best), np.int16)
            for place, (item, skip) in enumerate(zip(items, skips[i], strict=True)):
                if skip < len(best):
                    cost = best[: len(best) - skip] + self.costs[i, item]
                    better = cost < lowest[skip:]
                    np.copyto(lowest[skip:], cost, where=better)
                    np.copyto(choice[skip:], np.int16(place), where=better)
            best = lowest
            taken.append(choice)
        return _Table(best, taken, skips, unit)

    def _traced(self, table: _Table, cell: int) -> list[int]:
        """Return the items that lead to a cell of the last layer."""
        items = []
        for i in reversed(range(len(table.taken))):
            place = int(table.taken[i][cell])
            items.append(self.useful[i][place])
            cell -= table.skips[i][place]
        return items[::-1]


class _Table(NamedTuple):
    """The least cost of all layers within a number of cells, float64 [cells], never rising.

    taken: of each layer, which useful item, int16 [cells]. skips: the cells of each useful item.
    unit: the bytes of a cell.
    """

    best: np.ndarray
    taken: list[np.ndarray]
    skips: list[list[int]]
    unit: int


def _undominated(nbytes: np.ndarray, costs: np.ndarray) -> list[int]:
    """Return the Pareto-optimal items, by ascending bytes."""
    items: list[int] = []
    for item in np.lexsort((costs, nbytes)):
        if not items or costs[item] < costs[items[-1]]:
            items.append(int(item))
    return items
