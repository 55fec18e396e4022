"""Draw the bytes that caches hold while a text grows, from the results of benchmarks/growing.py.

Run `python docs/growing_chart.py`. It writes docs/assets/growing.svg and needs matplotlib.
"""

from __future__ import annotations

import json

from chart import MIB, ROOT, plt

PANELS = {"chat": "A chat of ten turns", "long": "A long output"}
RECIPES = (
    "full", "near-lossless", "small", "small:block=512", "streaming:tokens=1024", "h2o:tokens=1024",
)  # fmt: skip


def main() -> None:
    """Read the results, and write the chart."""
    source = next((ROOT / "benchmarks" / "results").rglob("growing.json"))
    found = json.loads(source.read_text(encoding="utf-8"))["rows"]
    rows = {(row["workload"], row["recipe"]): row for row in found}
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    for axis, (workload, title) in zip(axes, PANELS.items(), strict=True):
        for name, marker in zip(RECIPES, "P*os^D", strict=True):
            row = rows[workload, name]
            held = [nbytes / MIB for nbytes in row["nbytes"]]
            axis.plot(row["tokens"], held, marker + "-", label=name, ms=4, lw=1.2, markevery=0.2)
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("tokens read", fontsize=8)
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.25)
    axes[0].set_ylabel("MiB held", fontsize=8)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right upper", fontsize=8, frameon=False)
    figure.savefig(ROOT / "docs" / "assets" / "growing.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
