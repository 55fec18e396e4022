"""The table of `kvloom tune`, and its figures as plain data."""

from __future__ import annotations

from itertools import groupby
from typing import Any

from ..show.tables import FigureTable
from .run import Tuning


def tuning_table(tuning: Tuning, name: str) -> FigureTable:
    """Return the layers as rows; neighbours with the same choice share a row. name: the model's."""
    tuned = tuning.tuned
    title = (
        f"{name}, {tuned.bound}: {tuned.share:.1%} of the bytes, KL {tuned.kl:.4g} "
        f"(99%: {tuned.kl_p99:.4g}; predicted {tuned.predicted_kl:.4g}), context {tuned.context:,}"
    )
    rows = FigureTable(title, "layers", ["keys", "values", "kept", "KL"])
    for choice, run in groupby(tuning.choices, key=tuning.choices.__getitem__):
        layers = list(run)
        first, last = layers[0], layers[-1]
        cost = sum(tuning.predicted[i] for i in layers)
        where = f"{first}" if first == last else f"{first}-{last}"
        rows.add(where, *choice, f"{cost:.2g}")
    return rows


def tuning_data(tuning: Tuning, environment: dict[str, Any]) -> dict[str, Any]:
    """Return the figures as plain data; the fields are those of docs/reference/json.md."""
    layers = [
        {"layer": n, **choice._asdict(), "kl": tuning.predicted[n]}
        for n, choice in tuning.choices.items()
    ]
    uniform = [{"recipe": name, "share": x, "kl": kl} for name, x, kl in tuning.uniform]
    return {
        "environment": environment,
        "recipe": tuning.recipe.to_dict(),
        "layers": layers,
        "front": [{"share": share, "kl": kl} for share, kl in tuning.front],
        "uniform": uniform,
    }
