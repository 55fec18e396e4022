"""Measure recipes on a model: `kvloom compare`, `kvloom eval`, `kvloom report`, `kvloom papers`.

    from kvloom_lab.eval import Settings, compare, load, prepare
    model, tokenizer = load()                          # the reference model; or load("org/model")
    task = prepare(model, tokenizer, text, Settings(context=1024))
    rows = compare(model, tokenizer, ["full", "kivi:bits=4"], task)

`comparison` does this. `evaluate` measures recipes on the tasks in `tasks`, for `kvloom eval`;
`page` shows its results, and `papers` tests claims by it. Both measure by `passes`. Nothing here
knows how a cache works.
"""

from __future__ import annotations

from ..models import load
from .comparison.compare import compare, iter_rows
from .comparison.plot import plot
from .comparison.rows import Row, environment, to_data
from .comparison.task import ComparisonTask, Settings, prepare
from .passes import with_full

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
