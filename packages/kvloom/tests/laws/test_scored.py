"""Keeping by score: drafts leave no trace, rows are alone, beams take their scores along."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import probe
from kvloom.cache.layer import LayerCache
from kvloom.kernels import dispatch
from kvloom.recipe.resolve import resolve
from sampling import slow_except
from steps import draw, feed

NAMES = (
    "h2o",
    "h2o:tokens=30,recent=0.0",
    "h2o:tokens=70",
    "h2o:tokens=20,limit=40,damping=0.9",
    "keyformer:fixed=true",
    "dilated:tokens=20",
    "keyformer:noise=none,tau_end=1.5",
    "snapkv:tokens=24,window=8",
    "snapkv:tokens=24,window=8,head_share=0.2",
    "minikv:group=16,residual=32",
    "minikv-snap:window=8,residual=32",
)
SIZES = [1, 1, 5, 1, 1, 1]
every = pytest.mark.parametrize("name", slow_except(
    NAMES, "h2o:tokens=30,recent=0.0", "h2o:tokens=20,limit=40,damping=0.9",
    "keyformer:noise=none,tau_end=1.5", "dilated:tokens=20",
    "snapkv:tokens=24,window=8,head_share=0.2", "minikv:group=16,residual=32",
))  # fmt: skip


def fresh(name, *qkv, sizes=None, visible=None):
    cache = LayerCache(resolve(name), "layer 0", 0, 1)
    feed(cache, *qkv, sizes, visible)
    return cache


@pytest.mark.sample
@every
@pytest.mark.parametrize("rejected", [0, 2, 5])
@pytest.mark.parametrize("prompt", [5, 50])
def test_a_rejected_draft_leaves_no_trace(name, rejected, prompt):
    q, k, v = draw(0, prompt + 5, batch=2)
    kept = prompt + 5 - rejected
    drafted = fresh(name, *(x[:, :, :prompt] for x in (q, k, v)))
    probe.record(drafted, True)
    got = feed(drafted, *(x[:, :, prompt:] for x in (q, k, v)))
    drafted.crop(rejected)
    probe.record(drafted, False)
    never = fresh(name, *(x[:, :, :prompt] for x in (q, k, v)))
    if kept > prompt:
        new = feed(never, *(x[:, :, prompt:kept] for x in (q, k, v)), [1] * (kept - prompt))
        torch.testing.assert_close(got[:, :, : kept - prompt], new, rtol=0, atol=2e-6)
    new = draw(1, 10, batch=2)
    outputs = [feed(cache, *new, SIZES) for cache in (drafted, never)]
    torch.testing.assert_close(*outputs, rtol=0, atol=2e-6)
    assert probe.count(drafted) == probe.count(never)


@every
def test_rows_do_not_see_each_other(name):
    qkv, new = draw(0, 50, batch=3, hq=4, hk=2), draw(1, 10, batch=3, hq=4, hk=2)
    together = feed(fresh(name, *qkv), *new, SIZES)
    for row in range(3):
        alone = fresh(name, *(x[row : row + 1] for x in qkv))
        out = feed(alone, *(x[row : row + 1] for x in new), SIZES)
        torch.testing.assert_close(together[row : row + 1], out, rtol=0, atol=2e-6)


@every
def test_scores_and_kept_tokens_follow_the_beams(name):
    qkv, new, beams = draw(0, 50, batch=3), draw(1, 10, batch=3), torch.tensor([2, 0, 0])
    moved = fresh(name, *qkv)
    feed(moved, *draw(2, 3, batch=3), [1, 1, 1])
    moved.map(lambda x: x.index_select(0, beams))
    built = fresh(name, *(x[beams] for x in qkv))
    feed(built, *(x[beams] for x in draw(2, 3, batch=3)), [1, 1, 1])
    outputs = [feed(cache, *new, SIZES) for cache in (moved, built)]
    torch.testing.assert_close(*outputs, rtol=0, atol=2e-6)


@pytest.mark.parametrize(
    "name",
    ["h2o:tokens=20", "snapkv:tokens=20,window=4", "snapkv:tokens=20,window=4,head_share=0.2"],
)
def test_a_padded_row_keeps_what_it_keeps_alone(name):
    q, k, v = draw(0, 60, batch=2)
    visible = torch.arange(60) >= torch.tensor([0, 25])[:, None]
    padded = fresh(name, *(x[:, :, :50] for x in (q, k, v)), visible=visible[:, :50])
    out = feed(padded, *(x[:, :, 50:] for x in (q, k, v)), SIZES, visible)
    for row, pad in enumerate((0, 25)):
        part = [x[row : row + 1, :, pad:] for x in (q, k, v)]
        alone = fresh(name, *(x[:, :, : 50 - pad] for x in part))
        want = feed(alone, *(x[:, :, 50 - pad :] for x in part), SIZES)
        torch.testing.assert_close(out[row : row + 1], want, rtol=0, atol=2e-6)


def test_h2o_is_keyformer_without_noise():
    qkv, new = draw(0, 50), draw(1, 20)
    budget = "fraction=0.5,recent=0.3"
    outputs = [
        feed(fresh(name, *qkv), *new, [1] * 20)
        for name in (f"h2o:{budget}", f"keyformer:{budget},noise=none,tau_end=1.0")
    ]
    assert torch.equal(*outputs)


@pytest.mark.parametrize("fixed", ["false", "true"])
def test_noise_is_reproducible_and_matters(fixed):
    qkv, new = draw(0, 80), draw(1, 20)
    name = f"keyformer:fixed={fixed}"
    one, two = (feed(fresh(name, *qkv), *new, [1] * 20) for _ in range(2))
    assert torch.equal(one, two)
    without = feed(fresh("keyformer:noise=none", *qkv), *new, [1] * 20)
    assert not torch.equal(one, without)


@pytest.mark.parametrize("backend", dispatch.CHOICES)
def test_a_seed_may_be_any_whole_number(backend):
    qkv, new = draw(0, 80), draw(1, 20)
    outputs = []
    for seed in (0, 1 << 70, -(1 << 32), 5):
        recipe = resolve("keyformer")
        recipe = replace(recipe, keep=replace(recipe.keep, seed=seed))
        with dispatch.use(backend):
            cache = LayerCache(recipe, "layer 0", 0, 1)
            feed(cache, *qkv, None, None)
            outputs.append(feed(cache, *new, [1] * 20))
    assert torch.equal(outputs[0], outputs[1])  # of a seed 32 bits count
    assert torch.equal(outputs[0], outputs[2])
    assert not torch.equal(outputs[0], outputs[3])


def test_fixed_noise_is_other_noise():
    qkv, new = draw(0, 80), draw(1, 20)
    fixed, drawn = (
        feed(fresh(f"keyformer:fixed={flag}", *qkv), *new, [1] * 20) for flag in ("true", "false")
    )
    assert not torch.equal(fixed, drawn)


def test_damping_forgets():
    """Damped a lot, only the last steps count, so that other tokens stay."""
    qkv, new = draw(0, 80), draw(1, 20)
    kept = []
    for damping in (1.0, 0.01):
        cache = fresh(f"h2o:recent=0.2,damping={damping}", *qkv)
        feed(cache, *new, [1] * 20)
        kept.append(probe.kept(cache))
    assert not torch.equal(*kept)


def test_a_dilated_window_keeps_every_second_token():
    cache = fresh("dilated:tokens=10", *draw(0, 50))
    assert probe.kept(cache)[0, 0].tolist() == [*range(32, 50, 2), 49]
    feed(cache, *draw(1, 5), [1] * 5)
    held = probe.kept(cache)[0, 0].tolist()
    assert held == [*range(36, 54, 2), 54]


@pytest.mark.parametrize("name", ["h2o:tokens=20,limit=40", "window:tokens=20,limit=40"])
def test_a_limit_is_reached_and_then_the_budget_holds(name):
    cache = fresh(name, *draw(0, 30))
    assert probe.count(cache) == 30
    sizes = []
    for i in range(50):
        cache.attend(*draw(1 + i, 1), scale=0.2)
        sizes.append(probe.count(cache))
    assert sizes[9:11] == [40, 20]
    assert sizes[30:32] == [40, 20]
    assert max(sizes) == 40
    assert min(sizes) == 20


@pytest.mark.parametrize("sizes", [[1] * 24, [10, 14], [3, 20, 1]])
def test_a_limit_keeps_what_scoring_every_step_keeps(sizes):
    """The scores at the moment of dropping are sums over the same queries, however they came."""
    qkv, new = draw(0, 30), draw(1, 24)
    cache = fresh("h2o:tokens=20,limit=53", *qkv)
    feed(cache, *new, sizes)
    assert probe.count(cache) == 20
    once = fresh(
        "h2o:tokens=20,limit=53", *(torch.cat(both, 2) for both in zip(qkv, new, strict=True))
    )
    assert torch.equal(probe.tokens(cache).logical_index, probe.tokens(once).logical_index)
