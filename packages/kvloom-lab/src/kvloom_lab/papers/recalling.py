"""How many of the tokens with the largest q . k an index finds (ClusterKV, figure 11).

Recall rate: |I and I_true| / B. I_true: the B tokens with the largest score among those after the
sinks. By default every query head selects separately, as in the paper's code.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from statistics import fmean
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvloom import Cache
from kvloom.hf import ObservedStep, attachment_restored, observe_steps, read_tokens
from kvloom.progress import Progress
from kvloom.recall import Clusters, Index, Pages, PartialKeys, TopK

from ..workload import clock

SINKS, FULL_LAYERS = 16, 2
PAPER = Clusters(size=80, block_clusters=4, iterations=20)
PAPER_OPTIONS = f"size={PAPER.size},iterations={PAPER.iterations}"
"""The paper's clusters as options of the recipe `clusterkv`."""
SHARES = (1 / 32, 1 / 16, 1 / 8, 1 / 4)
"""Budgets as shares of the context."""
INDEXES: Mapping[str, Index] = {
    "cosine, L/80": PAPER,
    "L2, L/80": replace(PAPER, distance="l2"),
    "inner product, L/80": replace(PAPER, distance="inner"),
    "cosine, L/160": replace(PAPER, size=160),
    "cosine, L/40": replace(PAPER, size=40),
    "cosine, L/20": replace(PAPER, size=20),
    "Quest, pages of 16": Pages(),
    "InfiniGen, 30% of the channels": PartialKeys(),
}
PAGE = 16


@dataclass
class Recalled:
    """What an index finds.

    rates: the recall rate by the way in which query heads choose (see
    `recall.index.HEAD_CHOICES`), then by budget in tokens. build_s: seconds to build the index in
    all layers.
    """

    rates: dict[str, dict[int, float]]
    build_s: float


def recall_rates(
    model: PreTrainedModel,
    text: Tensor,
    context: int,
    progress: Progress,
    *,
    indexes: Mapping[str, Index] = INDEXES,
    groups: Sequence[str] = ("each",),
    budgets: Sequence[int] | None = None,
) -> dict[str, Recalled]:
    """Return the mean recall rates over heads, over layers after the first two, and over steps.

    text: int64 [1, context + steps]. progress: called with one unit a step. budgets: None: the
    `SHARES` of the context. The model is left as it was.
    """
    sizes = budgets or shared_budgets(context)
    rates: dict[str, dict[str, dict[int, list[float]]]] = {
        name: {group: {b: [] for b in sizes} for group in groups} for name in indexes
    }
    build_s = dict.fromkeys(indexes, 0.0)
    finders: dict[tuple[str, int], Any] = {}

    def build(q: Tensor, keys: Tensor, live: Tensor, layer: int) -> None:
        for name, index in indexes.items():
            finder = finders[name, layer] = index.finder()
            due = index.due(0, keys.shape[2])
            begin = clock.seconds(keys.device)
            if index.reads_queries:
                finder.learn(q[:, :, SINKS:], keys, live, live)
            finder.extend(keys[:, :, :due], live[:, :, :due])
            build_s[name] += clock.seconds(keys.device) - begin

    def on_step(observed: ObservedStep) -> None:
        keys = observed.keys[:, :, SINKS:context]
        live = torch.ones(1, 1, keys.shape[2], dtype=torch.bool, device=keys.device)
        if observed.q.shape[2] > 1:  # the prompt
            build(observed.q, keys, live, observed.layer)
            return
        oracle = TopK().finder()
        oracle.extend(keys, live)
        q = observed.q[:, :, 0]
        for group, budget in product(groups, sizes):
            count = budget - SINKS
            best = _mask_of(oracle.find(q, count, group, lambda: keys), keys.shape[2])
            for name in indexes:
                selected = finders[name, observed.layer].find(q, count, group, lambda: keys)
                rates[name][group][budget].append(
                    best.gather(2, selected.long()).float().mean().item()
                )

    _read(model, text, context, on_step, progress)
    return {
        name: Recalled(
            {group: {b: fmean(x) for b, x in sized.items()} for group, sized in by_name.items()},
            build_s[name],
        )
        for name, by_name in rates.items()
    }


