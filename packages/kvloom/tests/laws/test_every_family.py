"""Laws of every recipe that evicts by score or recalls: `families` has the recipes."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import probe
from backends import by_reference
from families import BY_AGE, FAMILIES, every_family, held, layers, run, tokens
from kvloom.cache import cycle
from kvloom.cache.layer import LayerCache
from kvloom.errors import NotFinite
from kvloom.recipe.geometry import Geometry
from kvloom.recipe.resolve import resolve
from steps import RECIPES, D, assert_same_state, feed, padded

PROMPT, DRAFT, LATER = 120, 5, 30


def close(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=0, atol=2e-6)


@pytest.mark.sample
@every_family
@pytest.mark.parametrize("rejected", [0, 2, DRAFT])
@pytest.mark.parametrize("sizes", [[5], [PROMPT], [PROMPT, *[1] * 22]])
def test_a_rejected_draft_leaves_no_trace(recipe, rejected, sizes):
    if sizes == [5] and recipe.keep is not None and recipe.keep.block is not None:
        sizes = [60]  # a draft is read in one step, in which no block may be due
    at, kept = sum(sizes), DRAFT - rejected
    qkv, new = tokens(at + DRAFT), tokens(2 * LATER, seed=1)
    drafted, never = layers(recipe), layers(recipe)
    for caches in (drafted, never):
        run(caches, qkv, sizes)
    record(drafted, True)
    got = run(drafted, qkv, [DRAFT], at=at)
    for cache in drafted:
        cache.crop(rejected)
    record(drafted, False)
    if kept:
        close(got[..., :kept, :], run(never, qkv, [1] * kept, at=at))
    assert_same_state(held(drafted), held(never))
    close(*(run(caches, new, [1] * LATER) for caches in (drafted, never)))
    record(drafted, True)  # as in assisted generation: all the time, settled every round
    for at in range(LATER, 2 * LATER):
        close(*(run(caches, new, [1], at=at) for caches in (drafted, never)))
        for cache in drafted:
            cache.crop(0)


def record(caches: list[LayerCache], on: bool) -> None:
    for cache in caches:
        probe.record(cache, on)


@every_family
def test_rows_do_not_see_each_other(recipe):
    qkv, sizes = tokens(PROMPT + LATER, batch=3), [PROMPT, *[1] * LATER]
    together = run(layers(recipe), qkv, sizes)
    for row in range(3):
        own = [[x[row : row + 1] for x in each] for each in qkv]
        close(together[:, row : row + 1], run(layers(recipe), own, sizes))


@pytest.mark.sample
@every_family
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
@every_family
@pytest.mark.parametrize("pads", [[90, 7], [0, PROMPT - 2]])
def test_content_of_padding_is_irrelevant(recipe, pads):
    n = PROMPT + LATER
    visible, qkv = padded(pads, n), tokens(n)
    real = visible[:, None, :, None]
    litter = [[torch.where(real, x, 6e4 * torch.sign(torch.sin(x * 99))) for x in each]
              for each in qkv]  # fmt: skip
    outputs = [run(layers(recipe), x, [PROMPT, *[1] * LATER], visible) for x in (qkv, litter)]
    assert torch.equal(*(torch.where(real, out, 0.0) for out in outputs))


FREE_OF_PLACE = [
    name for name, recipe in FAMILIES.items()
    if recipe.store.exact and not any(x in name for x in ("pages", "dilated", "keyformer:fixed"))
    and (recipe.keep is None or recipe.keep.budget.fraction is None)
]  # fmt: skip
"""Families in which nothing depends on the place of a token, or on the length of the prompt."""


@pytest.mark.parametrize("name", FREE_OF_PLACE)
@pytest.mark.parametrize("pad", [7, 45])
def test_padding_a_row_is_leaving_it_shorter(name, pad):
    recipe, n = FAMILIES[name], PROMPT + LATER
    visible, qkv = padded([0, pad], n), tokens(n)
    outs = run(layers(recipe), qkv, [PROMPT, *[1] * LATER], visible)
    short = [[x[1:, :, pad:] for x in each] for each in qkv]
    close(outs[:, 1:, :, pad:], run(layers(recipe), short, [PROMPT - pad, *[1] * LATER]))


@pytest.mark.sample
@every_family
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


@every_family
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


@every_family
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
