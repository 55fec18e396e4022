"""The named recipes, a file a family, and the registration of others."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from types import NoneType
from typing import Any, get_type_hints

from ...errors import RecipeError
from ...registry import Registry
from ...registry.fields import alternatives
from ..spec import Recipe
from . import eviction, general, prompt_eviction, quantization, recall, recommended
from .general import GENERAL_OPTIONS, PARTS

__all__ = ["PARTS", "RECIPES", "Build", "register_recipe"]

Build = Callable[..., Recipe]

RECIPES: Registry[Build] = Registry(
    "recipe",
    {
        "full": general.full,
        "near-lossless": recommended.near_lossless,
        "balanced": recommended.balanced,
        "small": recommended.small,
        "tiny": recommended.tiny,
        "micro": recommended.micro,
        "clusterkv": recall.clusterkv,
        "clusterkv-2bit": recall.clusterkv_2bit,
        "dilated": eviction.dilated,
        "expected": prompt_eviction.expected,
        "h2o": eviction.h2o,
        "infinigen": recall.infinigen,
        "keyformer": eviction.keyformer,
        "kivi": quantization.kivi,
        "kivi-4": quantization.kivi_4,
        "knorm": prompt_eviction.knorm,
        "kvzip": prompt_eviction.kvzip,
        "minikv": prompt_eviction.minikv,
        "minikv-pyramid": prompt_eviction.minikv_pyramid,
        "minikv-snap": prompt_eviction.minikv_snap,
        "minikv-snap-pyramid": prompt_eviction.minikv_snap_pyramid,
        "pyramidkv": prompt_eviction.pyramidkv,
        "quest": recall.quest,
        "random": prompt_eviction.random,
        "rotated": prompt_eviction.rotated,
        "rptq": quantization.rptq,
        "rtn": quantization.rtn,
        "skvq": quantization.skvq,
        "skvq-k2v1.5": quantization.skvq_k2v1_5,
        "smoothquant": quantization.smoothquant,
        "snapkv": prompt_eviction.snapkv,
        "streaming": eviction.streaming,
        "topk": recall.topk,
        "triattention": prompt_eviction.triattention,
        "turbo": quantization.turbo,
        "vatp": eviction.vatp,
        "window": eviction.window,
        "evict": general.evict,
        "recall": general.recall,
        "store": general.store,
    },
)


def register_recipe(name: str | Build) -> Any:
    """Make a function a named recipe; a decorator, with the name or without.

    The function returns a `Recipe`. Its parameters are the options, each with a default and the
    annotation int, float, str, bool or a union of these. The first line of its docstring is the
    summary.

    Args:
        name: The name; without, it is the function's, with "-" for "_".

    Raises:
        RecipeError: The function is not of this form, or the name is taken.
    """
    if not isinstance(name, str):
        return _register(getattr(name, "__name__", "").replace("_", "-"), name)
    return partial(_register, name)


def _register(name: str, build: Build) -> Build:
    _check(name, build)
    RECIPES.register(build, name)
    return build


def _check(name: str, build: Any) -> None:
    if not callable(build) or not inspect.getdoc(build):
        raise RecipeError(
            f"recipe {name!r} must be a function with a docstring, whose first line is its summary"
        )
    hints = get_type_hints(build)
    for option, parameter in inspect.signature(build).parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            continue
        if option in GENERAL_OPTIONS:
            raise RecipeError(
                f"recipe {name!r} cannot have an option {option!r}, which every recipe has "
                "already; rename it"
            )
        kinds = set(alternatives(hints.get(option))) - {NoneType}
        spelled = kinds and kinds <= {int, float, str, bool}
        if parameter.default is parameter.empty or not spelled:
            raise RecipeError(
                f"option {option!r} of recipe {name!r} needs a default and an annotation of int, "
                "float, str or bool"
            )
