"""Measure recipes on a model: `kvloom compare`, `kvloom eval`, `kvloom report`, `kvloom papers`.

    from kvloom_lab.eval import Settings, compare, load, prepare
    model, tokenizer = load()                          # the reference model; or load("org/model")
    task = prepare(model, tokenizer, text, Settings(context=1024))
    rows = compare(model, ["full", "kivi:bits=4"], task)

`evaluate` measures recipes on tasks: those in `tasks`, for `kvloom eval`, and that of `comparison`.
`results` and `kvpress` read results, `summary` computes figures of them. Nothing here knows how a
cache works.
"""

from __future__ import annotations

from ..models import load
from .comparison import (
    ComparisonTask,
    Row,
    Settings,
    compare,
    environment,
    iter_rows,
    prepare,
    to_data,
)
from .evaluate import with_full

__all__ = [
    "ComparisonTask",
    "Row",
    "Settings",
    "compare",
    "environment",
    "iter_rows",
    "load",
    "prepare",
    "to_data",
    "with_full",
]
