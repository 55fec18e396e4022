"""Read the prompts of a task into the caches of several recipes, one forward pass per prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from transformers import PreTrainedModel

from ..errors import IncompatibleRecipe
from ..hf.cache import Cache
from ..recipe.resolve import resolve
from ..recipe.spec import Recipe
from ..report.errors import logged_line
from ..workload.forward import Progress
from ..workload.prefill import Prefilled, prefill
from .rows import Row
from .task import Task


@dataclass
class Contexts:
    """The caches of one recipe that hold the prompts of a task.

    text: the cache of all rows of text; prefill_s: the seconds that they took. haystacks: one cache
    per haystack; empty if questions are part of the prompt. problem: the row that says why there
    are no caches.
    """

    recipe: Recipe
    text: Cache | None = None
    prefill_s: float = 0.0
    haystacks: list[Cache] = field(default_factory=list)
    problem: Row | None = None

    def fail(self, error: Exception) -> None:
        """Drop the caches; keep the reason."""
        self.text, self.haystacks = None, []
        self.problem = no_figures(self.recipe, error)


@torch.inference_mode()
def read_contexts(
    model: PreTrainedModel, recipes: Sequence[Recipe], task: Task, on_step: Progress
) -> list[Contexts]:
    """Fill the caches of all recipes with the prompts of a task.

    on_step: called with one unit per recipe and prompt. A recipe that fails takes no part in the
    prompts that follow. If a forward pass itself fails, all recipes do; its error is raised if
    `full` is one of them.
    """
    found = [Contexts(recipe) for recipe in recipes]
    who = recipes[0].name if len(recipes) == 1 else f"{len(recipes)} recipes"
    prompts = task.prompts
    for i, ids in enumerate(prompts):
        what = f"{who}: reading context {i + 1} of {len(prompts)}"
        on_step(what, 0)
        left = [one for one in found if one.problem is None]
        for one, new in zip(left, _prefill(model, left, ids), strict=True):
            if new.error is not None:
                one.fail(new.error)
            elif i == len(prompts) - 1:
                one.text, one.prefill_s = new.cache, new.seconds
            elif task.reads_haystacks and new.cache is not None:
                one.haystacks.append(new.cache)
        on_step(what, len(found))
    return found


def no_figures(recipe: Recipe, error: Exception) -> Row:
    """Return the row of a recipe that failed, or does not fit the model; log a defect."""
    if isinstance(error, IncompatibleRecipe):
        return Row(recipe.name, problem="; ".join(error.problems))
    return Row(recipe.name, problem=logged_line(error, f"recipe {recipe.name!r}"), failed=True)


def _prefill(
    model: PreTrainedModel, contexts: Sequence[Contexts], ids: torch.Tensor
) -> list[Prefilled]:
    """Fill new caches with a prompt; an error of the forward pass is one of every recipe."""
    recipes = [one.recipe for one in contexts]
    if not recipes:
        return []
    try:
        return prefill(model, recipes, ids.to(model.device))[1]
    except Exception as error:
        if resolve("full") in recipes:
            raise
        return [Prefilled(recipe, error=error) for recipe in recipes]
