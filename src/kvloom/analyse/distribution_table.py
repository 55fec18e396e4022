"""Distributions as a table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Group
from rich.text import Text

from ..report.table import FigureTable
from .distribution import KINDS, Distribution


def table(found: Sequence[Distribution], environment: dict[str, Any]) -> Group:
    """Return a table of the figures with a caption that defines them; rich can print it."""
    e = environment
    columns = ("largest over\nmedian channel", "spread in\nplain groups", "in calibrated\ngroups")
    rows = FigureTable(f"{e['model']} ({e['dtype']}), {e['recipe']}", "layer", columns)
    for d in found:
        after = "" if d.after is None else f"{d.after:.2f}"
        rows.add(f"{d.layer} {KINDS[d.kind]}", f"{d.outliers:.1f}x", f"{d.before:.2f}", after)
    caption = (
        f"{e['context']:,} tokens of {e['text']}. spread: mean range of a group in a token, over "
        f"the mean magnitude; groups have {found[0].group if found else 0} channels on average."
    )
    return Group(rows, Text(caption, "dim"))
