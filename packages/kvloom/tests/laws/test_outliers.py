"""Outliers, tokens that a rule marks: which they are, and that they stay exact."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import naive
import probe
from backends import by_reference
from kvloom.cache.layer import LayerCache
from kvloom.errors import RecipeError
from kvloom.keep import Budget, Keep, Mass, Observation, Outliers, Step
from kvloom.recipe import Protect, Recipe
from kvloom.recipe.resolve import resolve
from kvloom.store import Packed, Store
from steps import SCALE, SOME, SOME_TOKENS, D, draw, feed, unpacked

pytestmark = by_reference  # their formats take long to compile
TOKEN = Store(Packed(2, "token", 16), Packed(1.5, "token", 32, "fp8"))
KIVI = Store(Packed(2, "channel", 16, residual=32), Packed(2, "token", 16))
ROTATED = Store(
    Packed(2, "channel", 16, residual=32),
    Packed(2, "token", 16, rotation="head"),
)
STORES = {
    "per token": (TOKEN, 6),
    "kivi": (KIVI, (0, 32)),
    "keys": (Store(TOKEN.keys), 6),
    "kivi, rotated values": (ROTATED, (0, 32)),
}
every_store = pytest.mark.parametrize(("store", "recent"), STORES.values(), ids=STORES)
seeds = st.integers(0, 99)


def cached(store, recent, tokens=5, sinks=0, rule=None) -> LayerCache:
    protect = Protect(sinks, recent, Outliers(tokens, rule or Mass()))
    return LayerCache(Recipe(store=store, protect=protect), "layer 0", 0, 1)


def marked(cache: LayerCache) -> torch.Tensor:
    """The logical indices of the outliers, [B, Hk, K]."""
    assert isinstance(cache, LayerCache)
    return probe.outliers(cache).logical_index.long()


@every_store
@given(st.integers(40, 150), st.integers(1, 9), st.integers(0, 4), seeds)
def test_a_step_attends_to_outliers_exactly_and_once(store, recent, n, marks, sinks, seed):
    q, k, v = draw(seed, n, batch=2, hq=4, hk=2)
    cache = cached(store, recent, marks, sinks)
    feed(cache, q, k, v)
    keys, values = (unpacked(side) for side in (probe.keys(cache), probe.values(cache)))
    keys, values = torch.cat([k[:, :, :sinks], keys], 2), torch.cat([v[:, :, :sinks], values], 2)
    index = marked(cache)
    assert index.shape[-1] == min(marks, min_packed_end(cache))
    assert (index >= sinks).all()
    at = index.unsqueeze(-1).expand(-1, -1, -1, D)
    keys, values = keys.scatter(2, at, k.gather(2, at)), values.scatter(2, at, v.gather(2, at))
    new = draw(seed + 1, 3, batch=2, hq=4, hk=2)
    want, _ = naive.attention(
        new[0].double().numpy(),
        *(torch.cat(p, 2).double().numpy() for p in ((keys, new[1]), (values, new[2]))),
        SCALE,
        True,
    )
    np.testing.assert_allclose(feed(cache, *new).numpy(), want, rtol=0, atol=3e-6)


def min_packed_end(cache: LayerCache) -> int:
    tokens = probe.tokens(cache)
    sides = [side for side in (tokens.keys, tokens.values) if side.packed is not None]
    return min(side.packed_count for side in sides)


def test_heavy_hitters_are_those_that_get_most_attention():
    q, k, v = draw(3, 90, hq=4, hk=2)
    cache = cached(TOKEN, 10, tokens=7, sinks=2)
    feed(cache, q, k, v)
    logits = np.einsum("hrtd,hnd->hrtn", q[0].view(2, 2, 90, D).double(), k[0].double()) * SCALE
    logits[..., np.triu(np.ones((90, 90), dtype=bool), 1)] = -np.inf
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    mass = (weights / weights.sum(-1, keepdims=True)).sum((1, 2))  # [Hk, N]
    for h in range(2):
        best = 2 + np.argsort(-mass[h, 2:80])[:7]  # neither sinks nor what stays exact anyway
        assert marked(cache)[0, h].tolist() == sorted(best)


def test_a_users_function_marks_tokens_by_infinity():
    wanted = torch.tensor([11, 30, 31])

    def rule(step: Step) -> torch.Tensor:
        scores = torch.full((*step.k.shape[:2], step.k.shape[2]), -torch.inf)
        scores[..., wanted] = torch.inf
        return scores

    cache = cached(TOKEN, 10, tokens=3, rule=rule)
    feed(cache, *draw(0, 90, hk=2, hq=2))
    assert marked(cache).tolist() == [[wanted.tolist()] * 2]


@every_store
@given(st.integers(40, 90), st.integers(1, 20), st.integers(0, 20), st.integers(0, 30), seeds)
def test_a_prompt_that_may_be_taken_back_marks_the_same(store, recent, n, draft, back, pad, seed):
    """Speculative decoding records the prompt and settles later; padding moves with the rows."""
    back = min(back, draft)
    visible = torch.arange(n + draft + SOME_TOKENS) >= torch.tensor([[0], [pad]])
    q, k, v = draw(seed, n + draft, batch=2, hq=2, hk=2)
    recorded, plain = cached(store, recent, sinks=2), cached(store, recent, sinks=2)
    probe.record(recorded, True)
    feed(recorded, *(x[:, :, :n] for x in (q, k, v)), None, visible)
    recorded.crop(0)
    feed(recorded, *(x[:, :, n:] for x in (q, k, v)), None, visible)
    recorded.crop(back)
    probe.record(recorded, False)
    stay = n + draft - back
    feed(plain, *(x[:, :, :stay] for x in (q, k, v)), [n, stay - n], visible)
    order = torch.tensor([1, 0])
    for cache in (recorded, plain):
        cache.map(lambda x: x[order])
    new = draw(seed + 1, SOME_TOKENS, batch=2, hq=2, hk=2)
    outs = [feed(cache, *new, SOME, visible[order]) for cache in (recorded, plain)]
    torch.testing.assert_close(*outs, rtol=0, atol=3e-6)


@given(st.lists(st.integers(0, 60), min_size=2, max_size=2), seeds)
def test_padding_is_never_marked_nor_seen(pads, seed):
    n, visible = 80, torch.arange(80 + SOME_TOKENS) >= torch.tensor(pads)[:, None]
    q, k, v = draw(seed, n, batch=2, hk=2)
    batch = cached(TOKEN, 6, sinks=2)
    feed(batch, q, k, v, None, visible)
    new = draw(seed + 1, SOME_TOKENS, batch=2, hk=2)
    together = feed(batch, *new, SOME, visible)
    for row, pad in enumerate(pads):
        alone = cached(TOKEN, 6, sinks=2)
        part = slice(row, row + 1), slice(None), slice(pad, None)
        feed(alone, q[part], k[part], v[part])
        if n - pad - 8 >= 5:  # the row has as many tokens as are to be marked
            assert torch.equal(marked(batch)[row] - pad, marked(alone)[0])
            single = feed(alone, *(x[row : row + 1] for x in new), SOME)
            torch.testing.assert_close(together[row : row + 1], single, rtol=0, atol=3e-6)


def test_reset_asks_the_rule_again():
    cache, same = cached(TOKEN, 6), cached(TOKEN, 6)
    feed(cache, *draw(0, 50))
    cache.reset()
    assert cache.nbytes == 0
    for c in (cache, same):
        feed(c, *draw(1, 70))
    assert torch.equal(marked(cache), marked(same))


def test_a_rule_knows_how_many_tokens_are_sinks():
    found = []

    def rule(step):
        found.append(step.sinks)
        return step.k[..., 0]

    cache = LayerCache(Recipe(store=TOKEN, protect=Protect(3, 6, Outliers(9, rule))))
    feed(cache, *draw(1, 70))
    assert found == [3]


def test_rules_are_written_down_by_name():
    recipe = Recipe(store=TOKEN, protect=Protect(2, 6, Outliers(9, Observation(window=8))))
    assert Recipe.from_dict(recipe.to_dict()) == recipe
    assert Recipe.from_toml(recipe.to_toml()) == recipe
    own = Recipe(store=TOKEN, protect=Protect(outliers=Outliers(9, lambda step: step.k[..., 0])))
    with pytest.raises(RecipeError, match="a rule that is a function cannot be written down"):
        own.to_toml()
    assert resolve("skvq:outliers=9").protect.outliers == Outliers(9, Mass())


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Outliers(0), "outliers tokens=0 must be a whole number, 1 or more"),
        (lambda: Outliers(4, "mass"), "scorer='mass' is not a score: give one of recent"),
        (lambda: Outliers(4, query_heads="all"), "query_heads='all' is not one of sum, mean, max"),
        (lambda: Recipe(protect=Protect(outliers=Outliers(4))), "combine it with a packed store"),
        (
            lambda: Recipe(
                keep=Keep(Budget(fraction=0.5), Mass(), when="prompt"),
                store=TOKEN,
                protect=Protect(outliers=Outliers(4)),
            ),
            "combine it with a packed store and no keep",
        ),
    ],
)
def test_what_cannot_be_is_refused(make, says):
    with pytest.raises(RecipeError) as refused:
        make()
    assert says in str(refused.value)
