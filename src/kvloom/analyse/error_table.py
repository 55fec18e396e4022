"""The errors of formats as a table."""

from __future__ import annotations

from typing import Any

from rich.console import Group
from rich.text import Text

from ..report.table import FigureTable
from .error import NAMES, LayerError, mean


def table(found: dict[str, dict[int, LayerError]], environment: dict[str, Any]) -> Group:
    """Return the mean errors of each recipe, and its output error in every layer; for rich."""
    columns = [*(name.replace("_", "\n") for name in NAMES), "output by layer"]
    rows = FigureTable(str(environment.get("model", "")), "recipe", columns)
    for recipe, errors in found.items():
        average = mean(errors)
        cells = [f"{getattr(average, name):.2%}" for name in NAMES]
        by_layer = " ".join(f"{errors[number].output:.0%}" for number in sorted(errors))
        rows.add(recipe, *cells, by_layer)
    caption = (
        "|x - x'| / |x| with every token quantized, without recent window and sinks; weights: of "
        "attention; output values: with exact weights; output: with keys and values quantized."
    )
    return Group(rows, Text(caption, "dim"))
