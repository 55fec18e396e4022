"""Formats of other distributions with budgets per head, tiers and windows.

The tokens that stay are those of kvloom's own format with equal units, and what a layer holds is
what the format unpacks.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from itertools import product
from typing import ClassVar

import pytest
import torch
from examples import installed
from torch import Tensor

import kvloom
import probe
import tiny
from beams import assert_rows_follow_beams
from floor import short_prompts_evict
from kvloom.cache.layer import LayerCache
from kvloom.cache.step import Queries, StepInputs
from kvloom.keep import Scorer
from kvloom.recall import Tier
from kvloom.recipe import Geometry, Protect, Recipe, SlidingLayer, resolve
from kvloom.store import FORMATS, Format, Packed, Store
from steps import SCALE, assert_same_state, draw, feed, padded, state

__all__ = ["short_prompts_evict"]

B, HQ, HK, D, UNIT, PROMPT = 2, 4, 2, 32, 16, 150


@dataclass(frozen=True)
class Tiles(Format):
    """8-bit codes in tensors of five dimensions, scales in one of three; it gathers two units."""

    unit: int = UNIT
    residual: int = 2 * UNIT
    kind: ClassVar[str] = "tiles"

    def pack(self, x: Tensor, nonpadding: Tensor | None = None) -> tuple[Tensor, ...]:
        tiles = x.float().unflatten(2, (-1, self.unit))
        scale = (tiles.abs().amax(dim=(3, 4)) / 127).clamp_min(1e-30)
        return (tiles / scale[..., None, None]).round().to(torch.int8), scale

    def unpack(self, tensors: tuple[Tensor, ...], dtype: torch.dtype) -> Tensor:
        codes, scale = tensors
        return (codes * scale[..., None, None]).flatten(2, 3).to(dtype)

    def nbytes(self, tokens: int, head_dim: int, heads: int = 1) -> int:
        return heads * (tokens * head_dim + 4 * tokens // self.unit)

    def to_pack(self, tokens: int, recent: int, prompt: bool = True) -> int:
        return max(0, tokens - recent) // self.residual * self.residual


@pytest.fixture(autouse=True)
def _installed():
    with installed("my_format"):
        yield


def stores(name: str) -> Store:
    """A store of a foreign format; "own" is kvloom's, with equal units."""
    if name == "own":
        keys, values = (Packed(8, "channel", UNIT, "fp32", residual=UNIT) for _ in "kv")
        return Store(keys, values)
    int8 = FORMATS["int8"](UNIT)
    return {
        "int8": Store(int8, int8),
        "tiles": Store(Tiles(), Tiles()),
        "mixed": Store(int8, Packed(4, "token", 16)),
        "keys": Store(keys=Tiles()),
    }[name]


def as_stored(fmt: Format | None, x: Tensor) -> Tensor:
    """What comes back of x [1, 1, N, D], whole units."""
    return x if fmt is None or not x.shape[2] else fmt.unpack(fmt.pack(x), x.dtype)


foreign = pytest.mark.parametrize("name", ["int8", "tiles", "mixed", "keys"])


class SmallKeys(Scorer):
    """A score that differs from head to head."""

    kind = "small-keys"

    def __call__(self, step):
        return -step.k.float().norm(dim=-1)


# --- budgets per head -----------------------------------------------------------------------------

KEEPS = {
    "alone": "snapkv:tokens=80,window=16,head_share=0.2",
    "joint": "snapkv:tokens=80,window=16,head_share=0.2,layers=joint",
    "blocks": "small:block=64",
    "repetition": "tiny",
}


def with_heads(keep: str, name: str) -> Recipe:
    plain = replace(resolve(KEEPS[keep]).keep, fit=None)
    if keep != "repetition":
        plain = replace(plain, scorer=SmallKeys())
    return Recipe(keep=plain, store=stores(name), protect=Protect(sinks=2))


