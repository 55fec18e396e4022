"""Measure one recipe on a task: memory, speed and quality.

Decides how each figure is measured. Figures relative to the exact cache need the measurement of the
recipe `full` on the same task.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from ..errors import IncompatibleRecipe
from ..hf.cache import Cache
from ..recall import Traffic
from ..recipe.spec import Recipe
from ..report.errors import one_line, user_message
from ..workload import clock
from ..workload.forward import Progress, forward
from .needles import count_correct
from .rows import Row
from .task import Task

WARM_UP_STEPS = 4
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Measurement:
    """A row, and the greedy next tokens [B, new_tokens] that agreement is computed from."""

    row: Row
    greedy: Tensor | None = None


def measure(
    model: PreTrainedModel,
    tokenizer: Any,
    recipe: Recipe,
    task: Task,
    full: Measurement | None = None,
    progress: Progress | None = None,
) -> Measurement:
    """Measure a recipe; `full` is the measurement of the exact cache, None for that one itself.

    The contexts of all rows are prefilled together. Then their continuations are decoded token by
    token, so that every scored prediction reads the compressed cache, and every step packs or
    evicts what is due. Both are timed without the computation of scores, after a warm-up on the
    same contexts. Bytes and bits are those at the end of the continuation.

    A recipe that does not fit the model, or raises an error, gets a row with the reason; the
    traceback of a defect is logged.
    """
    units_left = task.units

    def on_step(what: str, units: int) -> None:
        nonlocal units_left
        units_left -= units
        if progress is not None:
            progress(what, units)

    try:
        with torch.inference_mode():
            return _measure(model, tokenizer, recipe, task, full, on_step)
    except Exception as error:
        if full is None:
            raise
        on_step(f"{recipe.name}: no figures", units_left)
        if isinstance(error, IncompatibleRecipe):
            return Measurement(Row(recipe.name, problem="; ".join(error.problems)))
        if user_message(error) is None:
            _log.exception("recipe %r failed", recipe.name)
        return Measurement(Row(recipe.name, problem=one_line(error), failed=True))


def _measure(
    model: PreTrainedModel,
    tokenizer: Any,
    recipe: Recipe,
    task: Task,
    full: Measurement | None,
    on_step: Progress,
) -> Measurement:
    name, device = recipe.name, model.device
    text = task.text.to(device)
    context, batch = task.context, text.shape[0]

    on_step(f"{name}: warming up", 0)
    cache = Cache(model, recipe)
    forward(model, text[:, :context], cache)
    for i in range(context, context + min(WARM_UP_STEPS, task.new_tokens)):
        forward(model, text[:, i : i + 1], cache)
    on_step(f"{name}: reading the context", 1)
    del cache

    cache = Cache(model, recipe)
    begin = clock.seconds(device)
    forward(model, text[:, :context], cache)
    prefill_s = clock.seconds(device) - begin
    on_step(f"{name}: decoding", 1)

    decode_s, losses, greedy = 0.0, [], []
    traffic_before = cache.traffic
    for i in range(context, context + task.new_tokens):
        begin = clock.seconds(device)
        logits = forward(model, text[:, i : i + 1], cache)  # [B, V]
        best = logits.argmax(-1)
        decode_s += clock.seconds(device) - begin
        losses.append(F.cross_entropy(logits.float(), text[:, i + 1], reduction="none"))
        greedy.append(best)
        on_step(f"{name}: decoding", 1)
    next_tokens = torch.stack(greedy, dim=1).cpu()  # [B, new_tokens]
    kv_bytes, bits = cache.nbytes, cache.bits_per_value if cache.routed else None
    tokens_read = cache.tokens_read if cache.routed and recipe.recall is not None else None
    traffic = Traffic(*(b - a for a, b in zip(traffic_before, cache.traffic, strict=True)))
    del cache

    on_step(f"{name}: answering needle questions", 0)
    correct = 0
    for haystack in task.haystacks:
        correct += count_correct(model, tokenizer, recipe, haystack, batch, task.ask)
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
        prefill_s=prefill_s,
        decode_tokens_s=batch * task.new_tokens / decode_s,
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
