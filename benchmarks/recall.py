"""Recall on the reference model: how many of the best tokens the index finds, and at what cost.

Sections: `rate8k`, `rate32k` (share of the true top B tokens that clusters and pages find, by
distance, cluster size and budget), `hits` (share of a step's tokens that are on the device already
because one of the last one or two steps read them, and bytes copied, context 8k), `needles`
(answers at budgets 256 to 1024, perplexity, and tokens and bytes that a step reads, context 8k),
`choice` (answers by cluster size and by how query heads choose, context 4k, 512 needles),
`length` (perplexity against context length, to 32k), `prefill` (clustering's share of a layer's
prompt time, 8k and 32k), `decode` (attention time of a step, 8k to 128k). Figures are written after
every section.

    python benchmarks/recall.py [SECTION …]
"""

from __future__ import annotations

import argparse
import json
import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

import record
from kvloom import Cache
from kvloom.cache import LayerCache
from kvloom.cache.step import Queries, StepInputs
from kvloom.hf import ObservedStep, geometry, observe_steps
from kvloom.hf import read_tokens as forward
from kvloom.recall import Index, Pages
from kvloom.recipe import resolve
from kvloom_lab.eval import Settings, load, prepare
from kvloom_lab.eval.comparison import correct_after, haystacks
from kvloom_lab.papers.recalling import PAPER, PAPER_OPTIONS, recall_rates
from kvloom_lab.workload.passes import run_alone
from kvloom_lab.workload.text import cut_rows, leading_ids, library_text, tokenize
from recall_speed import decode, prefill

BUDGETS = (256, 512, 1024, 2048)
NEEDLES = 88  # questions, eight a context
INDEXES: dict[str, Index] = {
    "clusters cosine n/80": PAPER,
    "clusters l2 n/80": replace(PAPER, distance="l2"),
    "clusters inner n/80": replace(PAPER, distance="inner"),
    "clusters cosine n/160": replace(PAPER, size=160),
    "clusters cosine n/40": replace(PAPER, size=40),
    "clusters cosine n/16": replace(PAPER, size=16),
    "pages 16": Pages(),
}


def rates(model: Any, text: Tensor, context: int) -> dict[str, Any]:
    """Return the recall rates of 16 queries after the prompt, and the seconds of building an index.

    Scores are averaged over a group's query heads ("mean"), or each query head selects separately
    ("each").
    """
    found = recall_rates(
        model, text[:, : context + 16], context, lambda *_: None,
        indexes=INDEXES, groups=("mean", "each"), budgets=BUDGETS,
    )  # fmt: skip
    return {name: {**one.rates, "build_s": one.build_s} for name, one in found.items()}


def prefill_once(model: Any, ids: Tensor) -> Callable[[str], Cache]:
    """Prefill a context once; return a function from a recipe to its cache of that context."""
    looks: dict[int, ObservedStep] = {}
    exact = Cache(model, "full")
    observe_steps(exact, lambda look: looks.__setitem__(look.layer, look))
    forward(model, ids, exact)

    def cache_of(recipe: str) -> Cache:
        cache = Cache(model, recipe)
        for layer, (routed, source) in enumerate(
            zip(cache.full_layers, exact.full_layers, strict=True)
        ):
            look, exact_tokens = looks[layer], source.cache._state.segment
            keys, values = exact_tokens.exact_keys(), exact_tokens.exact_values()
            routed.cache.prefill(StepInputs(Queries(look.q, look.scale), keys, values))
            routed.cache.forget_undo()
        return cache

    return cache_of


def perplexity(
    model: Any, recipe: str, text: Tensor, context: int, cache: Cache | None = None
) -> dict[str, float]:
    """Return the perplexity of the tokens after a context, and what the last step read."""
    if cache is None:
        cache = Cache(model, recipe)
        forward(model, text[:, :context], cache)
    losses = [
        F.cross_entropy(forward(model, text[:, i : i + 1], cache).float(), text[:, i + 1])
        for i in range(context, text.shape[1] - 1)
    ]
    g, tokens_read = geometry(model), cache.tokens_read
    return {
        "perplexity": math.exp(torch.stack(losses).mean().item()),
        "tokens_read": tokens_read,
        "nbytes": cache.nbytes,
        "read_bytes": tokens_read * g.token_nbytes() if is_exact(recipe) else None,
    }


def is_exact(name: str) -> bool:
    """Return whether a recipe stores exact tokens, so that their number decides the bytes."""
    return resolve(name).store.exact


