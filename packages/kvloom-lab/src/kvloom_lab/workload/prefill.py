"""Prefill once, measure many: one forward pass of a prompt fills the caches of several recipes.

Decides which recipes share a pass, so that their caches fit into memory together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvloom import Cache
from kvloom.errors import IncompatibleRecipe, RecipeError
from kvloom.hf import Follower, prefill_together, supported_model
from kvloom.hf import geometry as model_geometry
from kvloom.recipe import Geometry, Recipe, resolve

from . import clock

GROUP_SIZE = 4  # the caches of a group have at most the bytes of so many exact caches
MEMORY_SHARE = 0.5  # and this share of the memory that is available


@dataclass
class Prefilled:
    """A cache that holds a prompt, or the error that left the recipe without one.

    seconds: what the prompt takes in this cache alone; see `Follower`.
    """

    recipe: Recipe
    cache: Cache | None = None
    seconds: float = 0.0
    error: Exception | None = None


def prefill(
    model: PreTrainedModel, recipes: Sequence[Recipe], ids: Tensor
) -> tuple[Tensor, list[Prefilled]]:
    """Fill a new cache of every recipe with the prompt `ids`, int64 [B, T].

    recipes: without repetitions. Returns the logits of the last position [B, V], and a `Prefilled`
    for each recipe, in order. Each cache is as if it had read the prompt alone. The forward pass
    attends in an exact cache: that of the recipe `full` if it is one of the recipes, else one that
    is dropped afterwards.

    An error of one recipe, such as `IncompatibleRecipe` or `NotFinite`, does not stop the others.
    Raises the error of the forward pass itself.
    """

    def now() -> float:
        return clock.seconds(model.device)

    exact = resolve("full")
    leader = Cache(model, exact)
    results = [
        Prefilled(recipe, leader) if recipe == exact else _new(model, recipe) for recipe in recipes
    ]
    followers = {
        i: Follower(x.cache)
        for i, x in enumerate(results)
        if x.cache is not None and x.cache is not leader
    }
    logits, forward = prefill_together(model, leader, list(followers.values()), now, input_ids=ids)
    for i, x in enumerate(results):
        if x.cache is leader:
            x.seconds = forward
        elif i in followers:
            follower = followers[i]
            x.seconds = follower.seconds
            if follower.error is not None:
                x.cache, x.error = None, follower.error
    return logits, results


def groups(
    model: PreTrainedModel, recipes: Sequence[Recipe], rows: int, tokens: int
) -> list[list[Recipe]]:
    """Divide recipes, in order, into groups whose caches fit into memory at the same time.

    rows, tokens: the size of all prompts that the caches of one recipe hold, in layers of full
    attention. A group's predicted bytes are at most `GROUP_SIZE` times those of exact caches, and
    at most half of the memory available now; a larger recipe has a group of its own. The exact
    caches that every forward pass needs are not counted.
    """
    geometry, exact = model_geometry(supported_model(model)), resolve("full")
    most: float = GROUP_SIZE * exact.nbytes(tokens, geometry, rows)
    available = available_bytes(model.device)
    if available is not None:
        most = min(most, MEMORY_SHARE * available)
    grouped: list[list[Recipe]] = []
    total = 0
    for recipe in recipes:
        nbytes = 0 if recipe == exact else _predicted(recipe, geometry, rows, tokens)
        if not grouped or total + nbytes > most:
            grouped.append([])
            total = 0
        grouped[-1].append(recipe)
        total += nbytes
    return grouped


def available_bytes(device: torch.device) -> int | None:
    """Return the free memory of a GPU, or of the machine; None if the system does not report it."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    facts = Path("/proc/meminfo")
    lines = facts.read_text().splitlines() if facts.exists() else []
    found = (line.split() for line in lines if line.startswith("MemAvailable:"))
    return next((int(kib) << 10 for _, kib, *_ in found), None)


def _predicted(recipe: Recipe, geometry: Geometry, rows: int, tokens: int) -> int:
    """Return the bytes of a recipe's caches; 0 if it does not fit the model or the prompts."""
    try:
        recipe.check(geometry)
        return recipe.nbytes(tokens, geometry, rows)
    except (IncompatibleRecipe, RecipeError):  # `prefill` returns the reason
        return 0


def _new(model: PreTrainedModel, recipe: Recipe) -> Prefilled:
    """Return an empty cache of a recipe, or why it cannot be made."""
    try:
        return Prefilled(recipe, Cache(model, recipe))
    except Exception as error:
        return Prefilled(recipe, error=error)
