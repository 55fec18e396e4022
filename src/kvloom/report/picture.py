"""Which picture files can be written, and how the lines of a picture differ."""

from __future__ import annotations

from pathlib import Path

from ..errors import InputError

FORMATS = ("png", "pdf", "svg", "jpg", "jpeg", "webp")


def check(path: str | Path) -> None:
    """Raise `InputError` if a picture cannot be written there."""
    suffix = Path(path).suffix.lstrip(".").lower()
    if suffix not in FORMATS:
        raise InputError(f"plot file {str(path)!r} must end in one of .{', .'.join(FORMATS)}")


def style(i: int) -> tuple[str, str, str]:
    """Color, marker and line style of the i-th of many: past ten, colors return with others."""
    turn = i // 10
    return f"C{i % 10}", "osD^vP"[turn % 6], ("-", "--", ":", "-.")[turn % 4]
