"""Attention's figures as a table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Group
from rich.text import Text

from ..report.table import FigureTable
from .attention import LayerAttention
from .attention_figures import THRESHOLD

_COLUMNS = (
    "sparsity", "90% of mass\nin tokens", "variance\nof mass", "tokens\nin cache", "mass\nkept",
)  # fmt: skip


def table(layers: Sequence[LayerAttention], environment: dict[str, Any]) -> Group:
    """Return a table of the layers with a caption that defines the figures; rich can print it."""
    e = environment
    title = f"{e['model']} ({e['dtype']}), {e['recipe']}"
    rows = FigureTable(title, "layer", _COLUMNS, numbers=True)
    for x in layers:
        rows.add(
            str(x.number), f"{x.sparsity:.1%}", f"{x.most:.1%}", f"{x.variance:.4g}",
            f"{x.held_tokens:,}", f"{x.kept:.1%}",
        )  # fmt: skip
    caption = (
        f"{e['context']:,} tokens of {e['text']} as a prompt, then {e['new_tokens']} one by one. "
        f"sparsity: weights below {THRESHOLD:.0%} of the largest of their query; variance: of the "
        "attention that a token receives from the prompt; tokens in cache: of a head, after the "
        "prompt; mass kept: share of the later queries' attention on tokens in the cache."
    )
    return Group(rows, Text(caption, "dim"))
