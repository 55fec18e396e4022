"""Numbers of a plan: an estimate with its bounds, inverse questions, and sizes such as "24GiB"."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvloom.errors import InputError
from kvloom.units import parse_amount


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


UNLIMITED = 1 << 40
"""The largest number that is tried: of tokens, or of rows."""


def largest_fitting(fits: Callable[[int], bool], beyond: int = 0) -> int:
    """Return the largest number up to `UNLIMITED` that fits; 0 if none does.

    beyond: how far to search after a number that does not fit, where a larger one may fit again.
    """
    most = UNLIMITED
    if fits(most):
        return most
    power = 1 << (most.bit_length() - 1)
    while power and not fits(power):
        power >>= 1
    if not power:
        return 0
    low, high = power, min(2 * power, most)  # low fits; high does not, or is `most`
    while high - low > 1:
        middle = (low + high) // 2
        if fits(middle):
            low = middle
        else:
            high = middle
    result, tried = low, low
    while tried < min(result + beyond, most):
        tried += 1
        if fits(tried):
            result = tried
    return result


_TOKENS = {"": 1, "k": 2**10, "m": 2**20}


def parse_tokens(option: str) -> int:
    """Read "131072", "128k" (1,024 tokens each) or "1M" (1,048,576 tokens each)."""
    size = parse_amount(option)
    whole = size is not None and (size[1] != "" or size[0].is_integer())
    if size is None or not whole or size[1] not in _TOKENS or size[0] * _TOKENS[size[1]] < 1:
        raise InputError(
            f"context {option!r} is not a number of tokens, 1 or more; give one such as 8192 or "
            "128k"
        )
    return int(size[0] * _TOKENS[size[1]])


def parse_rate(option: str) -> float:
    """Read "20tok/s" or "20": tokens per second."""
    rate = parse_amount(option)
    if rate is None or rate[1] not in ("", "tok/s", "tokens/s") or rate[0] <= 0:
        raise InputError(
            f"target {option!r} is not a speed above 0; give tokens per second, such as 20tok/s"
        )
    return rate[0]


def show_bytes(nbytes: int) -> str:
    """Return bytes as GiB, or as MiB below 0.1 GiB."""
    if nbytes >= 2**30 / 10:
        return f"{nbytes / 2**30:,.2f} GiB"
    return f"{nbytes / 2**20:,.1f} MiB"


def show_rate(tokens_s: float) -> str:
    """Return tokens per second with three digits, or fewer above 1,000."""
    return f"{tokens_s:,.0f}" if tokens_s >= 100 else f"{tokens_s:.1f}"
