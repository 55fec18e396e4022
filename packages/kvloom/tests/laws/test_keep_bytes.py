"""Evicted means gone: what is held after a prompt is what the recipe predicts."""

from __future__ import annotations

import pytest
import torch

from backends import by_reference
from kvloom.cache.build import coordinate
from kvloom.cache.layer import LayerCache
from kvloom.recipe.geometry import Geometry
from kvloom.recipe.resolve import resolve
from steps import D, draw

NAMES = (
    "h2o",
    "h2o:fraction=0.25,recent=0.25",
    "h2o:tokens=500",
    "h2o:tokens=50,limit=80",
    "h2o:tokens=50,limit=200",
    "window:tokens=50,limit=80",
    "window:tokens=50,limit=200",
    "dilated:tokens=50",
    "keyformer:fraction=0.7",
    "snapkv:tokens=64,window=16",
    "snapkv:tokens=64,window=16,head_share=0.2",
    "snapkv:fraction=0.5,window=16,head_share=0,layers=joint",
    "snapkv:tokens=64,window=16,head_share=0.5,layers=pyramid",
    "pyramidkv:tokens=64,window=16",
    "pyramidkv:tokens=90,window=16",
    "minikv",
    "minikv:fraction=0.75,bits=4",
    "minikv:fraction=0.4,recent=0.75",
    "minikv-pyramid",
    "minikv-snap:window=16",
    "random",
)


@by_reference
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("tokens", [100, 103, 257])
def test_predicted_bytes_are_measured_bytes(name, tokens):
    recipe, layers = resolve(name), 4
    caches = [LayerCache(recipe, f"layer {i}", i, layers) for i in range(layers)]
    coordinate(caches)
    for i, cache in enumerate(caches):
        cache.attend(*draw(i, tokens, batch=2, hq=4, hk=2), scale=D**-0.5)
    geometry = Geometry(layers, 4, 2, D, torch.float32)
    assert sum(cache.nbytes for cache in caches) == recipe.nbytes(tokens, geometry, batch=2)


@pytest.mark.parametrize("name", ["h2o", "keyformer", "h2o:fraction=0.3,recent=0.0"])
def test_slots_never_grow(name):
    cache = LayerCache(resolve(name), "layer 0", 0, 1)
    cache.attend(*draw(0, 100), scale=D**-0.5)
    held = cache.nbytes
    for i in range(40):
        cache.attend(*draw(1 + i, 1), scale=D**-0.5)
        assert cache.nbytes == held
