"""A tuned recipe as a table, and its figures as plain data."""

from __future__ import annotations

from itertools import groupby
from typing import Any

from ..report.table import FigureTable
from .run import Tuning


def table(tuning: Tuning, name: str) -> FigureTable:
    """Return the layers as rows; neighbours with the same choice share a row. name: the model's."""
    t = tuning.tuned
    title = (
        f"{name}, {t.bound}: {t.share:.1%} of the bytes, KL {t.kl:.4g} (99%: {t.kl_p99:.4g}; "
        f"predicted {t.predicted_kl:.4g}), context {t.context:,}"
    )
    found = FigureTable(title, "layers", ["keys", "values", "kept", "KL"])
    for choice, run in groupby(tuning.choices, key=tuning.choices.__getitem__):
        numbers = list(run)
        first, last = numbers[0], numbers[-1]
        cost = sum(tuning.predicted[number] for number in numbers)
        where = f"{first}" if first == last else f"{first}-{last}"
        found.add(where, *choice, f"{cost:.2g}")
    return found


def to_data(tuning: Tuning, environment: dict[str, Any]) -> dict[str, Any]:
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
