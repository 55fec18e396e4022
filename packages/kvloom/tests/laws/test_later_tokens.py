"""Steps whose tokens see later ones, as the tokens of an image do."""

from __future__ import annotations

import copy

import pytest
import torch

import kvloom
from kvloom.cache.layer import LayerCache
from kvloom.cache.step import Queries, StepInputs
from kvloom.errors import CacheMisuse
from kvloom.keep import Mass
from kvloom.recipe.resolve import resolve
from steps import CORE, RECIPES, SCALE, build, draw, padded

KEEPING = [
    "h2o:tokens=24", "snapkv:tokens=24,window=8", "keyformer:tokens=24", "minikv:group=16",
    "snapkv:tokens=24,window=8,head_share=0.5",
    "quest:tokens=40,page=4,sinks=2,recent=4,full_layers=0", "full",
]  # fmt: skip
ALL = {name: RECIPES[name] for name in CORE} | {name: resolve(name) for name in KEEPING}


def seeing(cache, q, k, v, later_seen, visible=None, softcap=None):
    """Attention of a step whose queries see `later_seen` tokens after their own."""
    visible = None if visible is None else visible[:, None]
    return cache.run(StepInputs(Queries(q, SCALE, visible, softcap, later_seen=later_seen), k, v))


@pytest.mark.parametrize("recipe", ALL.values(), ids=ALL)
@pytest.mark.parametrize("tokens", [6, 70])
def test_a_query_that_sees_all_of_a_step_attends_as_its_last_one(recipe, tokens):
    """Attention knows no order, so a query that sees every token may be asked after them."""
    visible = padded([0, 11], 90 + tokens)
    before = build(recipe, *draw(0, 90, batch=2, hq=4, hk=2), visible=visible[:, :90])
    q, k, v = draw(1, tokens, batch=2, hq=4, hk=2)
    later_seen = torch.arange(tokens - 1, -1, -1).expand(2, -1)
    out = seeing(copy.deepcopy(before), q, k, v, later_seen, visible, softcap=3.0)
    for i in (0, tokens // 2, tokens - 1):
        asked = q.clone()
        asked[:, :, -1] = q[:, :, i]
        last = seeing(copy.deepcopy(before), asked, k, v, None, visible, softcap=3.0)
        torch.testing.assert_close(out[:, :, i], last[:, :, -1], rtol=0, atol=3e-6)


def test_a_draft_with_such_tokens_is_refused():
    recipe = resolve("h2o:tokens=24")
    layer = build(recipe, *draw(0, 40))
    layer.recording = True
    later_seen = torch.tensor([[1, 0]])
    with pytest.raises(CacheMisuse, match="give the image in a call without a draft"):
        seeing(layer, *draw(1, 2), later_seen)
    assert layer.seen == 40


def test_queries_that_wait_for_a_block_are_refused():
    keep = kvloom.Keep(
        kvloom.Budget(fraction=0.5, recent=8, head_share=1.0), Mass(), when="block", block=32
    )
    layer = build(kvloom.Recipe(keep), *draw(0, 300))
    seeing(layer, *draw(1, 32), torch.arange(32).flip(0)[None])  # the block that stays whole
    with pytest.raises(CacheMisuse, match="use the score rotated, or when=prompt"):
        seeing(layer, *draw(2, 2), torch.tensor([[1, 0]]))
    assert layer.seen == 332


def test_a_prompt_in_two_parts_keeps_what_each_query_sees():
    """`start` delays the decision: the scores are those of all queries so far."""
    later_seen = torch.zeros(1, 30, dtype=torch.long)
    later_seen[:, 10:14] = torch.tensor([3, 2, 1, 0])
    q, k, v = draw(3, 36)
    scores = []
    for start, sizes in ((0, [36]), (32, [30, 6])):
        layer = LayerCache(resolve(f"h2o:tokens=24,compress_after={start}"), "this layer")
        trace, begin = layer.observe(), 0
        for size in sizes:
            part = slice(begin, begin + size)
            seen = torch.cat([later_seen, torch.zeros(1, 6, dtype=torch.long)], dim=1)[:, part]
            seeing(layer, q[:, :, part], k[:, :, part], v[:, :, part], seen)
            begin += size
        scores.append(trace.scored[1])
    torch.testing.assert_close(*scores)
    causal = LayerCache(resolve("h2o:tokens=24"), "this layer")
    trace = causal.observe()
    causal.attend(q, k, v, scale=SCALE)
    assert not torch.allclose(trace.scored[1], scores[0])
