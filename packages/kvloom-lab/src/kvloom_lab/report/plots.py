"""Figures of matplotlib: whether one can be written to a file, and how its lines differ."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvloom.errors import InputError

FORMATS = ("png", "pdf", "svg", "jpg", "jpeg", "webp")


def check_plot(path: str | Path) -> None:
    """Raise `InputError` if the suffix is not a plot format."""
    suffix = Path(path).suffix.lstrip(".").lower()
    if suffix not in FORMATS:
        raise InputError(f"plot file {str(path)!r} must end in one of .{', .'.join(FORMATS)}")


def new_figure(path: str | Path, width: float, height: float, dpi: int = 150) -> Any:
    """Return an empty figure of so many inches; raises `InputError` as `check_plot` does."""
    check_plot(path)
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=dpi, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def line_style(i: int) -> tuple[str, str, str]:
    """Return color, marker and line style of line i.

    Colors repeat after ten lines, with another marker and line style.
    """
    cycle = i // 10
    return f"C{i % 10}", "osD^vP"[cycle % 6], ("-", "--", ":", "-.")[cycle % 4]
