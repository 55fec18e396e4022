"""The papers' four plots of attention in one picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..report.plots import new_figure
from .attention import LayerAttention
from .attention_figures import EDGES, GRID, THRESHOLD


def plot(layers: Sequence[LayerAttention], environment: dict[str, Any], path: str | Path) -> None:
    """Write the picture to `path`; its suffix is the format. Raises `InputError`."""
    figure = new_figure(path, 11, 7.6, dpi=110)
    from matplotlib import colormaps
    from matplotlib.ticker import MaxNLocator, PercentFormatter

    e = environment
    figure.suptitle(
        f"{e['model']} ({e['dtype']}), {e['context']:,} tokens of {e['text']}", fontsize=12
    )
    axes = figure.subplots(2, 2)
    (sparsity, curve), (variance, scores) = axes
    numbers = [x.number for x in layers]
    colors = colormaps["viridis"](np.linspace(0.05, 0.9, len(layers)))

    sparsity.bar(numbers, [x.sparsity for x in layers], color=colors)
    sparsity.set_ylim(0, 1)
    sparsity.set_title(f"sparsity: weights below {THRESHOLD:.0%} of their row's largest")

    for x, color in zip(layers, colors, strict=True):
        curve.plot(GRID, x.cdf, color=color, linewidth=1.4, label=f"layer {x.number}")
    curve.plot(GRID, np.mean([x.cdf for x in layers], axis=0), color="black", label="mean")
    curve.axhline(0.9, color="gray", linestyle=":", linewidth=1)
    curve.set_title("attention mass on the best tokens")
    curve.set_xlabel("fraction of the tokens, best first")
    if len(layers) <= 12:
        curve.legend(fontsize=8, loc="lower right")
    curve.xaxis.set_major_formatter(PercentFormatter(1))

    variance.bar(numbers, [x.variance for x in layers], color=colors)
    variance.set_title("variance over tokens of the attention they receive")

    before = np.mean([x.before for x in layers], axis=0)
    after = np.mean([x.after for x in layers], axis=0)
    edges = 10.0 ** np.array(EDGES)
    scores.stairs(before, edges, fill=True, color="0.8", label="before: every token of the prompt")
    label = f"after {e['recipe']}: tokens in the cache"
    scores.stairs(after, edges, color="C3", linewidth=1.8, label=label)
    scores.set_xscale("log")
    scores.set_title("attention that a token receives from a later query, all layers")
    scores.set_xlabel("score; the first bar includes all lower scores")
    scores.set_ylabel("share of the tokens")
    scores.margins(y=0.25)
    scores.legend(fontsize=8, loc="upper left")
    for panel in (sparsity, curve, scores):
        panel.yaxis.set_major_formatter(PercentFormatter(1, decimals=None))
    for panel in (sparsity, variance):
        panel.set_xlabel("layer")
        panel.xaxis.set_major_locator(MaxNLocator(integer=True))
    for panel in axes.flat:
        panel.title.set_fontsize(10.5)
        panel.grid(alpha=0.3)
        panel.set_axisbelow(True)
    figure.savefig(path)
