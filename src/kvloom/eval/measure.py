"""Measure one recipe on a task: memory, speed and quality.

Decides how each figure is measured. `workload.crew` runs the measurements of several recipes at
once. Figures relative to the exact cache need the measurement of the
recipe `full` on the same task.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from ..recall import Traffic
from ..workload.crew import Ask, Work
from ..workload.forward import Progress
from .contexts import Contexts, no_figures
from .decoding import decode_seconds
from .needles import count_correct
from .rows import Row
from .task import Task

TIMED_STEPS = 24  # of decoding, with those that warm up


@dataclass(frozen=True)
class Measurement:
    """A row, and the greedy next tokens [B, new_tokens] that agreement is computed from."""

    row: Row
    greedy: Tensor | None = None


def measure(
    model: PreTrainedModel,
    tokenizer: Any,
    contexts: Contexts,
    task: Task,
    full: Measurement | None,
    on_step: Progress,
) -> Work[Measurement]:
    """Measure a recipe whose caches hold the prompts of the task, and drop these caches.

    full: the measurement of the exact cache, None for that one itself. on_step: called with
    `task.units_after` units.

    The continuations of all rows of text are decoded token by token, so that every scored
    prediction reads the compressed cache, and every step packs or evicts what is due. Bytes and
    bits are those at the end of the continuation. First, a copy of the cache decodes some tokens
    alone and is timed.

    A recipe without caches gets a row with the reason, and so does one that raises an error; the
    traceback of a defect is logged.
    """
    recipe, units_left = contexts.recipe, task.units_after

    def count(what: str, units: int) -> None:
        nonlocal units_left
        units_left -= units
        on_step(what, units)

    row = contexts.problem
    if row is None:
        try:
            return (yield from _measure(model, tokenizer, contexts, task, full, count))
        except Exception as error:
            if full is None:
                raise
            row = no_figures(recipe, error)
    on_step(f"{recipe.name}: no figures", units_left)
    return Measurement(row)


def _measure(
    model: PreTrainedModel,
    tokenizer: Any,
    contexts: Contexts,
    task: Task,
    full: Measurement | None,
    on_step: Progress,
) -> Work[Measurement]:
    recipe, text = contexts.recipe, task.text.to(model.device)
    name, context, batch = recipe.name, task.context, text.shape[0]

    on_step(f"{name}: decoding", 0)
    cache, contexts.text = contexts.text, None
    assert cache is not None
    timed = text[:, context : context + min(TIMED_STEPS, task.new_tokens)]
    decode_seconds(model, cache, timed)  # kernels may be compiled on the way
    step_s = decode_seconds(model, cache, timed)
    losses, greedy = [], []
    traffic_before = cache.traffic
    for i in range(context, context + task.new_tokens):
        logits = yield Ask(text[:, i : i + 1], cache)  # [B, V]
        losses.append(F.cross_entropy(logits.float(), text[:, i + 1], reduction="none"))
        greedy.append(logits.argmax(-1))
        on_step(f"{name}: decoding", 1)
    next_tokens = torch.stack(greedy, dim=1).cpu()  # [B, new_tokens]
    kv_bytes, bits = cache.nbytes, cache.bits_per_value if cache.routed else None
    tokens_read = cache.tokens_read if cache.routed and recipe.recall is not None else None
    traffic = Traffic(*(b - a for a, b in zip(traffic_before, cache.traffic, strict=True)))
    del cache

    on_step(f"{name}: answering needle questions", 0)
    correct = 0
    for haystack in task.haystacks:
        prefilled = contexts.haystacks.pop(0) if task.reads_haystacks else None
        correct += yield from count_correct(
            model, tokenizer, recipe, haystack, batch, task.ask, prefilled
        )
        on_step(f"{name}: answering needle questions", len(haystack.questions))

    exact = Measurement(Row(name, kv_bytes=kv_bytes), next_tokens) if full is None else full
    selected = traffic.hits + traffic.misses
    assert exact.row.kv_bytes is not None
    assert exact.greedy is not None
    row = Row(
        recipe=name,
        bits_per_value=bits,
        kv_bytes=kv_bytes,
        times_smaller=exact.row.kv_bytes / kv_bytes,
        prefill_s=contexts.prefill_s,
        decode_tokens_s=batch / step_s,
        perplexity=_exp(torch.stack(losses).mean().item()),
        agreement=(next_tokens == exact.greedy).float().mean().item(),
        needle=correct / task.questions if task.questions else None,
        tokens_read=tokens_read,
        moved_bytes=traffic.nbytes / task.new_tokens if selected else None,
        ready=traffic.hits / selected if selected else None,
    )
    return Measurement(row, next_tokens)


def _exp(nats: float) -> float:
    return math.exp(nats) if nats < 700 else math.inf
