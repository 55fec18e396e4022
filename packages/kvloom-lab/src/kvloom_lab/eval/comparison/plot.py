"""A comparison as a picture: perplexity and needles against bits per value."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ...report.plots import line_style, new_figure
from .rows import Row

# Offsets of a label from its mark, in points, the preferred ones first.
_OFFSETS = [(6, 5), (6, -12), (-6, 5), (-6, -12), (0, 13), (0, -20), (6, 18), (6, -26), (-6, 18),
           (-6, -26), (0, 28), (0, -36), (6, 34), (-6, 34)]  # fmt: skip


class Mark(NamedTuple):
    """A recipe's mark: bits per value, a figure, and its color and marker in both panels."""

    name: str
    x: float
    y: float
    color: str
    marker: str


def plot(rows: Sequence[Row], environment: dict[str, Any], path: str | Path) -> None:
    """Write the picture to `path`; its suffix is the format. Raises `InputError`.

    Recipes without figures are omitted.
    """
    ran = [row for row in rows if row.problem is None]
    panels: list[tuple[str, Callable[[Row], float | None]]] = [
        ("perplexity of the continuation (lower is better)", lambda row: row.perplexity)
    ]
    if any(row.needle is not None for row in ran):
        panels.append(("needle answers correct, % (higher is better)", _needle_percent))
    figure = new_figure(path, 6 * len(panels), 4.8)
    e = environment
    figure.suptitle(f"{e['model']} ({e['dtype']}), context {e['context']:,}", fontsize=11)
    for i, (title, height) in enumerate(panels):
        axes = figure.add_subplot(1, len(panels), i + 1)
        _panel(axes, ran, title, height)
    figure.savefig(path)


def _panel(
    axes: Any, rows: Sequence[Row], title: str, height: Callable[[Row], float | None]
) -> None:
    marks = {row.recipe: line_style(i)[:2] for i, row in enumerate(rows)} | {"full": ("black", "o")}
    points = [
        Mark(row.recipe, row.bits_per_value, y, *marks[row.recipe])
        for row in rows
        if row.bits_per_value is not None and (y := height(row)) is not None and math.isfinite(y)
    ]
    heights = [p.y for p in points]
    if height is _needle_percent:
        axes.set_ylim(-6, 112)
    elif heights and max(heights) > 4 * min(heights):
        axes.set_yscale("log")
    for p in points:
        axes.scatter([p.x], [p.y], s=36, color=p.color, marker=p.marker, zorder=3)
        if p.name == "full":
            axes.axhline(p.y, color=p.color, linewidth=0.8, linestyle=":")
    axes.set_title(title, fontsize=10)
    axes.set_xlabel("bits per value")
    axes.set_xlim(left=0)
    axes.margins(x=0.12, y=0.12)
    axes.grid(alpha=0.3)
    _add_labels(axes, points)


def _add_labels(axes: Any, points: Sequence[Mark]) -> None:
    """Label every mark; choose the offset at which the label covers the fewest labels and marks."""
    figure = axes.figure
    figure.canvas.draw()
    renderer, inside = figure.canvas.get_renderer(), axes.get_window_extent()
    marks = [axes.transData.transform((p.x, p.y)) for p in points]
    placed: list[Any] = []
    for p in points:
        label = axes.annotate(
            p.name, (p.x, p.y), (0, 0), textcoords="offset points", fontsize=8, color=p.color
        )

        def cost(offset: tuple[int, int], label: Any = label) -> int:
            _move(label, offset)
            box = label.get_window_extent(renderer)
            corners = inside.contains(box.x0, box.y0) and inside.contains(box.x1, box.y1)
            covered = sum(box.overlaps(o) for o in placed) + sum(box.contains(*m) for m in marks)
            return covered + 2 * (not corners)

        _move(label, min(_OFFSETS, key=cost))
        placed.append(label.get_window_extent(renderer))


def _move(label: Any, offset: tuple[int, int]) -> None:
    label.set_position(offset)
    label.set_ha("left" if offset[0] > 0 else "right" if offset[0] < 0 else "center")


def _needle_percent(row: Row) -> float | None:
    return None if row.needle is None else 100 * row.needle
