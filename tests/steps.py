"""What tests of a layer cache share: random steps, feeding them, and reading the state back."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from kvloom.cache.layer import LayerCache
from kvloom.cache.segment import Segment
from kvloom.kernels.quantize.reference import unpack_codes
from kvloom.positions.alibi import Alibi, positions
from kvloom.recipe import Protect, Recipe
from kvloom.recipe.resolve import resolve
from kvloom.store import Packed, Store
from kvloom.store.kv_side import KVSide
from sampling import slow_except

D = 32  # head dimension of the laws: groups 16 and 32 divide it
SCALE = D**-0.5
SOME = [1, 1, 1, 20, 1, 12, 1, 3]  # steps after which every residual has moved on
SOME_TOKENS = sum(SOME)


def _store(keys: Packed | None, values: Packed | None, sinks: int = 0, recent=0) -> Recipe:
    return Recipe(store=Store(keys, values), protect=Protect(sinks, recent))


RECIPES: dict[str, Recipe] = {
    name: resolve(name)
    for name in (
        "full",
        "kivi:group=32,residual=32",
        "kivi:group=16,residual=64,meta=fp32",
        "kivi-4:group=16,residual=16,meta=bf16",
        "kivi:bits=3,group=32,residual=32",
        "kivi:bits=8,group=32,residual=96",
        "kivi:bits=1.5,group=32,residual=32,meta=fp8",
        "rtn:bits=1,group=16",
        "rtn:group=16",
        "rtn:bits=3,residual=5",
        "window:tokens=20",
        "streaming:tokens=24,sinks=4",
    )
} | {
    "keys only": _store(Packed(2, "channel", 16, residual=16), None),
    "values only": _store(None, Packed(3, "token", 16), recent=3),
    "swapped axes": _store(
        Packed(4, "token", 16, residual=8), Packed(2, "channel", 32, residual=32), recent=(7, 10)
    ),
    "fp8, layer": _store(
        Packed(1.5, "token", 32, "fp8", span="layer", clip=0.9),
        Packed(2, "token", 16, "fp8", clip=0.95),
        sinks=2,
        recent=9,
    ),
    "rotated": _store(
        Packed(3, "token", 0, rotation="group"),
        Packed(1.5, "token", 16, "fp8", rotation="group"),
        recent=4,
    ),
    "channels": _store(
        Packed(2, "channel", 32, residual=32),
        Packed(3, "channel", 16, residual=48),
        sinks=3,
        recent=(0, 9),
    ),
    "rotated heads": _store(
        Packed(2, "channel", 16, residual=32, rotation="head"),
        Packed(4, "token", 16, rotation="head"),
        sinks=2,
        recent=(0, 9),
    ),
    "sinks, packed": _store(
        Packed(2, "channel", 32, residual=32), Packed(2, "token", 32), sinks=3, recent=(0, 32)
    ),
}

CORE = (
    "kivi:group=32,residual=32",
    "streaming:tokens=24,sinks=4",
    "fp8, layer",
    "channels",
    "rotated heads",
)
"""Recipes with every part of a layer between them.

