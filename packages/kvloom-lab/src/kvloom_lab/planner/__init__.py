"""Plan before running: which recipes fit into memory, and how fast they decode.

    plan = kvloom_lab.plan("meta-llama/Llama-3.1-8B", context=131072, memory=24 << 30)
    print(plan)

`model` reads a config and builds the model without weights, `weights` counts the bytes of weights,
`cache_bytes` those of the cache, `activations` those of a prompt. `largest` answers inverse
questions. `decode_step` states what a decode step reads and computes. `hardware` and `presets`
estimate its time from data sheets, `machine` and `machine_measurement` from measurements of this
machine, which `machine_file` keeps. `recipe_figures` combines them for a recipe, and `plan_recipes`
for a list of them; `result`, `table` and `plot` show it. `choice` chooses a recipe within a bound,
by plans, tuned recipes and `evidence`.
"""

from __future__ import annotations

from .choice import AutoChoice, auto
from .hardware import Hardware
from .model import read_model
from .plan_recipes import plan
from .result import Plan, PlanRow

__all__ = ["AutoChoice", "Hardware", "Plan", "PlanRow", "auto", "plan", "read_model"]