def hits(model: Any, text: Tensor, context: int) -> list[dict[str, Any]]:
    """Return the share of a step's tokens on the device, and bytes copied per step, layer and head.

    `token` is what a tier does, counted by the tier: the tokens of the last R steps are on the
    device. `cluster` simulates a device cache of clusters: all tokens of the clusters from which
    the last R steps selected, copied whole. `whole cluster`: only clusters that they selected
    completely; the tokens of other clusters are copied again.
    """
    cache_of = prefill_once(model, text[:, :context])
    rows = []
    for name in ("clusterkv", "quest"):
        for budget in (256, 512, 1024):
            for steps in (1, 2):
                cache = cache_of(f"{name}:tokens={budget},tier=host,steps={steps}")
                layers = [
                    x.cache for x in cache.full_layers if x.cache._state.retriever is not None
                ]
                sims = [
                    {kind: DeviceCache(layer, kind, steps) for kind in ("cluster", "whole cluster")}
                    for layer in layers
                ]
                for layer in layers:
                    layer.observe()
                for i in range(context, text.shape[1]):
                    forward(model, text[:, i : i + 1], cache)
                    for layer, by in zip(layers, sims, strict=True):
                        for sim in by.values():
                            sim.step(layer._state.trace.recalled[0])
                token = 2 * layers[0]._state.like.shape[-1] * layers[0]._state.like.element_size()
                each = len(layers) * layers[0]._state.like.shape[1] * (text.shape[1] - context)
                t = cache.traffic
                row = {"recipe": name, "budget": budget, "steps": steps, "by": {}}
                row["by"]["token"] = {
                    "hits": t.hits / (t.hits + t.misses),
                    "copied_bytes": t.nbytes / each,
                }
                for kind in sims[0]:
                    found, copied, selected = (
                        sum(getattr(by[kind], x) for by in sims)
                        for x in ("hits", "copied", "selected")
                    )
                    row["by"][kind] = {
                        "hits": found / selected,
                        "copied_bytes": copied * token / each,
                    }
                rows.append(row)
                print(name, budget, steps, {
                    kind: f"{x['hits']:.1%} {x['copied_bytes']:,.0f} B" for kind, x in
                    row["by"].items()
                }, flush=True)  # fmt: skip
    return rows


class DeviceCache:
    """Simulates a device cache of one layer's clusters or pages: a set of tokens for each head."""

    def __init__(self, layer: LayerCache, kind: str, steps: int) -> None:
        self.kind, self.steps, self.finder = kind, steps, layer._state.retriever.finder
        self.indexed = 0
        self.last: list[list[set]] = [[] for _ in range(layer._state.like.shape[1])]
        self.hits = self.copied = self.selected = 0

    def update_parts(self) -> None:
        """Read the part of each token from the index, if the index has grown."""
        if self.indexed == self.finder.tokens:
            return
        self.indexed = self.finder.tokens
        self.part = self.finder.parts()[0].tolist()
        self.members: list[dict[int, set]] = []
        for part in self.part:
            by: dict[int, set] = defaultdict(set)
            for slot, number in enumerate(part):
                by[number].add(slot)
            self.members.append(by)

    def step(self, chosen: Tensor) -> None:
        """Count the hits of a step that read the slots [Hk, M], and update the simulated cache."""
        self.update_parts()
        for slots, part, members, last in zip(
            chosen.tolist(), self.part, self.members, self.last, strict=True
        ):
            selected = set(slots)
            ready = set().union(*last[-self.steps :]) if self.steps else set()
            parts = {part[slot] for slot in selected}
            if self.kind == "cluster":
                loaded = set().union(*(members[p] for p in parts))
                self.copied += len(loaded - ready)
            else:
                loaded = set().union(*(members[p] for p in parts if members[p] <= selected))
                self.copied += len(selected - ready)
            self.hits += len(selected & ready)
            self.selected += len(selected)
            last.append(loaded)


