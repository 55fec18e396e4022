"""Papers' claims on speed: decode steps of one layer of the paper's model, on this machine.

Papers compare with attention to an exact cache on a GPU. Here that is `full`: kvloom's kernels read
an exact cache several times faster than transformers' DynamicCache on a CPU, so a ratio to `full`
is the harder one. A layer has the paper's width, random weights, and its share of the output
matrix. Beside each ratio stands what the bytes that a step reads, weights included, would allow.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from kvloom.recipe import resolve

from ..bench import ModelShape
from .claim import ClaimTable, Finding
from .lab import Lab, TimedStep

LLAMA_2_7B = ModelShape(32, 32, 128, layers=1, hidden=4096, intermediate=11008, vocabulary=1000)
LLAMA_3_8B = ModelShape(32, 8, 128, layers=1, hidden=4096, intermediate=14336, vocabulary=4000)
MPT_7B = replace(LLAMA_2_7B, intermediate=10923)  # an MLP of as many weights
OPT_6_7B = MPT_7B
EXACT, STOCK = "full", "DynamicCache"


def throughput(
    lab: Lab, shape: ModelShape, recipe: str, tokens: int, rows: int, least: float
) -> Finding:
    """Return tokens/s of a recipe in the memory that `rows` exact rows of `tokens` tokens take.

    It holds if they are at least `least` times those of `full`.
    """
    geometry = shape.geometry
    exact = rows * tokens * geometry.token_nbytes()
    batches = {STOCK: rows, EXACT: rows, recipe: exact // resolve(recipe).nbytes(tokens, geometry)}
    few = lab.steps(replace(shape, batch=rows), [EXACT], tokens, ("dynamic",))
    many = lab.steps(replace(shape, batch=batches[recipe]), [recipe], tokens)
    ms = {name: step.ms for name, step in (few | {recipe: many[recipe]}).items()}
    speeds = {name: 1e3 * batches[name] / ms[name] for name in batches}
    table = {name: (batches[name], ms[name], speeds[name]) for name in batches}
    return Finding(
        ClaimTable(("rows", "ms a step", "tokens/s"), table),
        speeds[recipe] >= least * speeds[EXACT],
        f"tokens/s over those of {EXACT}: {speeds[recipe] / speeds[EXACT]:.2f}",
    )


def speedup(steps: Mapping[str, TimedStep], recipe: str, over: str = EXACT) -> float:
    """Return how many times faster than `over` a recipe's step is."""
    return steps[over].ms / steps[recipe].ms


def stated(steps: Mapping[str, TimedStep], recipe: str, over: str = EXACT) -> str:
    """Return this ratio as evidence, with what the bytes would allow."""
    allowed = steps[over].read_bytes / steps[recipe].read_bytes
    found = speedup(steps, recipe, over)
    return f"speed of {recipe} over that of {over}: {found:.2f} (its bytes allow {allowed:.2f})"