def filled(recipe: Recipe, visible: Tensor | None = None) -> tuple[LayerCache, tuple[Tensor, ...]]:
    """A layer that has read a prompt, and what it read, one more token included."""
    q, k, v = draw(7, PROMPT + 1, batch=B, hq=HQ, hk=HK)
    k = k * (1 + 0.1 * torch.arange(HK)[:, None, None])
    layer = LayerCache(recipe)
    layer.observe()
    see = None if visible is None else visible[:, :PROMPT]
    feed(layer, *(x[:, :, :PROMPT] for x in (q, k, v)), visible=see)
    if layer.repetition is not None:
        new = (x[:, :, :PROMPT] for x in (k, v))
        see = None if see is None else torch.cat([see, see], dim=1)[:, None]
        layer.repeat(StepInputs(Queries(q[:, :, :PROMPT], SCALE, see), *new), (0, PROMPT))
        layer.end_repetition()
    return layer, (q, k, v)


def held_of_head(layer: LayerCache, row: int, head: int) -> tuple[Tensor, Tensor, Tensor]:
    """The logical indices of a head's tokens, and their keys and values as they are read."""
    ragged, segment = probe.ragged(layer), probe.tokens(layer)
    index = segment.step_index(torch.device("cpu")).expand(B, HK, -1)[row, head]
    parts = [side.kv_view().tensor()[row, head] for side in (segment.keys, segment.values)]
    sinks = probe.sinks(layer)
    if sinks is not None:
        index = torch.cat([sinks.logical(layer.seen)[row], index])
        both = zip((sinks.keys, sinks.values), parts, strict=True)
        parts = [torch.cat([x[row, head], y]) for x, y in both]
    first, count = ragged.spans.bounds[row, head].tolist()
    index = torch.cat([index, ragged.logical()[row, head, :count]])
    sides = [side.kv_view().tensor()[0, 0, first : first + count]
             for side in (ragged.keys, ragged.values)]  # fmt: skip
    k, v = (torch.cat(pair) for pair in zip(parts, sides, strict=True))
    return index, k, v


@foreign
@pytest.mark.parametrize("keep", KEEPS)
@pytest.mark.parametrize("pad", [0, 9])
def test_heads_keep_the_tokens_of_kvlooms_own_format(keep, name, pad):
    visible = padded([0, pad], PROMPT + 1) if pad else None
    layer, (q, k, v) = filled(with_heads(keep, name), visible)
    own, _ = filled(with_heads(keep, "own"), visible)
    ragged, store = probe.ragged(layer), layer.recipe.store
    assert ragged.stored
    assert len({int(n) for n in ragged.spans.bounds[..., 1].flatten()}) > 1, "heads differ"
    assert torch.equal(layer.logical(), own.logical())
    for row in range(B):
        for head in range(HK):
            first, count = ragged.spans.bounds[row, head].tolist()
            index = ragged.logical()[row, head, :count]
            for side, given, fmt in (
                (ragged.keys, k, store.keys),
                (ragged.values, v, store.values),
            ):
                if isinstance(fmt, Packed):
                    continue
                got = side.kv_view().tensor()[:, :, first : first + count]
                want = given[row, head, index][None, None]
                if pad and row == 1:
                    want = want.masked_fill((index < pad)[:, None], 0.0)
                assert torch.equal(got, as_stored(fmt, want))
    held = {at: held_of_head(layer, *at) for at in product(range(B), range(HK))}
    q, k, v = (x[:, :, PROMPT:] for x in (q, k, v))
    out = feed(layer, q, k, v, visible=visible)
    for row in range(B):
        for head in range(HQ):
            kv_head = head // (HQ // HK)
            index, *held_kv = held[row, kv_head]
            index = torch.cat([index, torch.tensor([PROMPT])])
            keys, values = (torch.cat([x, new[row, kv_head]])
                            for x, new in zip(held_kv, (k, v), strict=True))  # fmt: skip
            logits = keys.double() @ q[row, head, 0].double() * SCALE
            if pad and row == 1:
                logits[index < pad] = -torch.inf
            want = logits.softmax(-1) @ values.double()
            torch.testing.assert_close(out[row, head, 0].double(), want, rtol=1e-4, atol=1e-5)


