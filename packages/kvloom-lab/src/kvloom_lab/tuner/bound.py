"""What a recipe is tuned for: the least divergence within some bytes, or the fewest bytes within
some divergence.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvloom.errors import InputError

from .knapsack import Knapsack

if TYPE_CHECKING:
    from .repair import Measured


@dataclass(frozen=True)
class Bound:
    """A share of the exact cache's bytes, or a mean divergence `kl` in nats; one of the two.

    exact_nbytes: of the exact cache.
    """

    share: float | None
    kl: float | None
    exact_nbytes: int

    def __post_init__(self) -> None:
        if (self.share is None) == (self.kl is None):
            raise InputError("give either bytes, such as 0.2, or kl, such as 0.01")
        if self.share is not None and not 0 < self.share <= 1:
            raise InputError(f"bytes={self.share:g} must be above 0 and at most 1: a share")
        if self.kl is not None and not self.kl > 0:
            raise InputError(f"kl={self.kl:g} must be above 0: a mean divergence in nats")

    def __str__(self) -> str:
        return f"kl={self.kl:g}" if self.share is None else f"bytes={self.share:g}"

    @property
    def nbytes(self) -> int:
        """The most bytes, where bytes are bounded."""
        assert self.share is not None
        return int(self.share * self.exact_nbytes)

    def check(self, fewest: int) -> None:
        """Raise `InputError` if even the smallest recipe, of `fewest` bytes, is too large."""
        if self.share is not None and self.nbytes < fewest:
            smallest = math.ceil(1e4 * fewest / self.exact_nbytes) / 1e4
            raise InputError(
                f"no recipe takes {self.share:.4g} of the exact cache's bytes at this context; "
                f"the nearest bound is bytes={smallest:.4f}"
            )

    def solve(self, knapsack: Knapsack, margin: float = 1.0) -> list[int] | None:
        """Return one item a layer; margin: a factor of the bound on `kl`.

        None where no items are within the bound.
        """
        if self.kl is None:
            return knapsack.within(self.nbytes)
        return knapsack.reaching(self.kl * margin)

    def wasted_by(self, knapsack: Knapsack) -> bool:
        """Return whether even the largest items leave bytes unused."""
        return self.share is not None and knapsack.most < self.nbytes

    def met_by(self, one: Measured) -> bool:
        """Return whether a measured recipe is within the bound."""
        return one.nbytes <= self.nbytes if self.kl is None else one.mean <= self.kl

    def rank(self, one: Measured) -> tuple[bool, float]:
        """Return a key that sorts measured recipes, the best first."""
        met = self.met_by(one)
        return not met, one.nbytes if met and self.kl is not None else one.mean
