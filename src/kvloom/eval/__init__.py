"""Compare recipes on one model and one text: memory, speed, perplexity, agreement, recall.

    from kvloom.eval import Settings, compare, load
    model, tokenizer = load()                          # the reference model; or load("org/model")
    rows = compare(model, tokenizer, ["full", "kivi:bits=4"], text, Settings(context=1024))

`text` finds and cuts text, `needles` hides facts and asks for them, `measure` runs one recipe,
`run` runs a list of them, `report` and `plot` show rows. Nothing here knows how a cache works.
"""

from __future__ import annotations

from ..errors import InputError
from ..workload.models import load, load_model, load_small
from .compare import Settings, compare, prepare, rows
from .environment import environment
from .measure import Row, Task, measure
from .plot import plot
from .report import line, table, to_json

__all__ = [
    "InputError",
    "Row",
    "Settings",
    "Task",
    "compare",
    "environment",
    "line",
    "load",
    "load_model",
    "load_small",
    "measure",
    "plot",
    "prepare",
    "rows",
    "table",
    "to_json",
]