@foreign
def test_rows_with_heads_are_selected_and_saved(name):
    layer, _ = filled(with_heads("alone", name))
    loaded = LayerCache(layer.recipe)
    loaded.load_state(copy.deepcopy(layer.state()))
    swapped = copy.deepcopy(layer)
    swapped.map(lambda x: x[torch.tensor([1, 0, 1])])
    q, k, v = draw(9, 3, batch=B, hq=HQ, hk=HK)
    rows = torch.tensor([1, 0, 1])
    want = feed(layer, q, k, v, [1, 1, 1])
    assert torch.equal(feed(loaded, q, k, v, [1, 1, 1]), want)
    got = feed(swapped, *(x[rows] for x in (q, k, v)), [1, 1, 1])
    torch.testing.assert_close(got, want[rows], rtol=0, atol=2e-6)


@foreign
def test_later_blocks_join_the_tokens_of_their_heads(name):
    found = {}
    for each in (name, "own"):
        layer, _ = filled(with_heads("blocks", each))
        before = probe.ragged(layer).mean
        q, k, v = draw(11, 150, batch=B, hq=HQ, hk=HK)
        feed(layer, q, k, v, [70, 80])
        assert probe.ragged(layer).mean > before
        found[each] = layer.logical()
    assert torch.equal(found[name], found["own"])


# --- tiers ----------------------------------------------------------------------------------------


def with_tier(name: str, tier: Tier | None) -> Recipe:
    recall = resolve("quest:page=8").recall
    return Recipe(
        store=stores(name), recall=replace(recall, tokens=64, full_layers=0, tier=tier),
        protect=Protect(sinks=4, exact_recent=2),
    )  # fmt: skip


@foreign
@pytest.mark.parametrize("kind", ["host", "file"])
@pytest.mark.parametrize("steps", [0, 1])
def test_a_tier_changes_no_answer(name, kind, steps):
    cache, plain = (LayerCache(with_tier(name, t)) for t in (Tier(kind, steps=steps), None))
    q, k, v = draw(3, 190, batch=B, hq=HQ, hk=HK)
    outs = [feed(c, q, k, v, [PROMPT, *[1] * 40]) for c in (cache, plain)]
    torch.testing.assert_close(*outs, rtol=0, atol=2e-6)
    tier = probe.tier(cache)
    assert tier.tokens >= PROMPT - 3 * UNIT
    assert tier.traffic.misses > 0
    later = draw(4, 12, batch=B, hq=HQ, hk=HK)  # many queries read all offloaded tokens
    torch.testing.assert_close(feed(cache, *later), feed(plain, *later), rtol=0, atol=2e-6)


@foreign
def test_the_tokens_in_a_tier_are_those_that_the_format_unpacks(name):
    cache = LayerCache(with_tier(name, Tier()))
    q, k, v = draw(3, PROMPT, batch=B, hq=HQ, hk=HK)
    feed(cache, q, k, v)
    tier, store, sinks = probe.tier(cache), cache.recipe.store, 4
    slots = torch.stack([torch.randperm(tier.tokens)[:40] for _ in range(B * HK)]).view(B, HK, -1)
    places = slots[..., None].expand(-1, -1, -1, D)
    for fmt, given, read in zip((store.keys, store.values), (k, v), tier.read(slots), strict=True):
        if isinstance(fmt, Packed):
            continue
        want = as_stored(fmt, given[:, :, sinks : sinks + tier.tokens])
        assert torch.equal(read, want.gather(2, places))


