"""The results of analyses as pictures. The suffix of a file is its format.

They raise `InputError` for another suffix, and without matplotlib.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..report.plots import new_figure
from .attention import LayerAttention
from .attention_figures import EDGES, GRID, THRESHOLD
from .distribution import KINDS, Distribution

_MAX_LAYERS = 3  # drawn: first, middle and last of the measured layers


def attention(
    layers: Sequence[LayerAttention], environment: dict[str, Any], path: str | Path
) -> None:
    """Draw the papers' four plots of attention."""
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


def distribution(
    distributions: Sequence[Distribution], environment: dict[str, Any], path: str | Path
) -> None:
    """Draw magnitudes of keys and values as images, before and after reordering."""
    e = environment
    layers = sorted({d.layer for d in distributions})
    layers = [layers[i] for i in sorted({0, len(layers) // 2, len(layers) - 1})][:_MAX_LAYERS]
    kinds = [kind for kind in KINDS if any(d.kind == kind for d in distributions)]
    by = {(d.layer, d.kind): d for d in distributions}
    figure = new_figure(path, 13, 1 + 2.3 * len(kinds), dpi=110)
    figure.suptitle(f"|x| of {e['model']} ({e['dtype']}), {e['context']:,} tokens of {e['text']}; "
                    f"groups of {e['recipe']}")  # fmt: skip
    axes = figure.subplots(len(kinds), 2 * len(layers), squeeze=False)
    for row, kind in enumerate(kinds):
        vmax = max(by[n, kind].x.abs().quantile(0.999).item() for n in layers)
        for column, number in enumerate(layers):
            d = by[number, kind]
            for reordered, order in enumerate((None, d.order)):
                panel = axes[row][2 * column + reordered]
                if reordered and order is None:
                    panel.axis("off")
                    continue
                x = d.x.abs() if order is None else d.x.abs()[order]
                image = panel.imshow(x.numpy(), aspect="auto", cmap="magma", vmin=0, vmax=vmax,
                                     interpolation="nearest")  # fmt: skip
                title = "by group" if reordered else KINDS[kind]
                panel.set_title(f"layer {number}, {title}", fontsize=9)
                panel.tick_params(labelsize=7)
                if order is not None and d.group_of is not None:
                    ends = d.group_of[order].diff().nonzero().flatten().tolist()
                    for line in ends:
                        panel.axhline(line + 0.5, color="white", linewidth=0.6)
                if not reordered and not column:
                    panel.set_ylabel("channel", fontsize=8)
                if row == len(kinds) - 1:
                    panel.set_xlabel("token", fontsize=8)
        figure.colorbar(image, ax=list(axes[row]), shrink=0.9, pad=0.01)
    figure.savefig(path)
