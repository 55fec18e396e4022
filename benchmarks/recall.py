"""Recall on the reference model: does the index find what attention wants, and what does it cost?

Sections: `rate` (share of the true top B tokens that clusters and pages find, by distance, cluster
size and budget, at 8k and 32k), `needles` (answers at budgets 256 to 1024, perplexity and tokens
and bytes a step reads, context 8k), `length` (perplexity against context length, to 32k), `prefill`
(share of the prompt's time spent clustering), `decode` (attention time of a
step, 8k to 128k). Figures are written after every section.

    python benchmarks/recall.py [SECTION …]
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import record
from kvloom import Cache
from kvloom.compare import Settings, load, prepare
from kvloom.compare.needles import count_right
from kvloom.compare.step import step
from kvloom.compare.text import library_text, opening, rows, tokenize
from kvloom.hf.compat import geometry
from kvloom.hf.watch import Look, watch
from kvloom.layer import Asked
from kvloom.recall import Clusters, Index, Pages, TopK
from kvloom.recalled import RecalledLayer
from kvloom.recipes import resolve
from kvloom.scored import layer_cache

SINKS, FULL_LAYERS = 16, 2
BUDGETS = (256, 512, 1024, 2048)
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

    def saw(look: Look) -> None:
        keys = look.keys[:, :, SINKS:context]
        if look.q.shape[2] > 1 or look.place < FULL_LAYERS:
            return
        real = torch.ones(1, 1, keys.shape[2], dtype=torch.bool)
        oracle = TopK().finder()
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
    watch(cache, saw)
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


def perplexity(model: Any, recipe: str, text: Tensor, context: int) -> dict[str, float]:
    """Of the tokens behind a context, fed one by one, with what the last step read."""
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


def needles(model: Any, tokenizer: Any, save: Callable[[Any], None]) -> list[dict[str, Any]]:
    """Answers right, perplexity and reads at a context of 8k."""
    settings = Settings(context=8192, new_tokens=96, batch=1, questions=24)
    task = prepare(model, tokenizer, library_text(), settings)
    made: list[dict[str, Any]] = []
    names = ["full"]
    for budget in (256, 512, 1024):
        for name in ("clusterkv", "quest", "topk"):
            names += [f"{name}:tokens={budget},group={group}" for group in ("mean", "max", "each")]
    names += ["clusterkv-2bit", "snapkv:kernel=15", "streaming"]  # 1024 as well
    for name in names:
        row = {"recipe": name, **perplexity(model, name, task.text, settings.context)}
        recipe = resolve(name)
        right = sum(count_right(model, tokenizer, recipe, hay, 4) for hay in task.haystacks)
        row["needle"] = right / task.questions
        made.append(row)
        save(made)
        print(f"{name:<34} perplexity {row['perplexity']:.3f}, reads {row['tokens_read']:,.0f} "
              f"tokens, needles {row['needle']:.1%}", flush=True)  # fmt: skip
    return made


def lengths(
    model: Any, ids: Any, first: list[int], save: Callable[[Any], None]
) -> list[dict[str, Any]]:
    """Perplexity behind contexts up to 32k at a budget of 1024."""
    made = []
    for context in (2048, 4096, 8192, 16384, 32768 - 129):
        text = rows(ids, first, 1, context + 129, 0)
        for name in ("full", "clusterkv", "quest", "streaming", "snapkv"):
            spec = name if name == "full" else f"{name}:tokens=1024"
            row = {"context": context, "recipe": name, **perplexity(model, spec, text, context)}
            made.append(row)
            save(made)
            print(f"{context:>6} {name:<10} perplexity {row['perplexity']:.3f}", flush=True)
    return made


def prefill() -> dict[str, Any]:
    """Clustering of one 32q/8kv x 128 layer's keys beside the attention of the prompt, random."""
    made = {}
    for context in (8192,):
        q = torch.randn(1, 32, context, 128)
        k, v = torch.randn(2, 1, 8, context, 128).unbind(0)
        spent = {}
        for name in ("clusterkv", "full"):
            layer = RecalledLayer(replace(resolve("clusterkv"), name=name))
            if name == "full":
                layer._index = lambda: None  # type: ignore[method-assign]
            begin = time.perf_counter()
            layer.attend(q, k, v, scale=128**-0.5)
            spent[name] = time.perf_counter() - begin
        made[str(context)] = spent
        print(f"{context}: {spent}", flush=True)
    return made


def decode() -> dict[str, Any]:
    """Fastest of 20 steps of one 32q/8kv x 128 layer behind random keys in fp32, budget 1024.

    `full` is torch's fused attention over all tokens; k-means makes one iteration, as the step does
    not depend on how good the clusters are.
    """
    made: dict[str, Any] = {}
    for context in (8192, 32768, 131072):
        k, v = torch.randn(2, 1, 8, context, 128).unbind(0)
        q = torch.randn(1, 32, 1, 128)
        spent = {}
        for name in ("quest", "clusterkv:iterations=1", "full"):
            layer = layer_cache(resolve(name), "a layer", (2, 3))
            layer.seen = context  # a prompt taken in without the quadratic time of its attention
            layer._take(k, v, Asked(q, 1.0, None, None))
            steps = []
            for _ in range(20):
                one = torch.randn(2, 1, 8, 1, 128)
                begin = time.perf_counter()
                layer.attend(q, one[0], one[1], scale=128**-0.5)
                steps.append(time.perf_counter() - begin)
            spent[name] = 1000 * min(steps)
            del layer
        made[str(context)] = spent
        print(f"{context:>6} ms a step: {spent}", flush=True)
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    sections = ("rate8k", "rate32k", "needles", "length", "prefill", "decode")
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
