"""The tables of `kvloom analyse` and `kvloom check`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..show.tables import FigureTable
from .attention import THRESHOLD, LayerAttention
from .distribution import KINDS, Distribution
from .error import NAMES, LayerError, mean
from .modes import ModeCheck


def attention_table(layers: Sequence[LayerAttention], environment: dict[str, Any]) -> FigureTable:
    """Return a table of the layers."""
    title = f"{environment['model']} ({environment['dtype']}), {environment['recipe']}"
    columns = "sparsity", "90% of mass\nin tokens", "variance\nof mass", "tokens\nin cache"
    rows = FigureTable(title, "layer", [*columns, "mass\nkept"])
    for x in layers:
        rows.add(
            str(x.number), f"{x.sparsity:.1%}", f"{x.most:.1%}", f"{x.variance:.4g}",
            f"{x.held_tokens:,}", f"{x.kept:.1%}",
        )  # fmt: skip
    caption = (
        f"{environment['context']:,} tokens of {environment['text']} as a prompt, then "
        f"{environment['new_tokens']} one by one. "
        f"sparsity: weights below {THRESHOLD:.0%} of the largest of their query; variance: of the "
        "attention that a token receives from the prompt; tokens in cache: of a head, after the "
        "prompt; mass kept: share of the later queries' attention on tokens in the cache."
    )
    return rows.captioned(caption)


def error_table(
    errors_by_recipe: dict[str, dict[int, LayerError]], environment: dict[str, Any]
) -> FigureTable:
    """Return the mean errors of each recipe, and its output error in every layer."""
    columns = [*(name.replace("_", "\n") for name in NAMES), "output by layer"]
    rows = FigureTable(str(environment.get("model", "")), "recipe", columns)
    for recipe, errors in errors_by_recipe.items():
        average = mean(errors)
        cells = [f"{getattr(average, name):.2%}" for name in NAMES]
        by_layer = " ".join(f"{errors[i].output:.0%}" for i in sorted(errors))
        rows.add(recipe, *cells, by_layer)
    caption = (
        "|x - x'| / |x| with all whole groups quantized, without recent window and sinks; weights: "
        "of attention; output values: with exact weights; output: with keys and values quantized."
    )
    return rows.captioned(caption)


def distribution_table(
    distributions: Sequence[Distribution], environment: dict[str, Any]
) -> FigureTable:
    """Return a table of layers, each with keys and values."""
    columns = ("largest over\nmedian channel", "spread in\nplain groups", "in calibrated\ngroups")
    title = f"{environment['model']} ({environment['dtype']}), {environment['recipe']}"
    rows = FigureTable(title, "layer", columns)
    for d in distributions:
        after = "" if d.after is None else f"{d.after:.2f}"
        rows.add(f"{d.layer} {KINDS[d.kind]}", f"{d.outliers:.1f}x", f"{d.before:.2f}", after)
    channels = distributions[0].group if distributions else 0
    caption = (
        f"{environment['context']:,} tokens of {environment['text']}. spread: mean range of "
        f"a group in a token, over the mean magnitude; groups have {channels} channels on average."
    )
    return rows.captioned(caption)


def modes_table(title: str, checks: Sequence[ModeCheck]) -> FigureTable:
    """Return a table of the checks of modes."""
    rows = FigureTable(title, "mode", ("result", "difference", "tokens\nequal", "seconds"))
    for x in checks:
        off = "" if x.difference is None else f"{x.difference:.1e}"
        tokens = "" if x.tokens is None else f"{x.tokens:.0%}"
        rows.add(x.mode, x.result, off, tokens, f"{x.seconds:.1f}")
    caption = (
        "difference: the largest of a step's logits, relative to their spread; `full` against the "
        "plain model, and kernels against torch."
    )
    rows.note(*(f"{x.mode}: {x.note}" for x in checks if x.note))
    return rows.captioned(caption)
