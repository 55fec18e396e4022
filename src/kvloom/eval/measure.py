"""One recipe, measured: what it holds, how fast it is, what it costs in quality.

Decides how each figure is taken. Every recipe gets the same task; figures that compare with the
exact cache need the measurement of the recipe `full` on that task.
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
from ..report.errors import explained, sentence
from ..workload.step import Progress, now, step
from .needles import Haystack, count_right

WARMUP_STEPS = 4
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Task:
    """What a recipe is measured on.

    text: int64 [B, context + new_tokens + 1], real text; haystacks: contexts with questions; ask:
    when these are asked, a key of `needles.ASK`.
    """

    text: Tensor
    context: int
    haystacks: list[Haystack]
    ask: str = "after"

    @property
    def new_tokens(self) -> int:
        """Tokens of the text fed one by one after the context."""
        return self.text.shape[1] - self.context - 1

    @property
    def questions(self) -> int:
        """Questions in all haystacks."""
        return sum(len(h.questions) for h in self.haystacks)

    @property
    def units(self) -> int:
        """Units of progress of one recipe."""
        return 2 + self.new_tokens + self.questions


@dataclass(frozen=True)
class Row:
    """The figures of one recipe; all None where `problem` says why there are none.

    failed: whether it began to run and broke off; a recipe that does not fit the model did not run.

    bits_per_value: bits held for each key or value seen, metadata, exact windows and spare room
    included, in the layers that kvloom holds (None if it holds none). kv_bytes: bytes of the
    tensors held in all layers, whole batch. times_smaller: the kv_bytes of `full` over its own.
    prefill_s: seconds for the whole batch's contexts. decode_tokens_s: tokens a second, all rows
    together. perplexity: of the continuation. agreement: fraction of positions at which the
    greedy next token is that of `full`. needle: fraction of questions answered right, None if
    none were asked. tokens_read: that the last step read of a row, the mean over layers that kvloom
    holds (None where a recipe does not recall, and reads all it holds). moved_bytes: copied from a
    tier to the device a step, whole batch; ready: fraction of the tokens chosen that lay there
    already (None without a tier, or where it was not read).
    """

    recipe: str
    bits_per_value: float | None = None
    kv_bytes: int | None = None
    times_smaller: float | None = None
    prefill_s: float | None = None
    decode_tokens_s: float | None = None
    perplexity: float | None = None
    agreement: float | None = None
    needle: float | None = None
    tokens_read: float | None = None
    moved_bytes: float | None = None
    ready: float | None = None
    problem: str | None = None
    failed: bool = False


@dataclass(frozen=True)
class Measured:
    """A row, and the greedy next tokens [B, new_tokens] with which others agree or not."""

    row: Row
    greedy: Tensor | None = None


def measure(
    model: PreTrainedModel,
    tokenizer: Any,
    recipe: Recipe,
    task: Task,
    full: Measured | None = None,
    progress: Progress | None = None,
) -> Measured:
    """Measure a recipe; `full` is the measurement of the exact cache, None for that one itself.

    The contexts of all rows are prefilled at once, then their continuations are fed token by
    token, so that every prediction that counts reads the compressed cache and every step packs or
    drops what is due. Both are timed without the work of scoring, after a run over the same
    contexts that does not count. Bytes and bits are those held at the end of the continuation.
    A recipe that does not fit the model, or fails on it, gets a row that says so; the traceback of
    an error that is a defect goes to the log.
    """
    left = task.units

    def tell(what: str, units: int) -> None:
        nonlocal left
        left -= units
        if progress is not None:
            progress(what, units)

    try:
        with torch.inference_mode():
            return _measure(model, tokenizer, recipe, task, full, tell)
    except Exception as error:
        if full is None:
            raise
        tell(f"{recipe.name}: no figures", left)
        if isinstance(error, IncompatibleRecipe):
            return Measured(Row(recipe.name, problem="; ".join(error.problems)))
        if explained(error) is None:
            _log.exception("recipe %r failed", recipe.name)
        return Measured(Row(recipe.name, problem=sentence(error), failed=True))


def _measure(
    model: PreTrainedModel,
    tokenizer: Any,
    recipe: Recipe,
    task: Task,
    full: Measured | None,
    tell: Progress,
) -> Measured:
    name, device = recipe.name, model.device
    text = task.text.to(device)
    context, batch = task.context, text.shape[0]

    tell(f"{name}: warming up", 0)
    cache = Cache(model, recipe)
    step(model, text[:, :context], cache)
    for i in range(context, context + min(WARMUP_STEPS, task.new_tokens)):
        step(model, text[:, i : i + 1], cache)
    tell(f"{name}: reading the context", 1)
    del cache

    cache = Cache(model, recipe)
    begin = now(device)
    step(model, text[:, :context], cache)
    prefill_s = now(device) - begin
    tell(f"{name}: decoding", 1)

    decode_s, losses, greedy = 0.0, [], []
    before = cache.traffic
    for i in range(context, context + task.new_tokens):
        begin = now(device)
        logits = step(model, text[:, i : i + 1], cache)  # [B, V]
        best = logits.argmax(-1)
        decode_s += now(device) - begin
        losses.append(F.cross_entropy(logits.float(), text[:, i + 1], reduction="none"))
        greedy.append(best)
        tell(f"{name}: decoding", 1)
    chosen = torch.stack(greedy, dim=1).cpu()  # [B, new_tokens]
    kv_bytes, bits = cache.nbytes, cache.bits_per_value if cache.routed else None
    tokens_read = cache.tokens_read if cache.routed and recipe.recall is not None else None
    moved = Traffic(*(b - a for a, b in zip(before, cache.traffic, strict=True)))
    del cache

    tell(f"{name}: looking for needles", 0)
    right = 0
    for haystack in task.haystacks:
        right += count_right(model, tokenizer, recipe, haystack, batch, task.ask)
        tell(f"{name}: looking for needles", len(haystack.questions))

    exact = Measured(Row(name, kv_bytes=kv_bytes), chosen) if full is None else full
    tokens = moved.hits + moved.misses
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
        agreement=(chosen == exact.greedy).float().mean().item(),
        needle=right / task.questions if task.questions else None,
        tokens_read=tokens_read,
        moved_bytes=moved.nbytes / task.new_tokens if tokens else None,
        ready=moved.hits / tokens if tokens else None,
    )
    return Measured(row, chosen)


def _exp(nats: float) -> float:
    return math.exp(nats) if nats < 700 else math.inf
