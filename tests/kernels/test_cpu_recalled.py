"""A layer that recalls reads by kernels what it reads by the reference."""

from __future__ import annotations

import pytest
import torch

from kvloom.kernels import dispatch
from kvloom.recipes import resolve
from kvloom.scored import layer_cache
from steps import draw, feed

PROMPT, STEPS = 330, 12
SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625])
RECIPES = (
    "clusterkv:tokens=60,size=10,sinks=4",
    "clusterkv:tokens=60,size=10,sinks=4,group=each",
    "clusterkv-2bit:tokens=200,size=10,sinks=4",
    "quest:tokens=60,page=8,sinks=4,recent=5",
    "quest:tokens=60,page=8,sinks=0,recent=5,group=max",
)
OPERATIONS = {"attend_gathered", "kmeans", "page_bounds", "page_scores", "cluster_scores"}
OPERATIONS |= {"select_clusters", "select_pages"}


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("more", ["", "padding", "padding, alibi", "softcap"])
def test_steps_by_kernels_are_steps_by_the_reference(name, more):
    n = PROMPT + STEPS
    qkv = draw(3, n, batch=2, hq=4, hk=2)
    options = {"softcap": 5.0 if "softcap" in more else None}
    if "padding" in more:
        options["valid"] = torch.arange(n) >= torch.tensor([0, 90])[:, None]
    if "alibi" in more:
        options["slopes"] = SLOPES
    outs, read = [], []
    for backend in ("auto", "ref"):
        cache = layer_cache(resolve(name), "layer 2", (2, 3))
        dispatch.ran.clear()
        with dispatch.use(backend):
            outs.append(feed(cache, *qkv, [PROMPT, *[1] * STEPS], **options)[:, :, PROMPT:])
        read.append(cache.read)
        ran = {operation for operation, who, _ in dispatch.ran if who == "cpu"} & OPERATIONS
        assert len(ran) == (4 if backend == "auto" else 0)
    assert read[0] == read[1] < PROMPT
    torch.testing.assert_close(*outs, rtol=0, atol=4e-6)