def needles(model: Any, tokenizer: Any, save: Callable[[Any], None]) -> list[dict[str, Any]]:
    """Return correct answers, perplexity and tokens read at a context of 8k.

    Every context is prefilled once for all recipes. Rows are saved after each context, with the
    number of questions so far.
    """
    settings = Settings(context=8192, new_tokens=96, batch=1, questions=NEEDLES)
    task = prepare(model, tokenizer, library_text(), settings)
    names = ["full"]
    for budget in (256, 512, 1024):
        for name in ("clusterkv", "clusterkv-2bit", "quest", "topk", "streaming"):
            names.append(f"{name}:tokens={budget}")
        names.append(f"snapkv:kernel=15,tokens={budget}")
    for name in ("clusterkv", "quest", "topk"):
        names += [f"{name}:tokens=1024,query_heads={choice}" for choice in ("max", "each")]
    cache_of = prefill_once(model, task.text[:, : settings.context])
    rows = [
        {"recipe": name, **perplexity(model, name, task.text, settings.context, cache_of(name))}
        for name in names
    ]
    correct: dict[str, int] = defaultdict(int)
    questions = 0
    for hay in task.haystacks:
        cache_of = prefill_once(model, torch.tensor([hay.context_ids]))
        questions += len(hay.questions)
        for row in rows:
            name = row["recipe"]
            work = correct_after(model, tokenizer, cache_of(name), hay.questions, 8)
            correct[name] += run_alone(model, work)
            row.update(right=correct[name], questions=questions, needle=correct[name] / questions)
        save(rows)
        print(questions, {row["recipe"]: row["right"] for row in rows}, flush=True)
    for row in rows:
        print(f"{row['recipe']:<34} perplexity {row['perplexity']:.3f}, needles "
              f"{row['needle']:.1%}", flush=True)  # fmt: skip
    return rows


def choices(model: Any, tokenizer: Any, save: Callable[[Any], None]) -> list[dict[str, Any]]:
    """Return correct answers after 4k tokens by cluster size, choice of query heads and budget.

    Rows are saved after each of 16 seeds of 32 questions, with the number of questions so far.
    """
    names = [
        f"clusterkv:tokens={budget},{options}"
        for budget in (1024, 512)
        for options in (f"{PAPER_OPTIONS},query_heads=each", PAPER_OPTIONS, "size=40", "size=20")
    ]
    names += ["clusterkv:size=40,query_heads=mean", "quest:tokens=1024", "quest:tokens=512"]
    ids = np.asarray(tokenizer.encode(library_text()[:3_000_000], add_special_tokens=False))
    first = leading_ids(tokenizer)
    rows: list[dict[str, Any]] = [{"recipe": name, "right": 0, "questions": 0} for name in names]
    for seed in range(1, 17):
        for hay in haystacks(tokenizer, ids, first, context=4096, questions=32, seed=seed):
            cache_of = prefill_once(model, torch.tensor([hay.context_ids]))
            for row in rows:
                cache = cache_of(row["recipe"])
                work = correct_after(model, tokenizer, cache, hay.questions, 8)
                row["right"] += run_alone(model, work)
                row["questions"] += len(hay.questions)
        save(rows)
        print(f"seed {seed}:", {row["recipe"]: row["right"] for row in rows}, flush=True)
    return rows


def lengths(
    model: Any, ids: Any, first: list[int], save: Callable[[Any], None]
) -> list[dict[str, Any]]:
    """Return the perplexity of 4 x 128 tokens after contexts up to 32k at a budget of 1024."""
    rows = []
    for context in (2048, 4096, 8192, 16384, 32768 - 130):
        text = cut_rows(ids, first, 4, context + 129, 0)
        for name in ("full", "clusterkv", "quest", "streaming", "snapkv"):
            spec = name if name == "full" else f"{name}:tokens=1024"
            row = {"context": context, "recipe": name, **perplexity(model, spec, text, context)}
            rows.append(row)
            save(rows)
            print(f"{context:>6} {name:<10} perplexity {row['perplexity']:.3f}", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    sections = ("rate8k", "rate32k", "hits", "needles", "choice", "length", "prefill", "decode")
    parser.add_argument("sections", nargs="*", default=sections, metavar="SECTION")
    options = parser.parse_args()
    model, tokenizer = load()
    ids, first = tokenize(tokenizer, library_text()), leading_ids(tokenizer)
    path = record.results() / "recall.json"
    done = json.loads(path.read_text()) if path.exists() else {}
    for section in options.sections:

        def save(figures: Any, section: str = section) -> None:
            environment = record.environment(dtype=str(model.dtype))
            done[section] = {"environment": environment, "rows": figures}
            record.write("recall", done)

        with torch.inference_mode():
            if section.startswith("rate"):
                context = {"rate8k": 8192, "rate32k": 32768 - 17}[section]
                figures = rates(model, cut_rows(ids, first, 1, context + 17, 0), context)
                for name, by in figures.items():
                    shares = " ".join(f"{x:6.1%}" for x in by["mean"].values())
                    print(f"{section} {name:<24} {shares}", flush=True)
                save(figures)
            elif section == "hits":
                save(hits(model, cut_rows(ids, first, 1, 8192 + 64, 0), 8192))
            elif section == "needles":
                needles(model, tokenizer, save)
            elif section == "choice":
                choices(model, tokenizer, save)
            elif section == "length":
                lengths(model, ids, first, save)
            elif section == "decode":
                save(decode())
            else:
                save(prefill())


if __name__ == "__main__":
    main()
