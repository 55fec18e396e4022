"""Run one measurement without others."""

from __future__ import annotations

from kvloom.workload.crew import run_together


def run_alone(model, work):
    """What a measurement returns, or raise what it raised."""
    (result,) = run_together(model, [work])
    if isinstance(result, Exception):
        raise result
    return result
