"""Sinks are a row's first tokens, also where its first prompt has fewer of them."""

from __future__ import annotations

import pytest
import torch

from kvloom.cache.layer import LayerCache
from kvloom.keep import SCORERS, Budget, Keep
from kvloom.recipe import Protect, Recipe, resolve
from steps import draw, feed, padded

SINKS, TOKENS = 4, 60


def at_every_step(kind: str, **options) -> Recipe:
    return Recipe(Keep(Budget(12, recent=5), SCORERS[kind](), **options), protect=Protect(SINKS))


RECIPES = {
    "mass": at_every_step("mass"),
    "observation": at_every_step("observation"),
    "noisy": at_every_step("noisy"),
    "random": at_every_step("random"),
    "value-aware": at_every_step("value-aware"),
    "limit": at_every_step("mass", when="limit", limit=20),
    "shared": at_every_step("mass", shared=True),
    "streaming": resolve(f"streaming:tokens=12,sinks={SINKS}"),
}


@pytest.mark.parametrize("pads", [[0, 0], [0, 1], [8, 0], [2, 9]])
@pytest.mark.parametrize("prompt", [1, 10, 30])
@pytest.mark.parametrize("name", RECIPES)
def test_the_first_tokens_of_every_row_stay(name, prompt, pads):
    pads = [min(pad, prompt - 1) for pad in pads]
    cache = LayerCache(RECIPES[name])
    q, k, v = draw(0, TOKENS, batch=2)
    visible = padded(pads, TOKENS) if any(pads) else None
    feed(cache, q, k, v, [prompt, *[1] * 20, 3, *[1] * (TOKENS - prompt - 23)], visible)
    assert cache.dropped > 0
    for pad, row in zip(pads, cache.logical().tolist(), strict=True):
        for head in row:
            assert set(range(pad, pad + SINKS)) <= set(head)


@pytest.mark.rare
@pytest.mark.parametrize("prompt", [60, 1])
@pytest.mark.parametrize("pads", [[0, 0], [2, 9], [0, 9]])
def test_sinks_do_not_widen_the_ranges_of_packed_tokens(pads, prompt):
    """In a padded batch, the segment stores them with the others."""
    found = []
    for factor in (1, 100):
        cache = LayerCache(resolve("near-lossless:group=16,residual=16"))
        q, k, v = draw(0, TOKENS, batch=2)
        for row, pad in enumerate(pads):
            k[row, :, pad : pad + SINKS] *= factor
        visible = padded(pads, TOKENS) if any(pads) else None
        feed(cache, q, k, v, [prompt, *[1] * (TOKENS - prompt)], visible)
        packed = cache._state.segment.keys.packed.view()
        groups = packed.hi // 16
        found.append((packed.scale[:, :, :groups], packed.zero[:, :, :groups]))
    assert groups
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))
