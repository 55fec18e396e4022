"""The rule by which vLLM's pages are packed, as a recipe of kvloom.

vLLM shares full pages between requests as soon as they are full, so a page is packed when its last
token arrives, keys and values together, and the tokens of a page that is not full are exact. A
recipe's own schedule (KIVI's queue of exact values, SKVQ's window) gives way to this one.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from kvloom import LayerOverride, Protect, Recipe, Store
from kvloom.recipe import resolve
from kvloom.store import Packed

from .refusal import refuse_recipe, refuse_sinks


def paged(recipe: Recipe | str, page: int) -> Recipe:
    """Return the recipe whose cache in transformers packs the same tokens as pages of vLLM.

    page: tokens of a page, vLLM's block size. Formats and sinks are those of the recipe. Raises
    `ValueError` for a recipe that vLLM's pages cannot hold, with the nearest one that they can.
    """
    named = resolve(recipe)
    refuse_recipe(named)
    refuse_sinks(named, page)
    overrides = [_override(override, page) for override in named.layers]
    return replace(
        named,
        store=_store(named.store, page, named.name),
        protect=Protect(named.protect.sinks),
        layers=tuple(overrides),
    )


def _override(override: LayerOverride, page: int) -> LayerOverride:
    parts = dict(override.parts)
    for name in ("keep", "recall"):
        parts.pop(name, None)
    if "store" in parts:
        parts["store"] = _store(parts["store"], page, f"layers {override.where}")
    if "protect" in parts:
        parts["protect"] = Protect(parts["protect"].sinks)
    return LayerOverride(override.where, **parts) if parts else override


def _store(store: Store, page: int, name: str) -> Store:
    formats: dict[str, Any] = {
        side: _format(fmt, page, name) for side, fmt in store.quantized.items()
    }
    return replace(store, **formats)


def _format(fmt: Packed, page: int, name: str) -> Packed:
    unit = fmt.whole
    if page % unit:
        raise ValueError(
            f"recipe {name!r} packs whole groups of {unit} tokens, and a page has {page}; use "
            f"--block-size {-(-page // unit) * unit}"
        )
    return replace(fmt, residual=page, unit=None)
