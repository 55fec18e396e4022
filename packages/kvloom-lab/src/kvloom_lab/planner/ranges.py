"""An estimate with its bounds."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Range:
    """A best estimate between a low and a high bound."""

    low: float
    best: float
    high: float

    @classmethod
    def exactly(cls, value: float) -> Range:
        """Return a range without width."""
        return cls(value, value, value)

    def __add__(self, other: Range) -> Range:
        """Return the sum: of the bounds, and of the best estimates."""
        return Range(self.low + other.low, self.best + other.best, self.high + other.high)

    def scaled(self, factor: float) -> Range:
        """Return it multiplied by a factor above 0."""
        return Range(self.low * factor, self.best * factor, self.high * factor)

    def above(self, other: Range) -> Range:
        """Return by how much it exceeds the other, 0 or more; `other + result` covers both."""
        return Range(
            max(0.0, self.low - other.low),
            max(0.0, self.best - other.best),
            max(0.0, self.high - other.high),
        )

    def over(self, amount: float) -> Range:
        """Return amount / range: rates from times, with the bounds in ascending order."""
        return Range(amount / self.high, amount / self.best, amount / self.low)
