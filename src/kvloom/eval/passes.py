"""One forward pass of a prompt for several recipes, then a measurement of each on its cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from torch import Tensor
from transformers import PreTrainedModel

from ..recipe.resolve import resolve
from ..recipe.spec import Recipe
from ..workload.crew import TOGETHER, Result, Work, run_together
from ..workload.prefill import Prefilled, prefill

Measure = Callable[[Prefilled], Work[Result]]
"""Measures one recipe, whose cache holds the prompt."""


def measure_all(
    model: PreTrainedModel, recipes: Sequence[Recipe], ids: Tensor, measure: Measure[Result]
) -> Iterator[tuple[Recipe, Result | Exception]]:
    """Yield what `measure` returns for each recipe, in order, or the error that it raises.

    recipes: `full` first, if it is one of them; its errors are raised. ids: int64 [B, T], the
    prompt.
    """
    filled = read_prompt(model, recipes, ids)
    if filled and filled[0].recipe == resolve("full"):
        full = filled.pop(0)
        yield full.recipe, measure_full(model, full, measure)
    yield from measure_others(model, filled, measure)


def read_prompt(model: PreTrainedModel, recipes: Sequence[Recipe], ids: Tensor) -> list[Prefilled]:
    """Fill the caches of recipes with a prompt, int64 [B, T].

    An error of the forward pass fails every recipe; it is raised if `full` is one of them.
    """
    try:
        return prefill(model, recipes, ids.to(model.device))[1]
    except Exception as error:
        if resolve("full") in recipes:
            raise
        return [Prefilled(recipe, error=error) for recipe in recipes]


def measure_full(model: PreTrainedModel, full: Prefilled, measure: Measure[Result]) -> Result:
    """Return what `measure` returns for `full`, with which the other recipes are compared."""
    (found,) = run_together(model, [_measured(full, measure)])
    if isinstance(found, Exception):
        raise found
    return found


def measure_others(
    model: PreTrainedModel, filled: list[Prefilled], measure: Measure[Result]
) -> Iterator[tuple[Recipe, Result | Exception]]:
    """Yield what `measure` returns for each recipe, in order, or the error that it raises.

    `crew.TOGETHER` recipes run at once. They leave the list `filled`, which frees their caches.
    """
    while filled:
        some = filled[:TOGETHER]
        del filled[:TOGETHER]
        found = run_together(model, [_measured(one, measure) for one in some])
        for one, result in zip(some, found, strict=True):
            yield one.recipe, result


def _measured(filled: Prefilled, measure: Measure[Result]) -> Work[Result]:
    if filled.error is not None:
        raise filled.error
    return (yield from measure(filled))
