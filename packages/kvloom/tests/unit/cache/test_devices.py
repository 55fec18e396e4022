"""A layer makes its tensors on the device of its keys: a model may be on several devices.

A second device is not needed: while torch's default device is "meta", a tensor that is made without
a device meets the layer's tensors there, and torch refuses the operation.
"""

from __future__ import annotations

import pytest
import torch

from floor import short_prompts_evict
from kvloom.cache.build import build_layers
from kvloom.keep import Budget, Keep, Mass
from kvloom.recipe.resolve import resolve
from kvloom.recipe.spec import Recipe
from kvloom.store import LayerFacts
from sampling import slow_except

__all__ = ["short_prompts_evict"]

D, LAYERS = 64, 2
VARIANCE = Recipe(keep=Keep(Budget(fraction=0.5, layers="variance"), Mass(), when="prompt"))
RECIPES = [
    "full", "kivi:group=32,residual=32", "kivi-4:rotate=true", "near-lossless", "balanced",
    "rtn:group=32", "turbo", "streaming:tokens=64,sinks=4", "dilated:tokens=64", "h2o:fraction=0.3",
    "h2o:fraction=0.3,shared=true", "keyformer:fraction=0.3", "random:fraction=0.3",
    "snapkv:tokens=64,window=16", "pyramidkv:fraction=0.5",
    "snapkv:tokens=64,window=16,head_share=0.2,layers=joint",
    "expected:fraction=0.5", "minikv", "clusterkv:tokens=96,full_layers=0",
    "clusterkv-2bit:tokens=192,full_layers=0", "quest:tokens=96,full_layers=0",
    "topk:tokens=96,full_layers=0", VARIANCE,
]  # fmt: skip


COMMON = (
    "kivi-4:rotate=true", "near-lossless", "turbo",
    "streaming:tokens=64,sinks=4", "dilated:tokens=64", "h2o:fraction=0.3,shared=true",
    "keyformer:fraction=0.3", "snapkv:tokens=64,window=16,head_share=0.2,layers=joint",
    "expected:fraction=0.5", "clusterkv-2bit:tokens=192,full_layers=0",
    "quest:tokens=96,full_layers=0", "topk:tokens=96,full_layers=0", "variance",
)  # fmt: skip
"""Recipes with every part of a cache between them."""


def run(recipe: str | Recipe, device: str) -> list[torch.Tensor]:
    """Return the outputs of a padded prompt of two rows, and of 40 steps."""
    layers = build_layers(resolve(recipe), range(LAYERS), [LayerFacts()] * LAYERS)
    generator = torch.Generator().manual_seed(0)
    outputs = []
    visible = torch.ones(2, 150, dtype=torch.bool)
    visible[1, :9] = False
    seen = 0
    for t in (100, *[1] * 40):
        seen += t
        for layer in layers:
            q, k, v = (torch.randn(2, h, t, D, generator=generator) for h in (4, 2, 2))
            with torch.device(device):
                outputs.append(layer.attend(q, k, v, scale=D**-0.5, visible=visible[:, :seen]))
    with torch.device(device):
        for layer in layers:
            layer.map(lambda x: x.flip(0))
            layer.logical()
            assert layer.nbytes > 0
    return outputs


@pytest.mark.parametrize(
    "recipe",
    slow_except(
        {str(recipe) if isinstance(recipe, str) else "variance": recipe for recipe in RECIPES},
        *COMMON,
    ),
)
def test_a_layer_makes_its_tensors_on_the_device_of_its_keys(recipe):
    got = run(recipe, "meta")  # first, as some tensors are made once and kept
    for x, y in zip(got, run(recipe, "cpu"), strict=True):
        assert x.device.type == "cpu"
        assert torch.equal(x, y)
