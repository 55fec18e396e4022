"""Draw the chart of the README from the results of `kvloom bench generate`.

Run `python docs/chart.py`. It writes docs/assets/chart.svg and needs matplotlib.
"""

from __future__ import annotations

import json
from pathlib import Path

import matplotlib

matplotlib.use("svg")
matplotlib.rcParams["svg.hashsalt"] = "kvloom"  # the same file for the same results
matplotlib.rcParams["svg.fonttype"] = "none"  # text stays text
from matplotlib import pyplot as plt  # noqa: E402

ROOT = Path(__file__).parent.parent
CONTEXT = 32768
CACHES = {
    "DynamicCache": "DynamicCache\n(transformers)",
    "full": "kvloom full",
    "kivi-4": "kvloom kivi-4",
    "kivi": "kvloom kivi",
}
MIB = 2**20


def main() -> None:
    """Read the results, and write the chart."""
    source = next((ROOT / "benchmarks" / "results").rglob("bench_generate.json"))
    found = json.loads(source.read_text(encoding="utf-8"))
    rows = {row["name"]: row for row in found["rows"] if row["context"] == CONTEXT}
    e = found["environment"]
    panels = {
        "Keys and values (MiB)": [rows[name]["kv_bytes"] / MIB for name in CACHES],
        "Decode step (ms)": [rows[name]["ms"] for name in CACHES],
    }
    figure, axes = plt.subplots(1, 2, figsize=(9, 2.7), sharey=True, layout="constrained")
    for axis, (title, values) in zip(axes, panels.items(), strict=True):
        colors = ["#9e9e9e"] + ["#3f51b5"] * (len(CACHES) - 1)
        bars = axis.barh(list(CACHES.values()), values, color=colors)
        axis.bar_label(bars, fmt="%.0f", padding=3)
        axis.set_title(title, fontsize=10)
        axis.margins(x=0.15)
        axis.xaxis.set_visible(False)
        axis.spines[["top", "right", "bottom"]].set_visible(False)
    axes[0].invert_yaxis()
    where = f"{e['cpu']}, {e['threads']} threads, torch {e['torch']}"
    figure.supxlabel(f"{CONTEXT:,} tokens; {e['shape']}; {e['dtype']}; {where}", fontsize=8)
    figure.savefig(ROOT / "docs" / "assets" / "chart.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
