"""Compare recipes on one model and one text: memory, speed, perplexity, agreement, needles.

    from kvloom.eval import Settings, compare, load, prepare
    model, tokenizer = load()                          # the reference model; or load("org/model")
    task = prepare(model, tokenizer, text, Settings(context=1024))
    rows = compare(model, tokenizer, ["full", "kivi:bits=4"], task)

`comparison_task` decides what is measured, and `needles` hides facts and asks questions about them.
`measure` measures one recipe, `compare` a list of them, and `passes` lets recipes share forward
passes. `rows`, `table` and `plot` show the result. Nothing here knows how a cache works.
"""

from __future__ import annotations

from ..workload.models import load
from .compare import compare, iter_rows, with_full
from .comparison_task import ComparisonTask, Settings, prepare
from .environment import environment
from .plot import plot
from .rows import Row, to_data

__all__ = [
    "ComparisonTask",
    "Row",
    "Settings",
    "compare",
    "environment",
    "iter_rows",
    "load",
    "plot",
    "prepare",
    "to_data",
    "with_full",
]
