"""Measure recipes on prompts: one forward pass of a prompt, then a measurement of each recipe.

`kvloom compare` and `kvloom eval` both measure this way. Decides which recipes share a pass, and
what happens to a recipe that fails.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvloom.recipe import Recipe, resolve

from ..workload.crew import TOGETHER, Result, Work, run_alone, run_together
from ..workload.prefill import Prefilled, groups, prefill

Measure = Callable[[int, Prefilled, Result | None], Work[Result]]
"""Measures one recipe, given the number of the prompt, the cache that holds it, and the result of
`full` on this prompt (None for `full` itself)."""


def with_full(recipes: Sequence[Recipe | str | Path]) -> list[Recipe]:
    """Return the recipes, resolved and without repetitions, with `full` first."""
    return list(dict.fromkeys(resolve(recipe) for recipe in ("full", *recipes)))


@torch.inference_mode()
def measure_all(
    model: PreTrainedModel,
    recipes: Sequence[Recipe],
    prompts: Sequence[Tensor],
    measure: Measure[Result],
    on_pass: Callable[[int, Sequence[Recipe]], None],
) -> Iterator[tuple[Recipe, list[Result] | Exception]]:
    """Yield the results of each recipe, one for each prompt, or the first error that it raised.

    recipes: without repetitions, `full` first; an error of `full` is raised. prompts: int64 [B, T]
    each, the largest last. on_pass: called before each forward pass with the number of its prompt
    and the recipes whose caches it fills.

    As many recipes share a pass as fit into memory. One that fails is left out of later passes.
    """
    exact: list[Result] = []
    for group in groups(model, recipes, *prompts[-1].shape):
        results: dict[Recipe, list[Result]] = {recipe: [] for recipe in group}
        failed: dict[Recipe, Exception] = {}
        for number, ids in enumerate(prompts):
            wanted = [recipe for recipe in group if recipe not in failed]
            if wanted:
                on_pass(number, wanted)
            full = exact[number] if number < len(exact) else None
            each = _measure_group(model, group, ids, partial(measure, number), full, failed)
            for recipe, result in each:
                if isinstance(result, Exception):
                    failed[recipe] = result
                else:
                    results[recipe].append(result)
                if number == len(prompts) - 1:
                    yield recipe, failed.get(recipe, results[recipe])
        exact = exact or results[group[0]]


def _measure_group(
    model: PreTrainedModel,
    group: Sequence[Recipe],
    ids: Tensor,
    measure: Callable[[Prefilled, Result | None], Work[Result]],
    full: Result | None,
    failed: Mapping[Recipe, Exception],
) -> Iterator[tuple[Recipe, Result | Exception]]:
    """Yield what `measure` returns for each recipe on one prompt, in order, or its error.

    full: the result of `full`; None if it is the first of the group. failed: the errors of recipes
    that are not measured again. `crew.TOGETHER` recipes run at once; then their caches are freed.
    """
    filled = _fill(model, group, ids, failed)
    if full is None:
        full = run_alone(model, _measured(filled.pop(0), measure, None))
        yield group[0], full
    while filled:
        batch = filled[:TOGETHER]
        del filled[:TOGETHER]
        results = run_together(model, [_measured(one, measure, full) for one in batch])
        for one, result in zip(batch, results, strict=True):
            yield one.recipe, result


def _fill(
    model: PreTrainedModel,
    group: Sequence[Recipe],
    ids: Tensor,
    failed: Mapping[Recipe, Exception],
) -> list[Prefilled]:
    """Fill the caches of a group with a prompt; an error of the forward pass fails all of them."""
    wanted = [recipe for recipe in group if recipe not in failed]
    try:
        filled = prefill(model, wanted, ids.to(model.device))[1] if wanted else []
    except Exception as error:
        if resolve("full") in wanted:
            raise
        filled = [Prefilled(recipe, error=error) for recipe in wanted]
    errors = [Prefilled(recipe, error=error) for recipe, error in failed.items()]
    return sorted([*filled, *errors], key=lambda one: group.index(one.recipe))


def _measured(
    filled: Prefilled,
    measure: Callable[[Prefilled, Result | None], Work[Result]],
    full: Result | None,
) -> Work[Result]:
    if filled.error is not None:
        raise filled.error
    return (yield from measure(filled, full))
