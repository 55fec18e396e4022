"""Recall on the reference model: does the index find what attention wants, and what does it cost?

Sections: `rate` (share of the true top B tokens that clusters and pages find, by distance, cluster
size and budget, at 8k and 32k), `hits` (what of a step's tokens lies ready on the device of those
that the last one or two read, and bytes copied, context 8k), `needles` (answers at budgets 256 to
1024, perplexity and tokens and bytes a step reads, context 8k), `length` (perplexity against
context length, to 32k), `prefill` (what share of a layer's prompt, 8k and 32k, is clustering),
`decode` (attention time of a step, 8k to 128k, and how it grows). Figures are written after every
section.

    python benchmarks/recall.py [SECTION …]
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import record
from kvloom import Cache
from kvloom.cache.layer import LayerCache
from kvloom.eval import Settings, load, prepare
from kvloom.eval.needles import count_right
from kvloom.hf.compat import geometry
from kvloom.hf.observe import Observation, observe
from kvloom.recall import Clusters, Index, Pages, TopK
from kvloom.recipe.resolve import resolve
from kvloom.workload.step import step
from kvloom.workload.text import library_text, opening, rows, tokenize
from recall_speed import decode, prefill

SINKS, FULL_LAYERS = 16, 2
BUDGETS = (256, 512, 1024, 2048)
NEEDLES = 88  # questions, eight a context
INDEXES: dict[str, Index] = {
    "clusters cosine n/80": Clusters(),
    "clusters l2 n/80": Clusters(distance="l2"),
    "clusters inner n/80": Clusters(distance="inner"),
    "clusters cosine n/160": Clusters(size=160),
    "clusters cosine n/40": Clusters(size=40),
    "clusters cosine n/16": Clusters(size=16),
    "pages 16": Pages(),
}


def rates(model: Any, text: Tensor, context: int) -> dict[str, Any]:
    """Recall rate |I and I_true| / B behind a prompt, over 16 later queries, layers and heads.

    I_true: the B tokens with the largest score among those behind the sinks; scores of a group's
    query heads averaged ("mean"), or every query head for itself ("each").
    """
    found: dict[str, dict] = defaultdict(lambda: defaultdict(list))
    finders: dict[tuple[str, int], Any] = {}
    cluster_s: dict[str, float] = defaultdict(float)

    def saw(look: Observation) -> None:
        keys = look.keys[:, :, SINKS:context]
        if look.q.shape[2] > 1 or look.place < FULL_LAYERS:
            return
        real = torch.ones(1, 1, keys.shape[2], dtype=torch.bool)
        oracle = TopK().retriever.finder()
        oracle.extend(keys, real)
        for name, index in INDEXES.items():
            if (name, look.place) not in finders:
                finder = finders[name, look.place] = index.finder()
                begin = time.perf_counter()
                due = index.due(0, keys.shape[2])
                finder.extend(keys[:, :, :due], real[:, :, :due])
                cluster_s[name] += time.perf_counter() - begin
        q = look.q[:, :, 0]
        for group in ("mean", "each"):
            for budget in BUDGETS:
                wanted = budget - SINKS
                true = mask_of(oracle.find(q, wanted, group, lambda: keys), keys.shape[2])
                for name in INDEXES:
                    got = finders[name, look.place].find(q, wanted, group, lambda: keys)
                    hit = true.gather(2, got).float().sum(dim=-1) / wanted
                    found[name][group, budget].append(hit.mean().item())

    cache = Cache(model, "full")
    observe(cache, saw)
    step(model, text[:, :context], cache)
    for i in range(context, context + 16):
        step(model, text[:, i : i + 1], cache)
    return {
        name: {
            group: {str(b): sum(x) / len(x) for b in BUDGETS for x in [by[group, b]]}
            for group in ("mean", "each")
        }
        | {"build_s": cluster_s[name]}
        for name, by in found.items()
    }


def mask_of(slots: Tensor, tokens: int) -> Tensor:
    """Which of the tokens are among slots [B, H, M]."""
    empty = torch.zeros(*slots.shape[:2], tokens, dtype=torch.bool)
    return empty.scatter_(2, slots, True)


def reader(model: Any, ids: Tensor) -> Callable[[str], Cache]:
    """Read a context once, exactly; the result makes caches of any recipe that have read it."""
    observed: dict[int, Observation] = {}
    exact = Cache(model, "full")
    observe(exact, lambda seen: observed.__setitem__(seen.place, seen))
    step(model, ids, exact)

    def made(recipe: str) -> Cache:
        cache = Cache(model, recipe)
        for place, (routed, source) in enumerate(zip(cache.routed, exact.routed, strict=True)):
            seen, exact_tokens = observed[place], source.cache.tokens
            keys, values = exact_tokens.exact_keys(), exact_tokens.exact_values()
            routed.cache.prefill(seen.q, keys, values, scale=seen.scale)
            routed.cache.end_step()
        return cache

    return made


def perplexity(
    model: Any, recipe: str, text: Tensor, context: int, cache: Cache | None = None
) -> dict[str, float]:
    """Of the tokens behind a context, fed one by one, with what the last step read."""
    if cache is None:
        cache = Cache(model, recipe)
        step(model, text[:, :context], cache)
    losses = [
        F.cross_entropy(step(model, text[:, i : i + 1], cache).float(), text[:, i + 1])
        for i in range(context, text.shape[1] - 1)
    ]
    g, held = geometry(model), cache.tokens_read
    return {
        "perplexity": math.exp(torch.stack(losses).mean().item()),
        "tokens_read": held,
        "nbytes": cache.nbytes,
        "read_bytes": held * g.token_nbytes() if recipe_exact(recipe) else None,
    }


def recipe_exact(name: str) -> bool:
    """Whether bytes read follow from tokens read."""
    return resolve(name).store.exact


def hits(model: Any, text: Tensor, context: int) -> list[dict[str, Any]]:
    """Share of a step's tokens that lie ready, and bytes copied a step, layer and head.

    `token` is what a tier does, counted by it: all tokens of the last R steps lie ready, and no
    others. `cluster`: all tokens of the clusters that the last R steps took from, copied whole.
    `whole cluster`: clusters that they took all of; what was cut off is copied again.
    """
    read = reader(model, text[:, :context])
    made = []
    for name in ("clusterkv", "quest"):
        for budget in (256, 512, 1024):
            for steps in (1, 2):
                cache = read(f"{name}:tokens={budget},tier=host,steps={steps}")
                layers = [x.cache for x in cache.routed if isinstance(x.cache, LayerCache)]
                sims = [
                    {kind: Ready(layer, kind, steps) for kind in ("cluster", "whole cluster")}
                    for layer in layers
                ]
                for layer in layers:
                    layer.observe()
                for i in range(context, text.shape[1]):
                    step(model, text[:, i : i + 1], cache)
                    for layer, by in zip(layers, sims, strict=True):
                        for sim in by.values():
                            sim.take(layer.trace.recalled[0])
                token = 2 * layers[0].like.shape[-1] * layers[0].like.element_size()
                each = len(layers) * layers[0].like.shape[1] * (text.shape[1] - context)
                t = cache.traffic
                row = {"recipe": name, "budget": budget, "steps": steps, "by": {}}
                row["by"]["token"] = {
                    "hits": t.hits / (t.hits + t.misses),
                    "copied_bytes": t.nbytes / each,
                }
                for kind in sims[0]:
                    found, copied, asked = (
                        sum(getattr(by[kind], x) for by in sims)
                        for x in ("hits", "copied", "asked")
                    )
                    row["by"][kind] = {"hits": found / asked, "copied_bytes": copied * token / each}
                made.append(row)
                print(name, budget, steps, {
                    kind: f"{x['hits']:.1%} {x['copied_bytes']:,.0f} B" for kind, x in
                    row["by"].items()
                }, flush=True)  # fmt: skip
    return made


class Ready:
    """What a device cache of clusters or pages would hold of one layer, head by head, in sets."""

    def __init__(self, layer: LayerCache, kind: str, steps: int) -> None:
        self.kind, self.steps, self.finder = kind, steps, layer.retriever.finder
        self.known = 0
        self.last: list[list[set]] = [[] for _ in range(layer.like.shape[1])]
        self.hits = self.copied = self.asked = 0

    def learn(self) -> None:
        """Look up which tokens are in which part, where the index has grown."""
        if self.known == self.finder.tokens:
            return
        self.known = self.finder.tokens
        self.part = self.finder.parts()[0].tolist()
        self.members: list[dict[int, set]] = []
        for part in self.part:
            by: dict[int, set] = defaultdict(set)
            for slot, number in enumerate(part):
                by[number].add(slot)
            self.members.append(by)

    def take(self, chosen: Tensor) -> None:
        """Take in the slots [Hk, M] that a step read."""
        self.learn()
        for slots, part, members, last in zip(
            chosen.tolist(), self.part, self.members, self.last, strict=True
        ):
            asked = set(slots)
            ready = set().union(*last[-self.steps :]) if self.steps else set()
            parts = {part[slot] for slot in asked}
            if self.kind == "cluster":
                now = set().union(*(members[p] for p in parts))
                self.copied += len(now - ready)
            else:
                now = set().union(*(members[p] for p in parts if members[p] <= asked))
                self.copied += len(asked - ready)
            self.hits += len(asked & ready)
            self.asked += len(asked)
            last.append(now)


def needles(model: Any, tokenizer: Any, save: Callable[[Any], None]) -> list[dict[str, Any]]:
    """Answers right, perplexity and reads at a context of 8k.

    Every context is read once for all recipes; saved after each, with the questions asked so far.
    """
    settings = Settings(context=8192, new_tokens=96, batch=1, questions=NEEDLES)
    task = prepare(model, tokenizer, library_text(), settings)
    names = ["full"]
    for budget in (256, 512, 1024):
        for name in ("clusterkv", "clusterkv-2bit", "quest", "topk", "streaming"):
            names.append(f"{name}:tokens={budget}")
        names.append(f"snapkv:kernel=15,tokens={budget}")
    for name in ("clusterkv", "quest", "topk"):
        names += [f"{name}:tokens=1024,group={group}" for group in ("max", "each")]
    read = reader(model, task.text[:, : settings.context])
    made = [
        {"recipe": name, **perplexity(model, name, task.text, settings.context, read(name))}
        for name in names
    ]
    right: dict[str, int] = defaultdict(int)
    asked = 0
    for hay in task.haystacks:
        read = reader(model, torch.tensor([hay.context_ids]))
        asked += len(hay.questions)
        for row in made:
            name = row["recipe"]
            recipe, cache = resolve(name), read(name)
            right[name] += count_right(model, tokenizer, recipe, hay, 8, read=cache)
            row.update(right=right[name], questions=asked, needle=right[name] / asked)
        save(made)
        print(asked, {row["recipe"]: row["right"] for row in made}, flush=True)
    for row in made:
        print(f"{row['recipe']:<34} perplexity {row['perplexity']:.3f}, needles "
              f"{row['needle']:.1%}", flush=True)  # fmt: skip
    return made


def lengths(
    model: Any, ids: Any, first: list[int], save: Callable[[Any], None]
) -> list[dict[str, Any]]:
    """Perplexity of 4 x 128 tokens behind contexts up to 32k at a budget of 1024."""
    made = []
    for context in (2048, 4096, 8192, 16384, 32768 - 130):
        text = rows(ids, first, 4, context + 129, 0)
        for name in ("full", "clusterkv", "quest", "streaming", "snapkv"):
            spec = name if name == "full" else f"{name}:tokens=1024"
            row = {"context": context, "recipe": name, **perplexity(model, spec, text, context)}
            made.append(row)
            save(made)
            print(f"{context:>6} {name:<10} perplexity {row['perplexity']:.3f}", flush=True)
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    sections = ("rate8k", "rate32k", "hits", "needles", "length", "prefill", "decode")
    parser.add_argument("sections", nargs="*", default=sections, metavar="SECTION")
    options = parser.parse_args()
    model, tokenizer = load()
    ids, first = tokenize(tokenizer, library_text()), opening(tokenizer)
    path = record.RESULTS / "recall.json"
    done = json.loads(path.read_text()) if path.exists() else {}
    for section in options.sections:

        def save(figures: Any, section: str = section) -> None:
            environment = record.environment(dtype=str(model.dtype))
            done[section] = {"environment": environment, "rows": figures}
            record.write("recall", done)

        with torch.inference_mode():
            if section.startswith("rate"):
                context = {"rate8k": 8192, "rate32k": 32768 - 17}[section]
                figures = rates(model, rows(ids, first, 1, context + 17, 0), context)
                for name, by in figures.items():
                    shares = " ".join(f"{x:6.1%}" for x in by["mean"].values())
                    print(f"{section} {name:<24} {shares}", flush=True)
                save(figures)
            elif section == "hits":
                save(hits(model, rows(ids, first, 1, 8192 + 64, 0), 8192))
            elif section == "needles":
                needles(model, tokenizer, save)
            elif section == "length":
                lengths(model, ids, first, save)
            elif section == "decode":
                save(decode())
            else:
                save(prefill())


if __name__ == "__main__":
    main()
