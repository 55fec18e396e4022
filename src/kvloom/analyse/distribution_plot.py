"""Magnitudes of keys and values as images, before and after reordering."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..report.plots import new_figure
from .distribution import KINDS, Distribution

_MAX_LAYERS = 3  # drawn: first, middle and last of the measured layers


def plot(found: Sequence[Distribution], environment: dict[str, Any], path: str | Path) -> None:
    """Write the picture to `path`; its suffix is the format. Raises `InputError`."""
    e = environment
    layers = sorted({d.layer for d in found})
    layers = [layers[i] for i in sorted({0, len(layers) // 2, len(layers) - 1})][:_MAX_LAYERS]
    kinds = [kind for kind in KINDS if any(d.kind == kind for d in found)]
    by = {(d.layer, d.kind): d for d in found}
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
