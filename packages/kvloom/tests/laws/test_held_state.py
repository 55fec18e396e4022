"""What layers hold that evict by score or recall: of rows, after failures, in copies, in bytes."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from backends import by_reference
from families import BY_AGE, FAMILIES, close, held, layers, run, scored_recipes, tokens
from kvloom.cache import cycle
from kvloom.errors import NotFinite
from kvloom.recipe.geometry import Geometry
from kvloom.recipe.resolve import resolve
from steps import RECIPES, D, assert_same_state, feed, padded

PROMPT, LATER = 120, 30


@scored_recipes
def test_rows_do_not_see_each_other(recipe):
    qkv, sizes = tokens(PROMPT + LATER, batch=3), [PROMPT, *[1] * LATER]
    together = run(layers(recipe), qkv, sizes)
    for row in range(3):
        own = [[x[row : row + 1] for x in each] for each in qkv]
        close(together[:, row : row + 1], run(layers(recipe), own, sizes))


@pytest.mark.sample
@scored_recipes
@pytest.mark.parametrize("rows", [[2, 0, 0], [1], [0, 1, 1, 2]])
@pytest.mark.parametrize("pads", [None, [0, 9, 40]])
def test_what_a_row_holds_moves_with_it(recipe, rows, pads):
    qkv, new = tokens(PROMPT + LATER, batch=3), tokens(LATER, batch=len(rows), seed=1)
    visible = None if pads is None else padded(pads, PROMPT + 2 * LATER)
    moved_visible = None if visible is None else visible[rows]
    moved, built, sizes = layers(recipe), layers(recipe), [PROMPT, *[1] * LATER]
    run(moved, qkv, sizes, visible)
    for cache in moved:
        cache.map(lambda x: x.index_select(0, torch.tensor(rows)))
    run(built, [[x[rows] for x in each] for each in qkv], sizes, moved_visible)
    tier = "retriever.store"  # its rows do not move: a table has where they are
    assert_same_state(held(moved, tier), held(built, tier))
    close(*(run(caches, new, [1] * LATER, moved_visible) for caches in (moved, built)))


@pytest.mark.sample
@scored_recipes
@pytest.mark.parametrize("steps", [0, LATER])
def test_a_step_that_fails_changes_nothing(recipe, steps, monkeypatch):
    """NaN is found before a layer changes; another error comes after all layers have evicted."""
    qkv, tier = tokens(PROMPT + steps + 1), "retriever.store.re"  # copies on the device are lost
    caches, sizes = layers(recipe), [PROMPT, *[1] * steps]
    run(caches, qkv, sizes[:-1])
    before, at = copy.deepcopy(held(caches, tier)), sum(sizes[:-1])
    end_step, ended = cycle.end_step, []

    def end_and_fail(*args):
        end_step(*args)
        ended.append(args)
        if len(ended) == len(caches):
            raise ZeroDivisionError

    monkeypatch.setattr(cycle, "end_step", end_and_fail)
    with pytest.raises(ZeroDivisionError):
        run(caches, qkv, sizes[-1:], at=at)
    monkeypatch.undo()
    for cache in caches:
        cache.roll_back()
    assert_same_state(before, held(caches, tier))
    run(caches, qkv, sizes[-1:], at=at)
    before = copy.deepcopy(held(caches, tier))
    for cache, each in zip(caches, qkv, strict=True):
        with pytest.raises(NotFinite):
            feed(cache, *(x[:, :, -1:] * float("nan") for x in each))
    assert_same_state(before, held(caches, tier))


@scored_recipes
def test_a_saved_state_and_a_copy_continue_alike(recipe):
    qkv = tokens(PROMPT + 2 * LATER)
    caches, loaded = layers(recipe), layers(recipe)
    run(caches, qkv, [PROMPT, *[1] * LATER])
    for cache, new in zip(caches, loaded, strict=True):
        new.load_state(copy.deepcopy(cache.state()))
    copied = copy.deepcopy(caches)
    outs = [run(each, qkv, [1] * LATER, at=PROMPT + LATER) for each in (caches, loaded, copied)]
    assert torch.equal(outs[0], outs[1])
    assert torch.equal(outs[0], outs[2])
    assert_same_state(held(caches), held(loaded))


@scored_recipes
def test_a_layer_reset_is_a_new_one(recipe):
    used, new = layers(recipe), layers(recipe)
    run(used, tokens(PROMPT + LATER), [PROMPT, *[1] * LATER])
    for cache in used:
        cache.reset()
    assert (used[0].seen, sum(cache.nbytes for cache in used)) == (0, 0)
    qkv = tokens(PROMPT + LATER, seed=1)
    assert torch.equal(*(run(caches, qkv, [PROMPT, *[1] * LATER]) for caches in (used, new)))


MEASURED = FAMILIES | RECIPES | BY_AGE | {
    name: resolve(name)
    for name in (
        "h2o:fraction=0.25,recent=0.25",
        "h2o:tokens=500",
        "h2o:tokens=50,limit=200",
        "window:tokens=50,limit=80",
        "window:tokens=50,limit=200",
        "snapkv:fraction=0.5,window=16,head_share=0,layers=joint",
        "snapkv:tokens=64,window=16,head_share=0.5,layers=pyramid",
        "pyramidkv:tokens=64,window=16",
        "pyramidkv:tokens=90,window=16",
        "minikv:fraction=0.75,bits=4",
        "minikv:fraction=0.4,recent=0.75",
        "minikv-pyramid",
        "random",
    )
}  # fmt: skip
"""Recipes of which only the bytes after a prompt are measured, too."""


@by_reference
@pytest.mark.parametrize("recipe", MEASURED.values(), ids=MEASURED)
@given(
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    st.integers(1, 300),
    st.integers(1, 3),
)
def test_predicted_bytes_are_measured_bytes(recipe, dtype, n, batch):
    caches = layers(recipe, 4)
    qkv = [[x.to(dtype) for x in each] for each in tokens(n, batch, count=4)]
    run(caches, qkv, [n])
    predicted = recipe.nbytes(n, Geometry(4, 4, 2, D, dtype), batch)
    assert sum(cache.nbytes for cache in caches) == predicted
