"""Plan before running: which recipes fit into memory, and how fast they decode.

    plan = kvloom_lab.plan("meta-llama/Llama-3.1-8B", context=131072, memory=24 << 30)
    print(plan)

`model` reads a config and builds the model without weights, `weights` counts the bytes of weights,
and `step` those of the cache and what a decode step reads. `hardware` estimates its time from data
sheets, `machine` from measurements of this machine, which it makes. `plan_recipes` combines them.
`choice` chooses a recipe within a bound.
"""

from __future__ import annotations

from .choice import AutoChoice, auto
from .hardware import Hardware
from .model import read_model
from .plan_recipes import Plan, PlanRow, plan

__all__ = ["AutoChoice", "Hardware", "Plan", "PlanRow", "auto", "plan", "read_model"]
