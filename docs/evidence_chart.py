"""Draw the chart of quality at equal bytes from the published evidence on SmolLM2.

Run `python docs/evidence_chart.py`. It writes docs/assets/evidence.svg and needs matplotlib.
"""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib

matplotlib.use("svg")
matplotlib.rcParams["svg.hashsalt"] = "kvloom"  # the same file for the same results
matplotlib.rcParams["svg.fonttype"] = "none"  # text stays text
from matplotlib import pyplot as plt  # noqa: E402
from matplotlib.axes import Axes  # noqa: E402

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))
from evidence_tables import published  # noqa: E402

RUN = "smollm2-2k-mixed"
SHARES = 1 / 3, 1 / 4, 1 / 5, 1 / 8, 1 / 12
LINES = {
    "near-lossless, balanced, small, tiny, micro": [
        "near-lossless",
        "balanced",
        "small",
        "tiny",
        "micro",
    ],
    "small, tiny with random tokens": ["small-random", "tiny-random"],
    "kivi 4, 2 bit": ["kivi-4", "kivi"],
    "skvq 2 bit": ["skvq:group=32"],
    "minikv (evict, then 2 bit)": ["minikv at 0.2"],
    "snapkv (evict)": ["snapkv at 0.2"],
    "h2o (evict)": ["h2o at 0.2"],
    "keyformer (evict)": ["keyformer at 0.2"],
}
PANELS = {
    "KL divergence from the exact cache": ("perplexity", "kl_mean"),
    "Needles found": ("niah", "correct"),
}


def draw(axis: Axes, figures: list[dict], task: str, score: str) -> None:
    """Draw a score of a task over bytes, a line for each family of recipes."""
    rows = {row["recipe"]: row for row in figures if row["task"] == task and row["scores"]}
    for number, (label, names) in enumerate(LINES.items()):
        found = sorted((rows[n]["share"], rows[n]["scores"][score]["mean"])
                       for n in names if n in rows)  # fmt: skip
        if found:
            axis.plot(
                *zip(*found, strict=True), "P*os^Dv<>"[number] + "-", label=label, ms=4, lw=1.2
            )
    axis.set_xscale("log")
    axis.set_xticks(SHARES, ["1/3", "1/4", "1/5", "1/8", "1/12"])
    axis.xaxis.set_minor_locator(plt.NullLocator())
    axis.set_xlabel("bytes of the cache, as a share of the exact cache", fontsize=8)
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(alpha=0.25)


def main() -> None:
    """Read the results, and write the chart."""
    figures = published(RUN)
    chart, axes = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    for axis, (title, (task, score)) in zip(axes, PANELS.items(), strict=True):
        draw(axis, figures, task, score)
        axis.set_title(title, fontsize=10)
    axes[0].set_yscale("log")
    axes[1].yaxis.set_major_formatter(matplotlib.ticker.PercentFormatter(1.0))
    handles, labels = axes[0].get_legend_handles_labels()
    chart.legend(handles, labels, loc="outside right upper", fontsize=8, frameon=False)
    chart.savefig(ROOT / "docs" / "assets" / "evidence.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
