"""The phases of an evictor, and the steps that it refuses between two of them."""

from __future__ import annotations

import pytest
import torch

from floor import short_prompts_evict
from kvloom.cache.build import coordinate
from kvloom.cache.evictor import Phase
from kvloom.cache.layer import LayerCache
from kvloom.cache.step import Queries, StepInputs
from kvloom.errors import CacheMisuse
from kvloom.keep import Budget, Keep, Mass, Reconstruction
from kvloom.recipe.resolve import resolve
from kvloom.recipe.spec import Recipe

__all__ = ["short_prompts_evict"]


def inputs(tokens: int) -> StepInputs:
    q, k, v = torch.randn(3, 1, 2, tokens, 16)
    return StepInputs(Queries(q, 0.25), k, v)


@pytest.mark.parametrize(
    ("recipe", "after"),
    [
        ("streaming:tokens=8,sinks=2", Phase.EVICTING),
        ("h2o:tokens=8", Phase.EVICTING),
        ("snapkv:tokens=8,window=4", Phase.DONE),
        ("rotated:fraction=0.2,recent=4,block=16", Phase.EVICTING),
    ],
)
def test_a_prompt_sets_the_budget(recipe, after):
    layer = LayerCache(resolve(recipe))
    evictor = layer._state.evictor
    assert evictor.phase is Phase.EMPTY
    layer.run(inputs(40))
    assert evictor.phase is after
    assert evictor.budget_tokens == 8
    layer.run(inputs(1))
    assert evictor.phase is after


def test_no_step_may_begin_before_the_prompt_is_repeated():
    layer = LayerCache(Recipe(Keep(Budget(8, recent=0), Reconstruction(), when="prompt")))
    layer.run(inputs(40))
    assert layer._state.evictor.phase is Phase.REPEATING
    with pytest.raises(CacheMisuse, match="waits for the scores of its repetition"):
        layer.run(inputs(1))
    layer.repeat(inputs(40), (0, 40))
    layer.end_repetition()
    assert layer._state.evictor.phase is Phase.DONE
    assert len(layer._state.storage) == 8


@pytest.mark.parametrize("when", ["prompt", "step"])
def test_layers_that_decide_together_wait_for_the_last(when):
    recipe = Recipe(Keep(Budget(8, recent=4), Mass(), when=when, shared=True))
    layers = [LayerCache(recipe, place=i, count=2) for i in range(2)]
    coordinate(layers)
    for layer in layers:
        layer.observe()
    layers[0].run(inputs(40))
    assert layers[0]._state.evictor.phase is Phase.DECIDING
    assert len(layers[0]._state.storage) == 40
    layers[1].run(inputs(40))
    after = Phase.DONE if when == "prompt" else Phase.EVICTING
    assert [layer._state.evictor.phase for layer in layers] == [after, after]
    kept = [layer.logical().sort(dim=-1).values for layer in layers]
    assert torch.equal(*kept)


def test_a_step_that_fails_takes_its_vote_back():
    recipe = Recipe(Keep(Budget(8, recent=4), Mass(), when="step", shared=True))
    layers = [LayerCache(recipe, place=i, count=2) for i in range(2)]
    coordinate(layers)
    layers[0].run(inputs(40))
    layers[0].roll_back()
    assert layers[0]._state.evictor.phase is Phase.EMPTY
    assert layers[0]._state.evictor.pending_scores is None