The others have a part of these, or differ in bits, group or metadata.
"""

every_recipe = pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
core_recipes = pytest.mark.parametrize("recipe", slow_except(RECIPES, *CORE))
"""Every recipe with `-m slow`; those of CORE by default."""


def draw(seed: int, tokens: int, batch: int = 1, hq: int = 2, hk: int = 1, dim: int = D):
    """Random q, k, v of `tokens` tokens."""
    g = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(batch, h, tokens, dim, generator=g) for h in (hq, hk, hk))


def feed(
    cache: LayerCache, q, k, v, sizes=None, visible=None, scale=SCALE, softcap=None, slopes=None
) -> Tensor:
    """Attend in steps of `sizes` tokens (None: all at once); the outputs one after the other.

    visible: bool [B, tokens ever seen by the cache]. slopes: of ALiBi, fp32 [Hq].
    """
    outs, at, past = [], 0, cache.seen
    for t in [q.shape[2]] if sizes is None else [t for t in sizes if t]:
        see = None if visible is None else visible[:, : past + at + t]
        part = [x[:, :, at : at + t] for x in (q, k, v)]
        alibi = None
        if slopes is not None:
            alibi = Alibi(slopes, positions(see, len(q), past + at + t, q.device))
        outs.append(cache.attend(*part, scale=scale, visible=see, softcap=softcap, alibi=alibi))
        at += t
    assert at == q.shape[2], "sizes do not sum up to the tokens given"
    return torch.cat(outs, dim=2)


def padded(pads: list[int], tokens: int) -> Tensor:
    """The mask of a batch whose row i starts with pads[i] padded slots, bool [B, tokens]."""
    return torch.arange(tokens) >= torch.tensor(pads)[:, None]


def build(recipe: Recipe, q, k, v, sizes=None, visible=None, name="this layer") -> LayerCache:
    """A cache that has seen these tokens."""
    cache = LayerCache(recipe, name)
    feed(cache, q, k, v, sizes, visible)
    return cache


def state(cache: LayerCache, *without: str) -> dict[str, Any]:
    """All that a cache holds, by name; without: the beginnings of names that are left out.

    Left out are empty tensors, what no token is in, and what a caller has set or only measures.
    """
    held = dict(_leaves(cache.state()))
    for name in [name for name in held if name.endswith(".packed.codes")]:
        path, side = name.removesuffix(".codes"), name.split(".")[-3]
        bits = getattr(cache.recipe.store, side).bits  # those of a last byte may be of no token
        held[f"{path}.rows"] = held[name].shape[2]
        held[name] = unpack_codes(held[name], bits, held[f"{path}.count"])
    if (free := held.get("storage.free")) is not None:
        for name in ("keys", "values", "scores", "logical_index"):
            x = held[f"storage.{name}"]
            slot = free.view(*free.shape, *(1,) * (x.dim() - 3)).expand(*free.shape, *x.shape[3:])
            held[f"storage.{name}"] = x.scatter(2, slot, 0)
    left_out = ("tokens_read", "recording", "observed", *without)
    return {name: x for name, x in held.items() if not name.startswith(left_out)}


def _leaves(tree: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """The tensors and numbers of a saved state, by name, without spare room."""
    if isinstance(tree, dict):
        parts = {"": tree["live"]} if tree.keys() == {"live", "start", "room"} else tree
        for key, part in parts.items():
            yield from _leaves(part, f"{name}.{key}".strip("."))
    elif isinstance(tree, list | tuple):
        for i, part in enumerate(tree):
            yield from _leaves(part, f"{name}.{i}")
    elif tree is not None and not (isinstance(tree, Tensor) and tree.numel() == 0):
        yield name, tree


def allocated(body: Segment) -> Iterator[tuple[Tensor, int]]:
    """Each tensor of a segment with its spare room, and how many of its rows are live."""
    for side in (body.keys, body.values):
        if side.tail.allocation is not None:
            yield side.tail.allocation.data, len(side.tail)
        if side.packed is not None and side.packed.allocation is not None:
            live = (x.shape[2] for x in side.packed.live)
            yield from zip(side.packed.allocation.tensors, live, strict=True)


def assert_same_state(a, b) -> None:
    """Both states hold the same things, bit by bit."""
    assert a.keys() == b.keys(), f"one has {a.keys() ^ b.keys()}"
    for name in a:
        same = torch.equal(a[name], b[name]) if isinstance(a[name], Tensor) else a[name] == b[name]
        assert same, f"{name} differs: {a[name]} != {b[name]}"


def rows(held, index: list[int]):
    """The state of some batch rows only."""
    return {n: x[index] if isinstance(x, Tensor) else x for n, x in held.items()}


def unpacked(side: KVSide) -> Tensor:
    """All tokens of one side as attention sees them, [B, Hk, N, D]."""
    parts = [side.packed.view().tensor()] if side.packed_count else []
    return torch.cat([*parts, *([side.tail.view()] if len(side.tail) else [])], dim=2)
