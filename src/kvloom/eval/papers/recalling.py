"""How many of the tokens with the largest q . k an index finds (ClusterKV, figure 11).

Recall rate: |I and I_true| / B. I_true: the B tokens with the largest score among those after the
sinks. Every query head selects separately, as in the paper's code.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ...hf.cache import Cache
from ...hf.observe import ObservedStep, observe
from ...recall import Clusters, Index, Pages, TopK
from ...workload.attachment import attachment_restored
from ...workload.forward import forward

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
}
Rates = dict[str, dict[int, float]]
"""Recall rate by index and budget in tokens."""


def recall_rates(
    model: PreTrainedModel,
    text: Tensor,
    context: int,
    progress: Callable[[str, int], None],
) -> Rates:
    """Return the mean recall rates over heads, over layers after the first two, and over steps.

    text: int64 [1, context + steps]. progress: called with one unit a step. The model is left as it
    was.
    """
    found: dict[str, dict[int, list[float]]] = {name: defaultdict(list) for name in INDEXES}
    finders: dict[tuple[str, int], Any] = {}

    def on_step(look: ObservedStep) -> None:
        if look.q.shape[2] > 1 or look.layer < full_layers:
            return
        keys = look.keys[:, :, SINKS:context]
        live = torch.ones(1, 1, keys.shape[2], dtype=torch.bool, device=keys.device)
        oracle = TopK().finder()
        oracle.extend(keys, live)
        q = look.q[:, :, 0]
        for name, index in INDEXES.items():
            if (name, look.layer) not in finders:
                finder = finders[name, look.layer] = index.finder()
                due = index.due(0, keys.shape[2])
                finder.extend(keys[:, :, :due], live[:, :, :due])
        for budget in budgets(context):
            count = budget - SINKS
            true = mask_of(oracle.find(q, count, "each", lambda: keys), keys.shape[2])
            for name in INDEXES:
                got = finders[name, look.layer].find(q, count, "each", lambda: keys)
                found[name][budget].append(true.gather(2, got.long()).float().mean().item())

    with attachment_restored(model), torch.inference_mode():
        cache = Cache(model, "full")
        full_layers = FULL_LAYERS if len(cache.routed) > FULL_LAYERS else 0
        observe(cache, on_step)
        progress("recall rates: reading the context", 0)
        forward(model, text[:, :context].to(model.device), cache)
        for i in range(context, text.shape[1]):
            progress("recall rates: decoding", 0)
            forward(model, text[:, i : i + 1].to(model.device), cache)
            progress("", 1)
    return {
        name: {budget: sum(x) / len(x) for budget, x in by.items()} for name, by in found.items()
    }


def budgets(context: int) -> list[int]:
    """Return the budgets in tokens, a multiple of 16 each, sinks included."""
    return [max(2 * SINKS, round(context * share / 16) * 16) for share in SHARES]


def hit_rate(model: PreTrainedModel, recipe: str, text: Tensor, context: int) -> float:
    """Return which share of the tokens that a recipe's steps read was on the device already.

    recipe: one with a tier. text: int64 [1, context + steps].
    """
    with attachment_restored(model), torch.inference_mode():
        cache = Cache(model, recipe)
        forward(model, text[:, :context].to(model.device), cache)
        before = cache.traffic
        for i in range(context, text.shape[1]):
            forward(model, text[:, i : i + 1].to(model.device), cache)
        hits, misses = cache.traffic.hits - before.hits, cache.traffic.misses - before.misses
    return hits / (hits + misses)


def mask_of(slots: Tensor, tokens: int) -> Tensor:
    """Return which tokens are among slots [B, H, M], bool [B, H, tokens]."""
    empty = torch.zeros(*slots.shape[:2], tokens, dtype=torch.bool, device=slots.device)
    return empty.scatter_(2, slots.long(), True)
