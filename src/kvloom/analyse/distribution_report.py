"""Distributions as a table, as JSON, and as magnitude pictures before and after reordering."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Group
from rich.text import Text

from ..report.picture import check
from ..report.sheet import Sheet
from .distribution import KINDS, Distribution

MOST = 3  # layers drawn: first, middle and last of those measured


def to_plain(found: Sequence[Distribution]) -> list[dict[str, Any]]:
    """Rows for JSON; channels: largest magnitude of each, order: calibrated."""
    return [
        {
            "layer": d.layer,
            "kind": d.kind,
            "outliers": d.outliers,
            "group": d.group,
            "spread": d.before,
            "spread_reordered": d.after,
            "channels": [round(x, 5) for x in d.x.abs().amax(dim=1).tolist()],
            "order": None if d.order is None else d.order.tolist(),
        }
        for d in found
    ]


def to_json(found: Sequence[Distribution], environment: dict[str, Any]) -> str:
    """Return `{"environment": …, "rows": […]}`."""
    data = {"environment": environment, "rows": to_plain(found)}
    return json.dumps(data, indent=2, ensure_ascii=False)


def table(found: Sequence[Distribution], environment: dict[str, Any]) -> Group:
    """Return a table of the figures, and below it what they mean; rich prints it."""
    e = environment
    columns = ("largest over\nmedian channel", "spread in\nplain groups", "in calibrated\ngroups")
    built = Sheet(f"{e['model']} ({e['dtype']}), {e['recipe']}", "layer", columns)
    for d in found:
        after = "" if d.after is None else f"{d.after:.2f}"
        built.add(f"{d.layer} {KINDS[d.kind]}", f"{d.outliers:.1f}x", f"{d.before:.2f}", after)
    caption = (
        f"{e['context']:,} tokens of {e['text']}. spread: a group's range in a token over the mean "
        f"magnitude, groups of {found[0].group if found else 0} channels of all heads on average."
    )
    return Group(built, Text(caption, "dim"))


def plot(found: Sequence[Distribution], environment: dict[str, Any], path: str | Path) -> None:
    """Write the picture; the suffix of `path` is the format."""
    check(path)
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    e = environment
    layers = sorted({d.layer for d in found})
    layers = [layers[i] for i in sorted({0, len(layers) // 2, len(layers) - 1})][:MOST]
    kinds = [kind for kind in KINDS if any(d.kind == kind for d in found)]
    by = {(d.layer, d.kind): d for d in found}
    figure = Figure(figsize=(13, 1 + 2.3 * len(kinds)), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(f"|x| of {e['model']} ({e['dtype']}), {e['context']:,} tokens of {e['text']}; "
                    f"groups of {e['recipe']}")  # fmt: skip
    axes = figure.subplots(len(kinds), 2 * len(layers), squeeze=False)
    for row, kind in enumerate(kinds):
        top = max(by[n, kind].x.abs().quantile(0.999).item() for n in layers)
        for column, number in enumerate(layers):
            d = by[number, kind]
            for side, order in enumerate((None, d.order)):
                panel = axes[row][2 * column + side]
                if side and order is None:
                    panel.axis("off")
                    continue
                x = d.x.abs() if order is None else d.x.abs()[order]
                drawn = panel.imshow(x.numpy(), aspect="auto", cmap="magma", vmin=0, vmax=top,
                                     interpolation="nearest")  # fmt: skip
                what = "by group" if side else KINDS[kind]
                panel.set_title(f"layer {number}, {what}", fontsize=9)
                panel.tick_params(labelsize=7)
                if order is not None and d.group_of is not None:
                    at = d.group_of[order].diff().nonzero().flatten().tolist()
                    for line in at:
                        panel.axhline(line + 0.5, color="white", linewidth=0.6)
                if not side and not column:
                    panel.set_ylabel("channel", fontsize=8)
                if row == len(kinds) - 1:
                    panel.set_xlabel("token", fontsize=8)
        figure.colorbar(drawn, ax=list(axes[row]), shrink=0.9, pad=0.01)
    figure.savefig(path)
