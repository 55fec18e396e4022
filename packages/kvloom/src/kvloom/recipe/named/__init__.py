"""The named recipes, one file a paper or family, and the registration of others."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any, get_type_hints

from ...errors import RecipeError
from ...registry import Registry
from ..spec import Recipe
from . import general  # whose functions have the names of modules
from .evict import h2o, keyformer, pyramidkv, random, snapkv
from .exact import full
from .expected import expected
from .general import PARTS
from .kitty import kitty
from .kivi import kivi, kivi_4
from .kvarn import kvarn
from .kvzip import kvzip
from .minikv import minikv, minikv_pyramid, minikv_snap, minikv_snap_pyramid
from .norms import knorm, vatp
from .recall import clusterkv, clusterkv_2bit, infinigen, quest, topk
from .recommended import balanced, near_lossless, small, tiny
from .rptq import rptq
from .rtn import rtn
from .skvq import skvq, skvq_k2v1_5
from .smoothquant import smoothquant
from .turbo import turbo
from .window import dilated, streaming, window

__all__ = ["PARTS", "RECIPES", "Build", "register_recipe"]

Build = Callable[..., Recipe]

RECIPES: Registry[Build] = Registry(
    "recipe",
    {
        "full": full,
        "near-lossless": near_lossless,
        "balanced": balanced,
        "small": small,
        "tiny": tiny,
        "clusterkv": clusterkv,
        "clusterkv-2bit": clusterkv_2bit,
        "dilated": dilated,
        "expected": expected,
        "h2o": h2o,
        "infinigen": infinigen,
        "keyformer": keyformer,
        "kitty": kitty,
        "kivi": kivi,
        "kivi-4": kivi_4,
        "knorm": knorm,
        "kvarn": kvarn,
        "kvzip": kvzip,
        "minikv": minikv,
        "minikv-pyramid": minikv_pyramid,
        "minikv-snap": minikv_snap,
        "minikv-snap-pyramid": minikv_snap_pyramid,
        "pyramidkv": pyramidkv,
        "quest": quest,
        "random": random,
        "rptq": rptq,
        "rtn": rtn,
        "skvq": skvq,
        "skvq-k2v1.5": skvq_k2v1_5,
        "smoothquant": smoothquant,
        "snapkv": snapkv,
        "streaming": streaming,
        "topk": topk,
        "turbo": turbo,
        "vatp": vatp,
        "window": window,
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
    for option, one in inspect.signature(build).parameters.items():
        if one.kind is one.VAR_KEYWORD:
            continue
        if option == "start":
            raise RecipeError(
                f"recipe {name!r} cannot have an option 'start', which every recipe has already; "
                "rename it"
            )
        if one.default is one.empty or option not in hints:
            raise RecipeError(
                f"option {option!r} of recipe {name!r} needs a default and an annotation of int, "
                "float, str or bool"
            )
