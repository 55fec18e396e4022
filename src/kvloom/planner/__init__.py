"""Plan before running: which recipes fit into memory, and how fast they decode.

    plan = kvloom.plan("meta-llama/Llama-3.1-8B", context=131072, memory=24 << 30)
    print(plan)

`model` reads a config and builds the model without weights, `weights` counts the bytes of weights,
`cache_bytes` those of the cache, `working` those of a prompt's activations. `fits` answers inverse
questions. `step` states what a decode step reads and computes. `hardware` and `presets` estimate
its time from data sheets, `this` and `measure` from measurements of this machine, which `stored`
keeps. `answer` puts all of it together; `table` and `plot` show it. `choice` chooses a recipe
within a bound, by plans, tuned recipes and `evidence`.
"""

from __future__ import annotations

from .answer import Plan, Row, plan
from .choice import AutoChoice, auto
from .hardware import Hardware
from .model import read_model

__all__ = ["AutoChoice", "Hardware", "Plan", "Row", "auto", "plan", "read_model"]
