"""Measure one recipe on the text of a task: memory, speed and quality.

Decides how each figure is measured. Figures relative to the exact cache need the measurement of the
recipe `full` on the same task.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from kvloom.progress import Progress
from kvloom.recall import Traffic

from ...workload.crew import Ask, Work
from ...workload.prefill import Prefilled
from ..decoding import decode_seconds
from .rows import Row
from .task import ComparisonTask

TIMED_STEPS = 24  # of decoding, with those that warm up


class Measurement(NamedTuple):
    """A row, and the greedy next tokens [B, new_tokens] that agreement is computed from."""

    row: Row
    greedy: Tensor


def measure(
    model: PreTrainedModel,
    prompt: Prefilled,
    task: ComparisonTask,
    full: Measurement | None,
    count: Progress,
) -> Work[Measurement]:
    """Measure a recipe whose cache holds the rows of text, and drop this cache.

    full: the measurement of the exact cache, None for that one itself. count: called with the
    current work, and the steps finished since the last call. The row lacks the needles.

    The continuations of all rows are decoded token by token, so that every scored prediction reads
    the compressed cache, and every step packs or evicts what is due. Bytes and bits are those at
    the end of the continuation. First, a copy of the cache decodes some tokens alone and is timed.
    """
    recipe, context = prompt.recipe, task.context
    text = task.text.to(model.device)
    count("decoding", 0)
    cache, prompt.cache = prompt.cache, None
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
        count("decoding", 1)
    next_tokens = torch.stack(greedy, dim=1).cpu()  # [B, new_tokens]
    traffic = Traffic(*(b - a for a, b in zip(traffic_before, cache.traffic, strict=True)))
    selected = traffic.hits + traffic.misses
    kv_bytes = cache.nbytes
    exact = full or Measurement(Row(recipe.name, kv_bytes=kv_bytes), next_tokens)
    assert exact.row.kv_bytes is not None
    row = Row(
        recipe=recipe.name,
        bits_per_value=cache.bits_per_value if cache.routed else None,
        kv_bytes=kv_bytes,
        times_smaller=exact.row.kv_bytes / kv_bytes,
        prefill_s=prompt.seconds,
        decode_tokens_s=len(text) / step_s,
        perplexity=_exp(torch.stack(losses).mean().item()),
        agreement=(next_tokens == exact.greedy).float().mean().item(),
        tokens_read=cache.tokens_read if cache.routed and recipe.recall is not None else None,
        moved_bytes=traffic.nbytes / task.new_tokens if selected else None,
        ready=traffic.hits / selected if selected else None,
    )
    return Measurement(row, next_tokens)


def _exp(nats: float) -> float:
    return math.exp(nats) if nats < 700 else math.inf
