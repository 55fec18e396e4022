"""Sizes and ages as users write them: "24GiB", "30d"."""

from __future__ import annotations

import re

from .errors import InputError

__all__ = ["parse_amount", "parse_bytes", "parse_seconds"]

_BYTES = {
    "b": 1,
    "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
    "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
}  # fmt: skip
_SECONDS = {"s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_NUMBER = re.compile(r"((?:\d{1,18}|\d{1,3}(?:,\d{3}){1,5})(?:\.\d{1,18})?)\s*([a-z/]*)")


def parse_amount(option: str) -> tuple[float, str] | None:
    """Return the number and the unit in lower case; None if it is neither. Commas: thousands."""
    match = _NUMBER.fullmatch(option.strip().lower())
    return None if match is None else (float(match[1].replace(",", "")), match[2])


def parse_bytes(option: int | str, name: str = "memory") -> int:
    """Read "24GiB" (2**30 bytes each) or "80GB" (10**9 bytes each); a number is one of bytes.

    name: of the option, for the message.
    """
    size = parse_amount(option) if isinstance(option, str) else (option, "b")
    if size is None or size[1] not in _BYTES or size[0] * _BYTES[size[1]] < 1:
        raise InputError(
            f"{name} {option!r} is not a size; give a number with a unit, such as 24GiB or 80GB"
        )
    return int(size[0] * _BYTES[size[1]])


def parse_seconds(option: float | str, name: str) -> float:
    """Read "30d", "12h" or "10min"; a number is one of seconds."""
    age = parse_amount(option) if isinstance(option, str) else (option, "s")
    if age is None or age[1] not in _SECONDS or not age[0] > 0:
        raise InputError(
            f"{name} {option!r} is not an age; give a number with a unit, such as 30d or 12h"
        )
    return age[0] * _SECONDS[age[1]]
