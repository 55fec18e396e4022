"""Make a recipe the default of a model, and undo it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from ..recipe.resolve import resolve
from ..recipe.spec import Recipe
from . import compat, rotary, self_check
from .cache import Cache
from .metadata import load_layer_metadata
from .owner import Owner
from .report import Report, report
from .routing import route, unroute


def attach(
    model: PreTrainedModel, recipe: Recipe | str | Path = "near-lossless", check: bool = True
) -> Report:
    """Give every later `generate()` or call of this model a fresh cache of `recipe`.

    A cache that the caller passes, use_cache=False and cache_implementation work as without kvloom.
    A recipe that is attached already is replaced. After the block of
    `with kvloom.attach(model, recipe):`, what was attached before it is attached again, or nothing.

    Args:
        model: As for `Cache`. In the wrapper of `torch.compile` its steps run uncompiled.
        recipe: As for `Cache`.
        check: As for `Cache`.

    Returns:
        Which layers are compressed, and how much.

    Raises:
        UnsupportedModel: kvloom cannot route the model. These errors are raised before the model
            changes.
        RecipeError: There is no such recipe.
        IncompatibleRecipe: The recipe does not fit the model.
    """
    model = compat.unwrap(model)
    compat.refuse_unsupported(model)
    recipe = resolve(recipe)
    recipe.check(compat.geometry(model))
    load_layer_metadata(model, recipe)
    rotary.renumbering(model, recipe)
    self_check.admit(model, Cache, check)
    result = report(model, recipe)
    before = getattr(model, "_kvloom", None)
    former = None if before is None else (before.recipe, before.new_cache)
    route(model)
    model._kvloom.recipe, model._kvloom.new_cache = recipe, Cache
    return replace(result, _undo=partial(_restore, Owner(model), former))


def _restore(owner: Owner, former: tuple[Any, Any] | None) -> None:
    """Give a model the recipe and the maker of caches that it had; None: it was not routed."""
    model = owner.get()
    if model is None:
        return
    if former is not None:
        route(model)
        model._kvloom.recipe, model._kvloom.new_cache = former
    elif getattr(model, "_kvloom", None) is not None:
        unroute(model)


def detach(model: PreTrainedModel) -> None:
    """Restore the model as it was before `attach` or `Cache` changed it.

    Args:
        model: The model, or its wrapper.

    Raises:
        CacheMisuse: Nothing is attached.
    """
    unroute(compat.unwrap(model))


@contextmanager
def attachment_restored(model: PreTrainedModel) -> Iterator[None]:
    """Detach kvloom from the model at the end, unless it was attached at the beginning."""
    attached_before = getattr(model, "_kvloom", None) is not None
    try:
        yield
    finally:
        if not attached_before and getattr(model, "_kvloom", None) is not None:
            detach(model)
