"""Make a recipe the default of a model, and undo it."""

from __future__ import annotations

from pathlib import Path

from transformers import PreTrainedModel

from ..errors import CacheMisuse
from ..recipe.resolve import resolve
from ..recipe.spec import Recipe
from . import compat, rotary, self_check
from .cache import Cache
from .metadata import load_layer_metadata
from .report import Report, report
from .routing import route, unroute


def attach(
    model: PreTrainedModel, recipe: Recipe | str | Path = "near-lossless", check: bool = True
) -> Report:
    """Give every later `generate()` or call of this model a fresh cache of `recipe`.

    A cache that the caller passes, use_cache=False and cache_implementation work as without kvloom.

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
        CacheMisuse: A recipe is attached already.
    """
    model = compat.unwrap(model)
    compat.refuse_unsupported(model)
    routing = getattr(model, "_kvloom", None)
    if routing is not None and routing.recipe is not None:
        raise CacheMisuse(
            f"recipe {routing.recipe.name!r} is attached to this model already; "
            "call kvloom.detach(model) first"
        )
    recipe = resolve(recipe)
    recipe.check(compat.geometry(model))
    load_layer_metadata(model, recipe)
    rotary.renumbering(model, recipe)
    self_check.admit(model, Cache, check)
    result = report(model, recipe)
    route(model)
    model._kvloom.recipe, model._kvloom.new_cache = recipe, Cache
    return result


def detach(model: PreTrainedModel) -> None:
    """Restore the model as it was before `attach` or `Cache` changed it.

    Args:
        model: The model, or its wrapper.

    Raises:
        CacheMisuse: Nothing is attached.
    """
    unroute(compat.unwrap(model))
