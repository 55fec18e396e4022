"""Left padding: what stands in padded slots, and how long other rows are, changes nothing.

`core_recipes` store in one layer; those of `families` have two layers, which may decide together.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import probe
from backends import by_reference
from families import FAMILIES, all_recipes, layers, tokens
from families import run as run_layers
from kvloom.cache.layer import LayerCache
from kvloom.recipe.resolve import resolve
from kvloom.recipe.spec import Recipe
from steps import RECIPES, SOME, SOME_TOKENS, core_recipes, draw, feed, padded

PROMPT = 75
ANSWER = SOME  # the steps after the prompt
TOKENS = PROMPT + SOME_TOKENS
FREE_OF_PLACE = ["full", "rtn:group=16", "rtn:bits=3,residual=5", "window:tokens=20", "values only"]
FREE_OF_PLACE += ["streaming:tokens=24,sinks=4"]
"""Recipes in which a token is stored alike wherever it stands (keys per channel are not)."""
SCORED_ANYWHERE = [
    name for name, recipe in FAMILIES.items()
    if recipe.store.exact and not any(x in name for x in ("pages", "dilated", "keyformer:fixed"))
    and (recipe.keep is None or recipe.keep.budget.fraction is None)
]  # fmt: skip
"""Families in which nothing depends on the place of a token, or on the length of the prompt."""

pads = st.lists(st.integers(0, PROMPT - 1), min_size=3, max_size=3)
cuts = st.sampled_from([[PROMPT], [40, 35], [10, 64, 1], [7] * 10 + [5]])


def run(recipe: Recipe, qkv, visible, prompt=(PROMPT,)) -> torch.Tensor:
    """Outputs of a prompt in chunks and of the steps after it."""
    sizes = [*prompt, *ANSWER]
    return real(feed(LayerCache(recipe), *qkv, sizes, visible), visible)


def real(out: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
    """Outputs of real tokens; what a padded query gets means nothing."""
    return torch.where(visible[:, None, :, None], out, 0.0)


def litter(qkv, visible, size: float, seed: int):
    """The same tokens with other content, `size` large, in padded slots."""
    g = torch.Generator().manual_seed(seed)
    at = visible[:, None, :, None]
    return [torch.where(at, x, size * torch.randn(x.shape, generator=g).clamp(-1, 1)) for x in qkv]


@all_recipes
@given(pads, st.sampled_from([1.0, 6e4]), st.integers(0, 999))
def test_content_of_padding_is_irrelevant(recipe, pads, size, seed):
    qkv, visible = tokens(TOKENS, 3, seed), padded(pads, TOKENS)
    littered = [litter(each, visible, size, seed) for each in qkv]
    sizes = [PROMPT, *ANSWER]
    outs = [run_layers(layers(recipe), x, sizes, visible) for x in (qkv, littered)]
    assert torch.equal(*(real(out, visible) for out in outs))


@core_recipes
@given(pads, cuts, st.sampled_from([1.0, 6e4]), st.integers(0, 999))
def test_content_of_padding_is_irrelevant_in_chunks(recipe, pads, cuts, size, seed):
    qkv, visible = draw(seed, TOKENS, batch=3), padded(pads, TOKENS)
    want = run(recipe, qkv, visible, cuts)
    got = run(recipe, litter(qkv, visible, size, seed), visible, cuts)
    torch.testing.assert_close(got, want, rtol=0, atol=2e-6)


@by_reference
@pytest.mark.parametrize("recording", [False, True])
@given(pads, cuts)
def test_padding_does_not_widen_a_groups_range(recording, pads, cuts):
    """Keys are far from 0, where padding might stand: every group spans its real keys only."""
    (q, k, v), visible = draw(0, TOKENS, batch=3), padded(pads, TOKENS)
    k = k + 100
    cache = LayerCache(resolve("kivi:group=16,residual=16,meta=fp32"))
    feed(cache, *(x[:, :, :PROMPT] for x in (q, k, v)), cuts, visible[:, :PROMPT])
    probe.record(cache, recording)
    feed(cache, *(x[:, :, PROMPT:] for x in (q, k, v)), ANSWER, visible)
    cache.crop(0)
    scale = probe.keys(cache).packed.live.scale
    for row, pad in enumerate(pads):
        for g in range(scale.shape[2]):
            group = k[row, :, max(pad, 16 * g) : 16 * (g + 1)]
            if group.shape[1]:
                spread = group.amax(dim=1) - group.amin(dim=1)
                torch.testing.assert_close(scale[row, :, g], spread / 3)


@core_recipes
@given(pads, cuts, st.integers(0, 999))
def test_a_padded_prompt_in_chunks_is_the_prompt_at_once(recipe, pads, cuts, seed):
    """What is stored is the same: the steps after the prompt cannot tell."""
    qkv, visible = draw(seed, TOKENS, batch=3), padded(pads, TOKENS)
    at_once, chunks = (run(recipe, qkv, visible, p)[:, :, PROMPT:] for p in ([PROMPT], cuts))
    torch.testing.assert_close(chunks, at_once, rtol=0, atol=2e-6)


@core_recipes
@given(pads, st.integers(0, 999))
def test_other_rows_padding_changes_nothing(recipe, pads, seed):
    qkv, visible = draw(seed, TOKENS, batch=3), padded(pads, TOKENS)
    together = run(recipe, qkv, visible)
    for i in range(3):
        alone = run(recipe, [x[i : i + 1] for x in qkv], visible[i : i + 1])
        torch.testing.assert_close(together[i : i + 1], alone, rtol=0, atol=2e-6)


@core_recipes
@given(st.lists(st.integers(0, PROMPT - 1), min_size=2, max_size=2), st.integers(0, 999))
def test_a_row_without_padding_does_not_notice_the_batch(recipe, pads, seed):
    qkv, visible = draw(seed, TOKENS, batch=3), padded([0, *pads], TOKENS)
    together = run(recipe, qkv, visible)
    alone = [x[:1] for x in qkv]
    want = feed(LayerCache(recipe), *alone, [PROMPT, *ANSWER])
    torch.testing.assert_close(together[:1], want, rtol=0, atol=2e-6)


@pytest.mark.parametrize("name", FREE_OF_PLACE)
@given(pads, cuts, st.integers(0, 999))
def test_padding_a_row_is_leaving_it_shorter(name, pads, cuts, seed):
    recipe = RECIPES[name]
    qkv, visible = draw(seed, TOKENS, batch=3), padded(pads, TOKENS)
    together = run(recipe, qkv, visible)
    for i, pad in enumerate(pads):
        short = [x[i : i + 1, :, pad:] for x in qkv]
        alone = feed(LayerCache(recipe), *short, [PROMPT - pad, *ANSWER])
        torch.testing.assert_close(together[i : i + 1, :, pad:], alone, rtol=0, atol=2e-6)


@pytest.mark.parametrize("name", SCORED_ANYWHERE)
@pytest.mark.parametrize("pad", [7, 45])
def test_padding_a_row_is_leaving_it_shorter_where_scores_decide(name, pad):
    """Each row is longer than every budget: padding takes room until a row evicts."""
    recipe, prompt, later = FAMILIES[name], 120, 30
    visible, qkv = padded([0, pad], prompt + later), tokens(prompt + later)
    together = run_layers(layers(recipe), qkv, [prompt, *[1] * later], visible)
    short = [[x[1:, :, pad:] for x in each] for each in qkv]
    alone = run_layers(layers(recipe), short, [prompt - pad, *[1] * later])
    torch.testing.assert_close(together[:, 1:, :, pad:], alone, rtol=0, atol=2e-6)


@pytest.mark.parametrize("name", ["full", "window:tokens=200", "streaming:tokens=200"])
def test_huge_padding_is_no_trouble_where_nothing_is_packed(name):
    qkv, visible = draw(0, TOKENS, batch=3), padded([0, 30, 74], TOKENS)
    want = run(resolve(name), qkv, visible)
    assert torch.equal(run(resolve(name), litter(qkv, visible, 1e38, 1), visible), want)


@pytest.mark.sample
@core_recipes
@pytest.mark.parametrize("turn", [1, 3, 30])
@given(st.data(), st.integers(0, 999))
def test_padding_between_turns_is_irrelevant_too(recipe, turn, data, seed):
    """Also where the first turn is shorter than the sinks, and with no padding in it."""
    first = data.draw(st.lists(st.integers(0, turn - 1), min_size=2, max_size=2))
    second = data.draw(st.lists(st.integers(0, 20), min_size=2, max_size=2))
    for pads in ([0, 0], first):
        visible = [padded(pads, turn), padded(second, 21), padded([0, 0], SOME_TOKENS)]
        visible = torch.cat(visible, dim=1)
        qkv = draw(seed, visible.shape[1], batch=2)
        sizes = [turn, 21, *SOME]
        want, got = (
            real(feed(LayerCache(recipe), *x, sizes, visible), visible)
            for x in (qkv, litter(qkv, visible, 6e4, seed))
        )
        assert torch.equal(got, want)


@pytest.mark.sample
@pytest.mark.parametrize("name", ["full", "rtn:group=16", "streaming:tokens=200,sinks=4"])
@pytest.mark.parametrize("turn", [1, 3, 30])
@given(st.lists(st.integers(0, 20), min_size=2, max_size=2), st.integers(0, 999))
def test_padding_a_second_turn_is_leaving_it_shorter(name, turn, pads, seed):
    """Where no window is counted: padding between turns takes room in a window."""
    recipe = resolve(name)
    visible = torch.cat(
        [padded([0, 0], turn), padded(pads, 21), padded([0, 0], SOME_TOKENS)], dim=1
    )
    qkv = draw(seed, visible.shape[1], batch=2)
    together = feed(LayerCache(recipe), *qkv, [turn, 21, *SOME], visible)
    for i, pad in enumerate(pads):
        keep = visible[i]
        short = [x[i : i + 1, :, keep] for x in qkv]
        alone = feed(LayerCache(recipe), *short, [turn, 21 - pad, *SOME])
        torch.testing.assert_close(together[i : i + 1, :, keep], alone, rtol=0, atol=2e-6)
