"""Attention's figures as a table, as JSON, and as one picture with the papers' four plots."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Group
from rich.text import Text

from ..report.picture import check
from ..report.sheet import Sheet
from .attention import EDGES, GRID, THRESHOLD, LayerAttention

_COLUMNS = (
    "sparsity", "90% of mass\nin tokens", "variance\nof mass", "tokens\nheld", "mass\nkept",
)  # fmt: skip


def table(layers: Sequence[LayerAttention], environment: dict[str, Any]) -> Group:
    """Return a table of the layers, and below it what the figures mean; rich prints it."""
    e = environment
    title = f"{e['model']} ({e['dtype']}), {e['recipe']}"
    built = Sheet(title, "layer", _COLUMNS, numbers=True)
    for x in layers:
        built.add(
            str(x.number), f"{x.sparsity:.1%}", f"{x.most:.1%}", f"{x.variance:.4g}",
            f"{x.held_tokens:,}", f"{x.kept:.1%}",
        )  # fmt: skip
    caption = (
        f"{e['context']:,} tokens of {e['text']} at once, then {e['new_tokens']} one by one. "
        f"sparsity: weights below {THRESHOLD:.0%} of their query's largest; variance: of the "
        "attention a token gets from the whole prompt; tokens held: by a head, after the prompt; "
        "mass kept: of the later queries' attention, on tokens that were still held."
    )
    return Group(built, Text(caption, "dim"))


def to_json(layers: Sequence[LayerAttention], environment: dict[str, Any]) -> str:
    """Return `{"environment", "threshold", "grid", "edges", "layers"}` (see `attention`)."""
    found = {
        "environment": environment,
        "threshold": THRESHOLD,
        "grid": GRID,
        "edges": EDGES,
        "layers": [asdict(layer) for layer in layers],
    }
    return json.dumps(found, ensure_ascii=False)


def plot(layers: Sequence[LayerAttention], environment: dict[str, Any], path: str | Path) -> None:
    """Write the picture; the suffix of `path` is the format."""
    check(path)
    from matplotlib import colormaps
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator, PercentFormatter

    e = environment
    figure = Figure(figsize=(11, 7.6), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(
        f"{e['model']} ({e['dtype']}), {e['context']:,} tokens of {e['text']}", fontsize=12
    )
    axes = figure.subplots(2, 2)
    (sparsity, curve), (spread, scores) = axes
    numbers = [x.number for x in layers]
    colors = colormaps["viridis"](np.linspace(0.05, 0.9, len(layers)))

    sparsity.bar(numbers, [x.sparsity for x in layers], color=colors)
    sparsity.set_ylim(0, 1)
    sparsity.set_title(f"sparsity: weights below {THRESHOLD:.0%} of their row's largest")

    for x, color in zip(layers, colors, strict=True):
        curve.plot(GRID, x.cdf, color=color, linewidth=1.4, label=f"layer {x.number}")
    curve.plot(GRID, np.mean([x.cdf for x in layers], axis=0), color="black", label="mean")
    curve.axhline(0.9, color="gray", linestyle=":", linewidth=1)
    curve.set_title("attention mass of the best tokens")
    curve.set_xlabel("fraction of the tokens, best first")
    if len(layers) <= 12:
        curve.legend(fontsize=8, loc="lower right")
    curve.xaxis.set_major_formatter(PercentFormatter(1))

    spread.bar(numbers, [x.variance for x in layers], color=colors)
    spread.set_title("variance over tokens of the attention they get")

    before = np.mean([x.before for x in layers], axis=0)
    after = np.mean([x.after for x in layers], axis=0)
    edges = 10.0 ** np.array(EDGES)
    scores.stairs(before, edges, fill=True, color="0.8", label="before: every token of the prompt")
    scores.stairs(after, edges, color="C3", linewidth=1.8, label=f"after {e['recipe']}: those held")
    scores.set_xscale("log")
    scores.set_title("attention a token gets from a later query, all layers")
    scores.set_xlabel("score; the first bar is for all that is lower")
    scores.set_ylabel("share of the tokens")
    scores.margins(y=0.25)
    scores.legend(fontsize=8, loc="upper left")
    for panel in (sparsity, curve, scores):
        panel.yaxis.set_major_formatter(PercentFormatter(1, decimals=None))
    for panel in (sparsity, spread):
        panel.set_xlabel("layer")
        panel.xaxis.set_major_locator(MaxNLocator(integer=True))
    for panel in axes.flat:
        panel.title.set_fontsize(10.5)
        panel.grid(alpha=0.3)
        panel.set_axisbelow(True)
    figure.savefig(path)