@dataclass(frozen=True)
class Importance:
    """Where the most important tokens are (ClusterKV, figure 3), means over layers and heads.

    kept: the share of those of the first step that are among those of each step [steps]. in_page:
    how many of them a page of 16 tokens holds that holds any.
    """

    kept: list[float]
    in_page: float


def importance(model: PreTrainedModel, text: Tensor, context: int, tokens: int) -> Importance:
    """Return how the `tokens` tokens with the largest q . k change, step by step.

    text: int64 [1, context + steps]. The model is left as it was.
    """
    first: dict[int, Tensor] = {}
    kept: dict[int, list[float]] = {}
    in_page: list[float] = []

    def on_step(observed: ObservedStep) -> None:
        if observed.q.shape[2] > 1:  # the prompt
            return
        keys = observed.keys[:, :, :context]
        oracle = TopK().finder()
        oracle.extend(keys, torch.ones(1, 1, context, dtype=torch.bool, device=keys.device))
        slots = oracle.find(observed.q[:, :, 0], tokens, "each", lambda: keys)
        best = _mask_of(slots, context)
        step = observed.keys.shape[2] - context
        before = first.setdefault(observed.layer, best)
        kept.setdefault(step, []).append((before & best).sum().item() / before.sum().item())
        pages = best[..., : context // PAGE * PAGE].unflatten(-1, (-1, PAGE)).sum(dim=-1)
        in_page.append(pages[pages > 0].float().mean().item())

    _read(model, text, context, on_step)
    return Importance([fmean(kept[step]) for step in sorted(kept)], fmean(in_page))


def _read(
    model: PreTrainedModel,
    text: Tensor,
    context: int,
    on_step: Callable[[ObservedStep], None],
    progress: Progress = lambda what, units: None,
) -> None:
    """Read a context, and the tokens after it one by one; the first layers are not observed."""
    with attachment_restored(model), torch.inference_mode():
        cache = Cache(model, "full")
        exact_layers = FULL_LAYERS if len(cache.full_layers) > FULL_LAYERS else 0

        def observe(observed: ObservedStep) -> None:
            if observed.layer >= exact_layers:
                on_step(observed)

        observe_steps(cache, observe)
        progress("recall rates: reading the context", 0)
        read_tokens(model, text[:, :context].to(model.device), cache)
        for i in range(context, text.shape[1]):
            progress("recall rates: decoding", 0)
            read_tokens(model, text[:, i : i + 1].to(model.device), cache)
            progress("", 1)


def shared_budgets(context: int) -> list[int]:
    """Return the budgets in tokens, a multiple of 16 each, sinks included."""
    return [max(2 * SINKS, round(context * share / 16) * 16) for share in SHARES]


def hit_rate(model: PreTrainedModel, recipe: str, text: Tensor, context: int) -> float:
    """Return which share of the tokens that a recipe's steps read was on the device already.

    recipe: one with a tier. text: int64 [1, context + steps].
    """
    with attachment_restored(model), torch.inference_mode():
        cache = Cache(model, recipe)
        read_tokens(model, text[:, :context].to(model.device), cache)
        before = cache.traffic
        for i in range(context, text.shape[1]):
            read_tokens(model, text[:, i : i + 1].to(model.device), cache)
        hits, misses = cache.traffic.hits - before.hits, cache.traffic.misses - before.misses
    return hits / (hits + misses)


def _mask_of(slots: Tensor, tokens: int) -> Tensor:
    """Return which tokens are among slots [B, H, M], bool [B, H, tokens]."""
    empty = torch.zeros(*slots.shape[:2], tokens, dtype=torch.bool, device=slots.device)
    return empty.scatter_(2, slots.long(), True)
