"""Results as a picture: time against context, or bars if there is only one context."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..report.plots import line_style, new_figure
from .rows import Row


def plot(rows: Sequence[Row], environment: dict[str, Any], path: str | Path) -> None:
    """Write the times to `path`; its suffix is the format. Raises `InputError`."""
    ran = [row for row in rows if row.ms is not None]
    contexts = sorted({row.context for row in ran})
    names = list(dict.fromkeys(row.name for row in ran))
    figure = new_figure(path, 8, 4.8)
    axes = figure.add_subplot()
    e = environment
    axes.set_title(
        f"bench {e['verb']}: {e['shape']}, {e['dtype']}, batch {e['batch']}", fontsize=10
    )
    if len(contexts) > 1:
        for i, name in enumerate(names):
            points = sorted((row.context, row.ms) for row in ran if row.name == name)
            color, marker, line = line_style(i)
            axes.plot(
                *zip(*points, strict=True), label=name,
                color=color, marker=marker, markersize=4, linestyle=line,
            )  # fmt: skip
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(contexts, [f"{n:,}" for n in contexts])
        axes.set_xlabel("tokens of context")
        axes.set_ylabel("ms")
        figure.legend(fontsize=8, handlelength=4, loc="outside right upper")
    else:
        bars = axes.barh(names[::-1], [row.ms or 0.0 for row in ran][::-1])
        axes.bar_label(bars, fmt="%.2f", padding=3, fontsize=8)
        axes.set_xlabel(f"ms at {contexts[0]:,} tokens" if contexts else "ms")
        if ran and max(row.ms or 0.0 for row in ran) > 20 * min(row.ms or 0.0 for row in ran):
            axes.set_xscale("log")
        axes.margins(x=0.1)
    axes.grid(alpha=0.3)
    figure.savefig(path)
