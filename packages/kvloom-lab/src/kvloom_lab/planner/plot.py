"""A plan as a picture: memory by context, and decode speed by context where there are times."""

from __future__ import annotations

from pathlib import Path

from ..report.plots import line_style, new_figure
from .result import Plan


def plot(plan: Plan, path: str | Path) -> None:
    """Write the picture to `path`; its suffix is the format. Raises `InputError`.

    The band around a speed reaches from the low to the high estimate.
    """
    timed = any(point.tokens_s for row in plan.rows for point in row.curve)
    figure = new_figure(path, 12 if timed else 8, 4.8)
    panels = figure.subplots(1, 2 if timed else 1, squeeze=False)[0]
    figure.suptitle(f"{plan.model.name}, batch {plan.batch}", fontsize=10)
    weights = plan.model.weights.nbytes
    for i, row in enumerate(row for row in plan.rows if row.curve):
        color, marker, style = line_style(i)
        look = {"color": color, "marker": marker, "markersize": 4, "linestyle": style}
        contexts = [point.context for point in row.curve]
        total = [(weights + point.kv_bytes) / 2**30 for point in row.curve]
        panels[0].plot(contexts, total, label=row.recipe, **look)
        rates = [point.tokens_s for point in row.curve if point.tokens_s]
        if rates:
            panels[1].plot(contexts, [rate.best for rate in rates], **look)
            low, high = [rate.low for rate in rates], [rate.high for rate in rates]
            panels[1].fill_between(contexts, low, high, color=color, alpha=0.08, linewidth=0)
    if plan.memory is not None:
        panels[0].axhline(plan.memory / 2**30, color="0.3", linewidth=1)
        panels[0].annotate(
            "memory", (0.01, plan.memory / 2**30), xycoords=("axes fraction", "data"),
            fontsize=8, va="bottom",
        )  # fmt: skip
    panels[0].set_ylabel("weights and KV cache, GiB")
    panels[0].set_yscale("log")
    if timed:
        panels[1].set_ylabel("tokens per second, estimated")
        panels[1].set_yscale("log")
        if plan.target is not None:
            panels[1].axhline(plan.target, color="0.3", linewidth=1)
    for panel in panels:
        panel.set_xscale("log", base=2)
        panel.set_xlabel("tokens of context")
        panel.grid(alpha=0.3)
    figure.legend(fontsize=8, handlelength=4, loc="outside right upper")
    figure.savefig(path)
