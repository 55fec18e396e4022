"""The warnings of a plan."""

from __future__ import annotations

from collections.abc import Sequence

from .recipe_figures import RecipePlanner
from .result import Row
from .units import show_rate


def plan_warnings(planner: RecipePlanner, rows: Sequence[Row]) -> list[str]:
    """Return what a reader of the rows has to know."""
    facts, warnings = planner.facts, []
    if facts.positions is not None and planner.context > facts.positions:
        warnings.append(
            f"The context of {planner.context:,} tokens exceeds the {facts.positions:,} positions "
            f"of {facts.name}; it was not trained for more."
        )
    beyond = [
        row.recipe for row in rows
        if facts.positions and (row.longest_in_chunks or 0) > facts.positions
    ]  # fmt: skip
    if beyond and planner.context <= (facts.positions or 0):
        warnings.append(
            f"Memory suffices for longer contexts than the {facts.positions:,} positions of "
            f"{facts.name}; it was not trained for them."
        )
    if not facts.dtype_stated:
        warnings.append(f"The config of {facts.name} states no dtype; float32 is counted.")
    if facts.weights.quantized == "mxfp4":
        warnings.append(
            "transformers expands mxfp4 weights to bfloat16 where it has no kernels for them, as "
            "on a CPU by default: 16 bits a number instead of 4.25."
        )
    if facts.working is None:
        warnings.append(
            f"The activations of a prompt cannot be traced for {facts.architecture}: limits count "
            "weights and cache alone."
        )
    for reason in dict.fromkeys(row.no_times for row in rows if row.no_times):
        names = ", ".join(row.recipe for row in rows if row.no_times == reason)
        warnings.append(f"No times for {names}: {reason}.")
    if planner.target is not None:
        warnings += _target_warnings(planner, rows)
    return warnings


def _target_warnings(planner: RecipePlanner, rows: Sequence[Row]) -> list[str]:
    timed = [row for row in rows if row.tokens_s]
    if not timed or any(row.reaches for row in timed):
        return []
    fitting = [row for row in timed if row.fits_in_chunks is not False] or timed
    nearest = max(fitting, key=lambda row: row.tokens_s.best if row.tokens_s else 0.0)
    assert nearest.tokens_s is not None
    rate = show_rate(nearest.tokens_s.best)
    return [
        f"No recipe reaches {planner.target:g} tok/s at {planner.context:,} tokens and batch "
        f"{planner.batch}; the nearest is {nearest.recipe} with {rate}."
    ]
