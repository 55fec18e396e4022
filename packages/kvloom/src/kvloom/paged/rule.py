"""The rule by which an engine's pages are packed, as a recipe.

An engine shares full pages between requests as soon as they are full, so a page is packed when its
last token arrives, keys and values together, and the tokens of a page that is not full are exact. A
recipe's own schedule (KIVI's queue of exact values, SKVQ's window) gives way to this one. Decides
which recipes pages can hold.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..errors import IncompatibleRecipe
from ..recipe import LayerOverride, Protect, Recipe, resolve
from ..store import Packed, Store


def packed_by_page(
    recipe: Recipe | str, page: int, engine: str, option: str, evicts: bool = False
) -> Recipe:
    """Return the recipe whose cache in transformers packs the same tokens as an engine's pages.

    Formats, sinks and eviction are those of the recipe. A cache packs pages after the sinks, and an
    engine from the first token on. Rows of a cache that begin with as many tokens of padding as the
    recipe has sinks have the engine's pages. What an eviction leaves begins with the sinks in both;
    heads with different numbers of tokens pack pages of their own in an engine alone.

    Args:
        recipe: Any recipe, or its name.
        page: Tokens of a page.
        engine: What errors call the engine.
        option: How a user spells the size of a page, up to the number.
        evicts: Whether the engine evicts from a prompt that it has read.

    Raises:
        IncompatibleRecipe: Pages cannot hold the recipe; with the nearest one that they can.
        ValueError: The page does not fit the recipe.
    """
    named = resolve(recipe)
    check_pages_hold(named, engine, evicts)
    most = max(protect.sinks for protect in _parts(named, "protect"))
    if most > page:
        raise ValueError(
            f"recipe {named.name!r} keeps {most} first tokens exact, and a page has {page}; use "
            f"sinks={page} or fewer, or a larger {option.rstrip(' =')}"
        )
    for store in named.stores:
        for fmt in store.quantized.values():
            if page % fmt.block_tokens:
                raise ValueError(
                    f"recipe {named.name!r} packs whole groups of {fmt.block_tokens} tokens, and a "
                    f"page has {page}; use {option}"
                    f"{-(-page // fmt.block_tokens) * fmt.block_tokens}"
                )
    return replace(
        named,
        store=_store(named.store, page),
        protect=Protect(named.protect.sinks),
        layers=tuple(_override(override, page) for override in named.layers),
    )


def check_pages_hold(recipe: Recipe, engine: str, evicts: bool) -> None:
    """Raise `IncompatibleRecipe` for a recipe that pages of any size cannot hold.

    engine: what the error calls the engine. evicts: see `packed_by_page`.
    """
    if problems := _problems(recipe, evicts):
        raise IncompatibleRecipe(recipe.name, [f"in {engine}, {problem}" for problem in problems])


def _parts(recipe: Recipe, name: str) -> list[Any]:
    """Return a part of the recipe, and that of each override that has one."""
    parts = [getattr(recipe, name), *(override.parts.get(name) for override in recipe.layers)]
    return [part for part in parts if part is not None]


def _problems(recipe: Recipe, evicts: bool) -> list[str]:
    """Return why pages cannot hold this recipe, one sentence each; empty if they can."""
    problems, keeps = [], _parts(recipe, "keep")
    if any(not evicts or keep.when != "prompt" for keep in keeps):
        held = "every token after the prompt" if evicts else "every token of a request"
        problems.append(
            f"pages hold {held}, and this recipe evicts some; use "
            f"{_nearest(recipe)!r}, which keeps all of them in fewer bits"
        )
    elif keeps:
        problems += _eviction_problems(recipe)
    if _parts(recipe, "recall"):
        problems.append(
            "a step reads every page, and this recipe recalls a choice of tokens; use "
            f"{_nearest(recipe)!r}, which reads all of them in fewer bits"
        )
    if recipe.compress_after:
        problems.append(
            f"pages are packed as they fill; leave out compress_after={recipe.compress_after}"
        )
    if any(protect.outliers is not None for protect in _parts(recipe, "protect")):
        problems.append("exact tokens within a packed page have no place; leave out outliers")
    problems += [
        f"{side}: format {fmt.kind!r} has no kernels; use one of kvloom's own formats"
        for store in recipe.stores
        for side, fmt in store.formats.items()
        if not isinstance(fmt, Packed)
    ]
    return list(dict.fromkeys(problems))


def _eviction_problems(recipe: Recipe) -> list[str]:
    """Return why pages cannot hold what this recipe keeps of a prompt, one sentence each."""
    keeps = _parts(recipe, "keep")
    formats = [fmt for store in recipe.stores for fmt in store.quantized.values()]
    found = {
        "the model reads a prompt once, and the score repeats it; use another, such as rotated": (
            recipe.repeats_prompt
        ),
        "tokens keep their positions; use positions=original": any(
            keep.renumbers for keep in keeps
        ),
        "a head's page has tokens of any positions; use pre_rope=false": any(
            fmt.pre_rope for fmt in formats
        ),
        "each head packs its own tokens; use span=head, or other formats, such as near-lossless": (
            any(fmt.span == "layer" for fmt in formats)
        ),
        "a preempted request reads its answer as a prompt; leave out ids, spans and roles": any(
            protect.marks for protect in _parts(recipe, "protect")
        ),
    }
    return [problem for problem, has in found.items() if has]


def _nearest(recipe: Recipe) -> str:
    """Return the name of the nearest recipe that works."""
    formats = [fmt for store in recipe.stores for fmt in store.quantized.values()]
    if not formats or min(fmt.bits for fmt in formats) > 3:
        return "near-lossless"
    plain = all(fmt.rotation == "none" and not fmt.regroups for fmt in formats)
    return "kivi" if plain else "balanced"


def _override(override: LayerOverride, page: int) -> LayerOverride:
    parts = {name: x for name, x in override.parts.items() if name != "recall"}
    if "store" in parts:
        parts["store"] = _store(parts["store"], page)
    if "protect" in parts:
        parts["protect"] = Protect(parts["protect"].sinks)
    return LayerOverride(override.where, **parts) if parts else override


def _store(store: Store, page: int) -> Store:
    formats: dict[str, Any] = {
        side: replace(fmt, residual=page, unit=None) for side, fmt in store.quantized.items()
    }
    return replace(store, **formats)
