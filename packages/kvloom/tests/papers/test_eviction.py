"""H2O, Keyformer's frame, SnapKV and MiniKV against float64 loops over single heads.

The simulation keeps, for each batch row and key/value head, a plain list of logical indices.
"""

import numpy as np
import pytest
import torch

import probe
from kvloom.cache.layer import LayerCache
from kvloom.positions.alibi import Alibi
from kvloom.recipe.resolve import resolve

B, HK, D = 2, 2, 16


def softmax(x):
    e = np.exp(x - x.max())
    return e / e.sum()


class Simulated:
    """One key/value head: lists, loops, and the formulas of the papers."""

    def __init__(self, heavy, recent, sinks=0, slopes=(0.0, 0.0)):
        self.heavy, self.recent, self.sinks, self.slopes = heavy, recent, sinks, slopes
        self.kept, self.score = [], {}
        self.k, self.v = [], []

    def step(self, q, k, v, window=None):
        """Attend the queries q [R, T, D] with the new k, v [T, D]; evict; return out [R, T, D]."""
        r, t, d = q.shape
        first = len(self.k)
        self.k += list(k)
        self.v += list(v)
        out = np.zeros((r, t, d))
        for i in range(t):
            seen = self.kept + list(range(first, first + i + 1))
            for j in seen:
                self.score.setdefault(j, 0.0)
            for h in range(r):
                logits = np.array([q[h, i] @ self.k[j] for j in seen]) / np.sqrt(d)
                p = softmax(logits + self.slopes[h] * np.array(seen))
                out[h, i] = sum(w * self.v[j] for w, j in zip(p, seen, strict=True))
                if window is None or i >= t - window:
                    for w, j in zip(p, seen, strict=True):
                        self.score[j] += w
        self.kept += list(range(first, first + t))
        return out

    def evict(self):
        if len(self.kept) <= self.heavy + self.recent:
            return
        cut = len(self.kept) - self.recent
        rank = sorted(
            self.kept[:cut], key=lambda j: np.inf if j < self.sinks else self.score[j], reverse=True
        )
        self.kept = sorted(rank[: self.heavy]) + self.kept[cut:]


def tensors(r, t, seed, sharp=2.0):
    g = torch.Generator().manual_seed(seed)
    draw = lambda h: torch.randn(B, h, t, D, generator=g)  # noqa: E731
    return sharp * draw(HK * r), sharp * draw(HK), draw(HK)


def heads(q, k, v, r):
    for b in range(B):
        for h in range(HK):
            yield (
                (b, h),
                q[b, h * r : (h + 1) * r].double().numpy(),
                k[b, h].double().numpy(),
                v[b, h].double().numpy(),
            )


def run(recipe, r, turns, window=None, at_step=True, sharp=2.0, slopes=None):
    """Drive a layer and its simulation through `turns` (tokens each); compare every output."""
    layer = LayerCache(resolve(recipe), "layer 0", 0, 1)
    simulated = None
    for number, t in enumerate(turns):
        q, k, v = tensors(r, t, number, sharp)
        alibi = None
        if slopes is not None:
            seen = torch.arange(layer.seen + t).expand(B, 1, -1)
            alibi = Alibi(torch.tensor(slopes[: HK * r]), seen)
        out = layer.attend(q, k, v, scale=D**-0.5, alibi=alibi)
        if simulated is None:
            heavy, recent = probe.evictor(layer).heavy, probe.evictor(layer).recent
            sinks = layer.recipe.protect.sinks
            places = [(b, h) for b in range(B) for h in range(HK)]
            simulated = {
                (b, h): Simulated(heavy, recent, sinks, (slopes or [0.0] * 4)[h * r : (h + 1) * r])
                for b, h in places
            }
        for (b, h), qh, kh, vh in heads(q, k, v, r):
            one = simulated[b, h]
            expected = one.step(qh, kh, vh, window)
            np.testing.assert_allclose(
                out[b, h * r : (h + 1) * r].double().numpy(), expected, rtol=2e-4, atol=2e-5
            )
            if at_step or number == 0:
                one.evict()
    return layer, simulated


@pytest.mark.parametrize("r", [1, 2])
@pytest.mark.parametrize("recent", ["0.5", "0.25", "0.0", "1.0"])
@pytest.mark.parametrize("turns", [[40, *[1] * 25], [40, 1, 1, 7, 1, 1, 1], [5, *[1] * 30]])
def test_h2o_step_by_step(r, recent, turns):
    budget = "tokens=12" if turns[0] < 12 else "fraction=0.5"
    layer, simulated = run(f"h2o:{budget},recent={recent}", r, turns)
    room = probe.evictor(layer).budget_tokens
    assert all(len(one.kept) == room for one in simulated.values())
    assert probe.count(layer) == room


@pytest.mark.parametrize("r", [1, 2])
@pytest.mark.parametrize("turns", [[40, *[1] * 25], [40, 1, 1, 7, 1, 1, 1]])
def test_h2o_sees_alibi(r, turns):
    """Scores and outputs are those of the biased logits, at the tokens' own distances."""
    slopes = [0.5, 0.02, 0.1, 0.25]
    layer, simulated = run("h2o:fraction=0.5", r, turns, slopes=slopes)
    index = probe.kept(layer)
    for (b, h), one in simulated.items():
        assert sorted(index[b, h].tolist()) == one.kept


@pytest.mark.parametrize("r", [1, 2])
def test_the_key_set_changes_after_the_prompt(r):
    """A token that leaves the window can become a heavy hitter (the released code freezes)."""
    layer, simulated = run("h2o:tokens=12,recent=0.25", r, [12, *[1] * 60])
    heavy, index = probe.evictor(layer).heavy, probe.kept(layer)
    assert any(j >= 12 for one in simulated.values() for j in one.kept[:heavy])
    for (b, h), one in simulated.items():
        assert sorted(index[b, h].tolist()) == one.kept


@pytest.mark.parametrize("r", [1, 2])
def test_minikv_choice_is_frozen(r):
    recipe = "minikv:bits=8,group=16,residual=128"
    layer = LayerCache(resolve(recipe), "layer 0", 0, 1)
    q, k, v = tensors(r, 64, 0)
    layer.attend(q, k, v, scale=D**-0.5)
    assert (probe.evictor(layer).heavy, probe.evictor(layer).recent) == (16, 16)
    for (b, h), qh, kh, vh in heads(q, k, v, r):
        one = Simulated(16, 16)
        one.step(qh, kh, vh)
        one.evict()
        kept = probe.keys(layer).kv_view().tensor(0, 32)[b, h]
        half_step = (k.max() - k.min()).item() / 255 / 2 + 2e-3  # fp16 scale and zero
        torch.testing.assert_close(kept, k[b, h][one.kept], rtol=0, atol=half_step)
    for number in range(1, 6):
        layer.attend(*tensors(r, 1, number), scale=D**-0.5)
    assert probe.count(layer) == 32 + 5
    assert probe.evictor(layer).nbytes == 0


@pytest.mark.parametrize("r", [1, 2])
def test_snapkv_without_pooling_votes_with_the_last_queries(r):
    layer, _ = run(
        "snapkv:tokens=20,window=8,pool=none", r, [40, *[1] * 10], window=8, at_step=False
    )
    assert probe.count(layer) == 20 + 10
