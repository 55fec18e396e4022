"""ClusterKV, Quest, InfiniGen and the exact top k against float64 lists of tokens, step by step."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import naive
import naive_recipes
import probe
from kvloom.cache.layer import LayerCache
from kvloom.recipe.resolve import resolve

B, HQ, HK, D, R = 2, 4, 2, 16, 2
PROMPT, STEPS = 100, 70
SINKS = 4


class Lists:
    """One key/value head: which tokens a step reads, by lists."""

    def __init__(self, kind: str, group: str, find: int, recent: int, prompt: tuple):
        self.kind, self.group, self.find, self.recent = kind, group, find, recent
        if kind == "partial":
            self.rotation = naive_recipes.partial_rotation(*prompt, round(0.3 * D))
        self.members, self.centroids, self.indexed = [], [], SINKS

    def take_in(self, k):
        """Index what is due of all keys k [N, D]."""
        ready = len(k) - self.recent
        if self.kind == "topk":
            self.indexed = ready
        if self.kind == "partial":
            due = ready - self.indexed
            self.indexed += due if self.indexed == SINKS else due // 64 * 64
        while self.kind == "pages" and ready - self.indexed >= 8:
            self.members.append(list(range(self.indexed, self.indexed + 8)))
            self.indexed += 8
        while self.kind == "clusters":
            if self.indexed == SINKS:
                count, tokens = (ready - SINKS) // 10, ready - SINKS
            elif ready - self.indexed >= 24:
                count, tokens = 3, 24
            else:
                break
            drawn = torch.rand(
                count, generator=torch.Generator().manual_seed(0), dtype=torch.float64
            )
            start = [int((j + u) * tokens / count) for j, u in enumerate(drawn.tolist())]
            x = k[self.indexed : self.indexed + tokens]
            centroids, labels = naive.kmeans(x, start, "cosine", 20)
            for c in range(count):
                self.centroids.append(centroids[c])
                self.members.append([self.indexed + j for j in range(tokens) if labels[j] == c])
            self.indexed += tokens

    def reads(self, q, k):
        """Tokens that the queries q [R, D] of one group read, one list a query."""
        always = [*range(SINKS), *range(self.indexed, len(k))]
        if self.find >= self.indexed - SINKS:
            return [list(range(len(k)))] * len(q)
        if self.kind == "topk":
            parts = [[j] for j in range(SINKS, self.indexed)]
            rated = [[x @ k[j] for [j] in parts] for x in q]
        elif self.kind == "partial":
            parts = [[j] for j in range(SINKS, self.indexed)]
            rated = [[(x @ self.rotation) @ (k[j] @ self.rotation) for [j] in parts] for x in q]
        elif self.kind == "pages":
            parts = self.members
            rated = [[naive.page_score(x, k[p]) for p in parts] for x in q]
        else:
            parts = self.members
            rated = [[x @ c for c in self.centroids] for x in q]
        rated = np.array(rated)
        if self.group in ("mean", "max"):
            one = rated.mean(axis=0) if self.group == "mean" else rated.max(axis=0)
            rated = np.array([one] * len(q))
        found = []
        for row in rated:
            best = sorted(range(len(parts)), key=lambda i: -row[i])
            if self.group == "turns":
                best = in_turns(rated)
            tokens = [j for i in best for j in parts[i]]
            whole = self.find // 8 * 8 if self.kind == "pages" else self.find
            found.append(always + tokens[:whole])
        return found


def in_turns(rated):
    """Parts in the order in which the queries of a group take them: rated [R, parts]."""
    orders = [sorted(range(len(row)), key=lambda i: -row[i]) for row in rated]
    taken = []
    for choices in zip(*orders, strict=True):
        taken += [part for part in dict.fromkeys(choices) if part not in taken]
    return taken


SPECS = {
    "clusters": ("clusterkv:tokens=30,size=10,sinks=4", 26, 0),
    "pages": ("quest:tokens=35,page=8,sinks=4,recent=5", 26, 5),
    "topk": ("topk:tokens=35,sinks=4,recent=5", 26, 5),
    "partial": ("infinigen:tokens=35,sinks=4,recent=5", 26, 5),
}


@pytest.mark.sample
@pytest.mark.parametrize("group", ["mean", "max", "turns", "each"])
@pytest.mark.parametrize("kind", SPECS)
def test_every_step_is_attention_over_the_listed_tokens(kind, group):
    spec, find, recent = SPECS[kind]
    recipe = resolve(f"{spec},query_heads={group}")
    if kind == "clusters":
        recipe = with_blocks(recipe, 24, 3)
    cache = LayerCache(recipe, "layer 2", 2, 3)
    rng = np.random.default_rng(5)
    n = PROMPT + STEPS
    q, k, v = (rng.standard_normal((B, h, n, D)).astype("float32") for h in (HQ, HK, HK))
    scale = D**-0.5
    given = [torch.from_numpy(x) for x in (q, k, v)]
    cache.attend(*(x[:, :, :PROMPT] for x in given), scale=scale)
    q, k, v = (x.astype("float64") for x in (q, k, v))
    lists = [
        [
            Lists(kind, group, find, recent, (q[b, h * R : h * R + R, :PROMPT], k[b, h, :PROMPT]))
            for h in range(HK)
        ]
        for b in range(B)
    ]
    recalled = 0
    for t in range(PROMPT, n):
        got = cache.attend(*(x[:, :, t : t + 1] for x in given), scale=scale)
        for b in range(B):
            for h in range(HK):
                one = lists[b][h]
                one.take_in(k[b, h, :t])
                seen = one.reads(q[b, h * R : h * R + R, t], k[b, h, : t + 1])
                for i, tokens in enumerate(seen):
                    assert len(set(tokens)) == len(tokens) == probe.read(cache)
                    row = h * R + i
                    want, _ = naive.attention(
                        q[b : b + 1, row : row + 1, t : t + 1],
                        k[b : b + 1, h : h + 1, tokens],
                        v[b : b + 1, h : h + 1, tokens],
                        scale,
                    )
                    np.testing.assert_allclose(got[b, row], want[0, 0], atol=2e-6)
                    recalled += len(tokens) < t + 1
    assert recalled == STEPS * B * HQ


def with_blocks(recipe, block, clusters):
    from dataclasses import replace

    index = replace(recipe.recall.index, block=block, block_clusters=clusters)
    return replace(recipe, recall=replace(recipe.recall, index=index))


def test_the_recipes_read_as_the_papers():
    paper = resolve("clusterkv:size=80,iterations=20")
    cluster, quest = paper.recall, resolve("quest").recall
    assert (cluster.index.size, cluster.index.block, cluster.index.block_clusters) == (80, 320, 4)
    assert (cluster.index.distance, cluster.index.iterations) == ("cosine", 20)
    assert resolve("clusterkv").protect.sinks == 16
    assert (cluster.query_heads, quest.query_heads) == ("turns", "mean")
    assert resolve("clusterkv-2bit").recall.query_heads == "turns"
    assert quest.index.page == 16
    infinigen = resolve("infinigen").recall
    assert (infinigen.index.share, infinigen.query_heads, infinigen.full_layers) == (0.3, "mean", 2)
    assert (cluster.full_layers, quest.full_layers) == (2, 2)
