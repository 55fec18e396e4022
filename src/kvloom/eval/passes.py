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


def measure_each(
    model: PreTrainedModel, recipes: Sequence[Recipe], ids: Tensor, measure: Measure[Result]
) -> Iterator[tuple[Recipe, Result | Exception]]:
    """Yield what `measure` returns for each recipe, in order, or the error that it raises.

    ids: int64 [B, T], the prompt. `full` is measured alone, because the others are compared with
    it; then `crew.TOGETHER` recipes at once. An error of the forward pass fails every recipe;
    errors of `full` are raised.
    """
    full = resolve("full")
    try:
        filled = prefill(model, recipes, ids.to(model.device))[1]
    except Exception as error:
        if full in recipes:
            raise
        filled = [Prefilled(recipe, error=error) for recipe in recipes]
    while filled:
        count = 1 if filled[0].recipe == full else TOGETHER
        some, filled = filled[:count], filled[count:]
        found = run_together(model, [_measured(one, measure) for one in some])
        for one, result in zip(some, found, strict=True):
            if isinstance(result, Exception) and one.recipe == full:
                raise result
            yield one.recipe, result


def _measured(filled: Prefilled, measure: Measure[Result]) -> Work[Result]:
    if filled.error is not None:
        raise filled.error
    return (yield from measure(filled))
