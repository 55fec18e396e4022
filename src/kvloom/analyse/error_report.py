"""The errors of formats as a table for people and as JSON for programs."""

from __future__ import annotations

import json
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.table import Table
from rich.text import Text

from .error import NAMES, LayerError, mean, to_plain


def table(found: dict[str, dict[int, LayerError]], environment: dict[str, Any]) -> Group:
    """Mean errors of each recipe, and the output's error in every layer; 100 columns wide."""
    built = Table(title=str(environment.get("model", "")), title_justify="left", box=SIMPLE_HEAD,
                  pad_edge=False)  # fmt: skip
    built.add_column("recipe", overflow="fold")
    for name in NAMES:
        built.add_column(name.replace("_", "\n"), justify="right", no_wrap=True)
    built.add_column("output by layer", justify="right")
    for recipe, errors in found.items():
        whole = mean(errors)
        cells = [f"{getattr(whole, name):.2%}" for name in NAMES]
        each = " ".join(f"{errors[number].output:.0%}" for number in sorted(errors))
        built.add_row(Text(recipe), *cells, each)
    caption = (
        "|x - x'| / |x| with every token packed, no window and no sinks; weights: of attention; "
        "output values: with exact weights; output: with both sides packed."
    )
    return Group(built, Text(caption, "dim"))


def to_json(found: dict[str, dict[int, LayerError]], environment: dict[str, Any]) -> str:
    """Return `{"environment": …, "rows": […]}`."""
    rows = to_plain(found)
    return json.dumps({"environment": environment, "rows": rows}, indent=2, ensure_ascii=False)
