"""Tokens that wait are those of one step: its outputs, and its cache once they are stored."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvloom.cache.step import Queries, StepInputs
from kvloom.cache.waiting import WaitingTokens
from kvloom.recipe.resolve import resolve
from sequences import attend_one_by_one
from steps import SCALE, assert_same_state, build, core_recipes, draw, feed, state

seeds = st.integers(0, 999)
EVICTING = ("snapkv:fraction=0.5", "small", "tiny:sinks=0")


def wait(cache, q, k, v, room=64):
    """Let tokens wait one by one, then store them; return the outputs."""
    waiting, before = WaitingTokens(room, len(q), q.device), state(cache)
    out = attend_one_by_one(cache, waiting, StepInputs(Queries(q, SCALE), k, v))
    assert_same_state(state(cache), before)
    cache.commit_waiting(waiting, q.shape[2])
    return out


@core_recipes
@given(st.integers(1, 90), st.integers(1, 64), seeds)
def test_tokens_that_wait_are_those_of_one_step(recipe, prompt, tokens, seed):
    waits, steps = (build(recipe, *draw(seed, prompt, batch=2)) for _ in range(2))
    if not waits.may_wait:
        assert recipe.keep is not None or prompt < recipe.protect.sinks
        return
    new = draw(seed + 1, tokens, batch=2)
    torch.testing.assert_close(wait(waits, *new), feed(steps, *new), rtol=0, atol=2e-6)
    assert_same_state(state(waits), state(steps))
    later = draw(seed + 2, 3, batch=2)
    torch.testing.assert_close(feed(waits, *later), feed(steps, *later), rtol=0, atol=2e-6)


@pytest.mark.parametrize("name", EVICTING)
@given(st.integers(40, 200), st.integers(1, 64), seeds)
def test_so_they_are_after_an_eviction(name, prompt, tokens, seed):
    waits, steps = (build(resolve(name), *draw(seed, prompt, batch=2)) for _ in range(2))
    assert waits.may_wait
    new = draw(seed + 1, tokens, batch=2)
    torch.testing.assert_close(wait(waits, *new), feed(steps, *new), rtol=0, atol=2e-6)
    assert_same_state(state(waits), state(steps))
