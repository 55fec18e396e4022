"""Which tokens a layer says it holds: those whose keys it holds."""

from __future__ import annotations

import pytest
import torch

import probe
from floor import short_prompts_evict
from kvloom.cache.layer import LayerCache
from kvloom.errors import CacheMisuse
from kvloom.recipe.resolve import resolve
from steps import draw, feed

__all__ = ["short_prompts_evict"]

NAMES = (
    "full",
    "window:tokens=24",
    "streaming:tokens=24,sinks=4",
    "h2o",
    "h2o:tokens=62",
    "h2o:tokens=30,limit=52",
    "dilated:tokens=24",
    "snapkv:tokens=24,window=8",
    "random",
)


@pytest.mark.parametrize("name", NAMES)
def test_a_layer_knows_which_keys_it_holds(name):
    """Every key carries its index, so what is held can be read from the keys themselves."""
    cache = LayerCache(resolve(name), "layer 0", 0, 1)
    cache.observe()
    q, k, v = draw(3, 57, batch=2, hq=4, hk=2)
    k = k * 1e-3
    k[..., 0] = torch.arange(57)
    for upto, size in ((50, 50), (51, 1), (55, 4), (56, 1), (57, 1)):
        feed(cache, *(x[:, :, upto - size : upto] for x in (q, k, v)))
        at = cache.logical()
        slots = probe.tokens(cache) if probe.in_slots(cache) else None
        keys = probe.tokens(cache).exact_keys() if slots is None else slots.keys
        if slots is not None:  # in order of index, the free slot's key left out
            free = torch.arange(keys.shape[2]) == slots.free
            keys = keys[..., 0].masked_fill(free, torch.inf)
            found = keys.sort(dim=-1).values[..., :-1].long()
            at = at.sort(dim=-1).values
        else:
            found = keys[..., 0].long()
        if probe.sinks(cache) is not None:
            found = torch.cat([probe.sinks(cache).keys[..., 0].long(), found], dim=-1)
        assert torch.equal(at, found)
    assert at.shape[2] < 57 or name in ("full", "h2o:tokens=62")


def test_an_empty_layer_holds_nothing_and_one_that_forgot_says_so():
    cache = LayerCache(resolve("snapkv:tokens=24,window=8"), "layer 0", 0, 1)
    assert cache.logical().numel() == 0
    feed(cache, *draw(0, 50))
    with pytest.raises(CacheMisuse, match=r"layer 0: .* call observe\(\) before the first prompt"):
        cache.logical()


def test_a_padded_row_has_not_reached_its_sinks():
    cache = LayerCache(resolve("streaming:tokens=8,sinks=2"))
    visible = torch.ones(2, 5, dtype=torch.bool)
    visible[1, :4] = False
    feed(cache, *draw(0, 5, batch=2), visible=visible)
    assert cache.logical()[:, 0, :2].tolist() == [[0, 1], [4, -1]]


@pytest.mark.parametrize("name", ["snapkv:tokens=24,window=8", "h2o"])
def test_a_trace_changes_no_answer(name):
    caches = [LayerCache(resolve(name), "layer 0", 0, 1) for _ in range(2)]
    caches[0].observe()
    outs = [feed(cache, *draw(0, 60, batch=2), [50, 1, 4, 1, 4]) for cache in caches]
    assert torch.equal(*outs)
