"""The errors of formats as a table for people and as JSON for programs."""

from __future__ import annotations

import json
from typing import Any

from rich.console import Group
from rich.text import Text

from ..report.sheet import Sheet
from .error import NAMES, LayerError, mean, to_plain


def table(found: dict[str, dict[int, LayerError]], environment: dict[str, Any]) -> Group:
    """Mean errors of each recipe, and the output's error in every layer; rich prints it."""
    columns = [*(name.replace("_", "\n") for name in NAMES), "output by layer"]
    built = Sheet(str(environment.get("model", "")), "recipe", columns)
    for recipe, errors in found.items():
        whole = mean(errors)
        cells = [f"{getattr(whole, name):.2%}" for name in NAMES]
        each = " ".join(f"{errors[number].output:.0%}" for number in sorted(errors))
        built.add(recipe, *cells, each)
    caption = (
        "|x - x'| / |x| with every token packed, no window and no sinks; weights: of attention; "
        "output values: with exact weights; output: with both sides packed."
    )
    return Group(built, Text(caption, "dim"))


def to_json(found: dict[str, dict[int, LayerError]], environment: dict[str, Any]) -> str:
    """Return `{"environment": …, "rows": […]}`."""
    rows = to_plain(found)
    return json.dumps({"environment": environment, "rows": rows}, indent=2, ensure_ascii=False)