@foreign
def test_a_tier_follows_saves_rows_and_crops(name):
    cache, plain = (LayerCache(with_tier(name, t)) for t in (Tier(), None))
    q, k, v = draw(3, 180, batch=B, hq=HQ, hk=HK)
    for c in (cache, plain):
        feed(c, q, k, v, [PROMPT, *[1] * 30])
    loaded = LayerCache(cache.recipe)
    loaded.load_state(copy.deepcopy(cache.state()))
    rows = torch.tensor([1, 1, 0])
    for c in (loaded, plain):
        c.map(lambda x: x[rows])
    later = tuple(x[rows] for x in draw(4, 30, batch=B, hq=HQ, hk=HK))
    outs = [feed(c, *later, [1] * 30) for c in (loaded, plain)]
    torch.testing.assert_close(*outs, rtol=0, atol=2e-6)
    probe.retriever(cache).restore(probe.tokens(cache))
    assert probe.count(cache) == 176
    assert probe.tier(cache).tokens == 0


# --- windows --------------------------------------------------------------------------------------


def feed_window(layer: LayerCache, q: Tensor, k: Tensor, v: Tensor, sizes: list[int]) -> None:
    at = 0
    for t in sizes:
        part = [x[:, :, at : at + t] for x in (q, k, v)]
        layer.run(StepInputs(Queries(part[0], SCALE), *part[1:], part[0] if t > 1 else None))
        at += t


@foreign
@pytest.mark.parametrize("sizes", [[250, *[1] * 90], [40, 200, *[1] * 100], [1] * 260])
def test_a_window_drops_whole_units(name, sizes):
    window = 160
    recipe = replace(Recipe(store=stores(name), protect=Protect(exact_recent=5)), sliding="packed")
    cache, whole = (LayerCache(recipe.in_windows, window=w) for w in (window, 10**6))
    qkv = draw(5, sum(sizes), batch=B, hq=HQ, hk=HK)
    for layer in (cache, whole):
        feed_window(layer, *qkv, sizes)
    for held, all_held in zip(cache.past_window(), whole.past_window(), strict=True):
        assert torch.equal(held, all_held[:, :, -(window - 1) :])
    assert window - 1 <= probe.count(cache) < window + 2 * UNIT + 32


@foreign
@pytest.mark.parametrize("tokens", [100, 171, 400])
def test_the_bytes_of_a_window_are_predicted(name, tokens):
    recipe = replace(Recipe(store=stores(name)), sliding="packed")
    cache = LayerCache(recipe.in_windows, window=160)
    feed_window(cache, *draw(5, tokens, batch=B, hq=HQ, hk=HK), [tokens])
    geometry = Geometry(1, HQ, HK, D, torch.float32)
    assert cache.nbytes == recipe.window_nbytes(tokens, SlidingLayer(0, 160, geometry)) * B


# --- in a model -----------------------------------------------------------------------------------

MODEL_RECIPES = {
    "heads": lambda: replace(resolve(KEEPS["joint"]), store=stores("int8"), name="heads"),
    "blocks": lambda: replace(resolve("small:block=64"), store=stores("int8"), name="blocks"),
    "tier": lambda: replace(with_tier("int8", Tier()), name="tier"),
}


@pytest.mark.parametrize("name", MODEL_RECIPES)
def test_a_model_saves_them_and_follows_beams(name, tmp_path):
    model, recipe = tiny.llama(head_dim=32), MODEL_RECIPES[name]()
    ids = torch.randint(3, 200, (2, 170), generator=torch.Generator().manual_seed(3))
    cache = kvloom.Cache(model, recipe)
    with torch.no_grad():
        model(ids[:, :160], past_key_values=cache)
        assert cache.nbytes == cache.recipe.nbytes(160, cache.geometry, 2)
        model(ids[:, 160:], past_key_values=cache)
        cache.save(tmp_path / "cache")
        loaded = kvloom.Cache.load(model, tmp_path / "cache")
        for before, after in zip(probe.layers(cache), probe.layers(loaded), strict=True):
            assert_same_state(state(before, "retriever.store.resident"), state(after))
        a, b = (model(ids[:, :1], past_key_values=c).logits for c in (cache, loaded))
    assert torch.equal(a, b)
    assert_rows_follow_beams(
        model, recipe, {"input_ids": ids[:, :90], "attention_mask": torch.ones_like(ids[:, :90])}
    )
