"""The results of analyses as tables that define their figures; rich can print them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Group
from rich.text import Text

from ..report.table import FigureTable
from .attention import LayerAttention
from .attention_figures import THRESHOLD
from .distribution import KINDS, Distribution
from .error import NAMES, LayerError, mean
from .modes import ModeCheck

_COLUMNS = (
    "sparsity", "90% of mass\nin tokens", "variance\nof mass", "tokens\nin cache", "mass\nkept",
)  # fmt: skip


def attention(layers: Sequence[LayerAttention], environment: dict[str, Any]) -> Group:
    """Return a table of the layers."""
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


def error(found: dict[str, dict[int, LayerError]], environment: dict[str, Any]) -> Group:
    """Return the mean errors of each recipe, and its output error in every layer."""
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


def distribution(found: Sequence[Distribution], environment: dict[str, Any]) -> Group:
    """Return a table of layers, each with keys and values."""
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


def modes_table(title: str, checks: Sequence[ModeCheck]) -> Group:
    """Return a table of the checks of modes."""
    rows = FigureTable(title, "mode", ("result", "difference", "tokens\nequal", "seconds"))
    for x in checks:
        off = "" if x.difference is None else f"{x.difference:.1e}"
        tokens = "" if x.tokens is None else f"{x.tokens:.0%}"
        rows.add(x.mode, x.result, off, tokens, f"{x.seconds:.1f}")
    notes = [f"{x.mode}: {x.note}" for x in checks if x.note]
    caption = (
        "difference: the largest of a step's logits, relative to their spread; `full` against the "
        "plain model, and kernels against torch."
    )
    return Group(rows, *(Text(note) for note in notes), Text(caption, "dim"))
