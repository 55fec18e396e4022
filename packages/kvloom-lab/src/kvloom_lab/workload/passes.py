"""Forward passes that several recipes share: of a prompt, and of the steps after it.

One pass of a prompt fills the caches of several recipes: of as many as fit into memory together. A
measurement after it is a generator: it yields a `ForwardRequest` where it needs a forward pass, and
is sent the logits. The passes that several measurements request next run as one batch where their
sizes agree.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvloom import Cache
from kvloom.errors import IncompatibleRecipe, RecipeError
from kvloom.hf import (
    BatchedCaches,
    Follower,
    can_batch,
    prefill_many,
    read_tokens,
    supported_model,
)
from kvloom.hf import geometry as model_geometry
from kvloom.recipe import Geometry, Recipe, resolve

from . import clock

GROUP_SIZE = 4  # the caches of a group have at most the bytes of this many exact caches
MEMORY_SHARE = 0.5  # and this share of the memory that is available
BATCH = 8  # measurements whose forward passes are one batch
Result = TypeVar("Result")


class ForwardRequest(NamedTuple):
    """A forward pass: append ids [B, T] to a cache.

    all_logits: whether the logits of all positions are returned [B, T, V], not of the last [B, V].
    """

    ids: Tensor
    cache: Cache
    all_logits: bool = False


Measurement = Generator[ForwardRequest, Tensor, Result]
"""Yields `ForwardRequest`, is sent logits, and returns a result."""


# the steps after a prompt


def run_batch(
    model: PreTrainedModel, measurements: Sequence[Measurement[Result]]
) -> list[Result | Exception]:
    """Return what each measurement returned, or the exception it raised.

    An exception of a forward pass is raised where its measurement requested it.
    """
    results: list[Any] = [None] * len(measurements)
    requests: dict[int, ForwardRequest] = {}

    def resume(i: int, logits: Tensor | Exception | None) -> None:
        """Go on with measurement i until its next request or its end."""
        try:
            if isinstance(logits, Exception):
                requests[i] = measurements[i].throw(logits)
            else:
                requests[i] = measurements[i].send(logits)  # type: ignore[arg-type]  # None starts
        except StopIteration as end:
            results[i] = end.value
        except Exception as error:
            results[i] = error

    for i in range(len(measurements)):
        resume(i, None)
    while requests:
        pending = dict(requests)
        requests.clear()
        for numbers in _by_size(pending):
            answers = _logits(model, [pending[i] for i in numbers])
            for i, logits in zip(numbers, answers, strict=True):
                resume(i, logits)
    return results


def run_alone(model: PreTrainedModel, measurement: Measurement[Result]) -> Result:
    """Return what a measurement returns; raise what it raises."""
    (result,) = run_batch(model, [measurement])
    if isinstance(result, Exception):
        raise result
    return result


def _logits(model: PreTrainedModel, requests: Sequence[ForwardRequest]) -> list[Tensor | Exception]:
    """Return the logits of passes of equal size: as one batch, or one by one where that fails."""
    caches = [request.cache for request in requests]
    if len(requests) > 1 and can_batch(model, caches):
        ids = torch.cat([request.ids for request in requests])
        try:
            logits = read_tokens(model, ids, BatchedCaches(model, caches), requests[0].all_logits)
        except Exception:  # of one of them: find out which, each in a pass of its own
            pass
        else:
            return list(logits.split([len(request.ids) for request in requests]))
    return [_logits_alone(model, request) for request in requests]


def _logits_alone(model: PreTrainedModel, request: ForwardRequest) -> Tensor | Exception:
    try:
        return read_tokens(model, *request)
    except Exception as error:
        return error


def _by_size(requests: dict[int, ForwardRequest]) -> Iterator[list[int]]:
    """Divide requests by their new tokens, wanted logits, and the tokens of their caches."""
    sizes: dict[tuple[int, bool, int], list[int]] = {}
    for i, request in requests.items():
        key = request.ids.shape[1], request.all_logits, request.cache.get_seq_length()
        sizes.setdefault(key, []).append(i)
    yield from sizes.values()


# the prompt


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
    exact = resolve("full")
    leader = Cache(model, exact)
    prompts = [
        Prefilled(recipe, leader) if recipe == exact else _new(model, recipe) for recipe in recipes
    ]
    followers = {
        i: Follower(prompt.cache)
        for i, prompt in enumerate(prompts)
        if prompt.cache is not None and prompt.cache is not leader
    }
    logits, seconds = prefill_many(
        model, leader, list(followers.values()), lambda: clock.seconds(model.device), input_ids=ids
    )
    for i, prompt in enumerate(prompts):
        if prompt.cache is leader:
            prompt.seconds = seconds
        elif i in followers:
            prompt.seconds, prompt.error = followers[i].seconds, followers[i].error
            if prompt.error is not None:
                prompt.cache = None
    return logits, prompts


def groups(
    model: PreTrainedModel, recipes: Sequence[Recipe], rows: int, tokens: int
) -> list[list[Recipe]]:
    """Divide recipes, in order, into groups whose caches fit into memory at the same time.

    rows, tokens: the size of the prompt that the caches hold, in layers of full attention. A
    group's predicted bytes are at most `GROUP_SIZE` times those of exact caches, and at most half
    of the memory available now; a larger recipe has a group of its own. The exact caches that every
    forward pass needs are not counted.
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
    info = Path("/proc/meminfo")
    lines = info.read_text().splitlines() if info.exists() else []
    numbers = (line.split() for line in lines if line.startswith("MemAvailable:"))
    return next((int(kib) << 10 for _, kib, *_ in numbers), None)


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
