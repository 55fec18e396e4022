"""The caches of several recipes, filled with one context by one forward pass."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor
from transformers import PreTrainedModel

from ..hf.cache import Cache
from ..hf.fan_out import Follower, prefill_together
from ..recipe.spec import Recipe
from . import clock


@dataclass
class Prefilled:
    """A recipe's cache after a context."""

    recipe: Recipe
    cache: Cache | None
    seconds: float
    error: Exception | None = None


def prefill_groups(
    model: PreTrainedModel, recipes: Sequence[Recipe], ids: Tensor
) -> Iterator[Prefilled]:
    """Yield each recipe's cache, the exact one first."""
    leader = Cache(model, recipes[0])
    found: list[tuple[Recipe, Follower | Exception]] = []
    followers: list[Follower] = []
    for recipe in recipes[1:]:
        try:
            follower = Follower(Cache(model, recipe))
            followers.append(follower)
            found.append((recipe, follower))
        except Exception as error:
            found.append((recipe, error))
    begin = clock.seconds(model.device)
    prefill_together(model, leader, followers, clock.seconds, input_ids=ids.to(model.device))
    seconds = clock.seconds(model.device) - begin - sum(f.seconds for f in followers)
    yield Prefilled(recipes[0], leader, seconds)
    for recipe, f in found:
        if isinstance(f, Exception):
            yield Prefilled(recipe, None, 0.0, f)
        else:
            yield Prefilled(recipe, f.cache, seconds + f.seconds, f.error)
