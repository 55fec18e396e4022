"""Results of a comparison as plain data, and the conditions that they depend on."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from transformers import PreTrainedModel

from ...report.machine import machine
from .task import ComparisonTask


@dataclass(frozen=True)
class Row:
    """The figures of one recipe; all None if `problem` has the reason.

    Attributes:
        recipe: Its name.
        bits_per_value: Bits in memory for each key or value read, with metadata, exact windows and
            spare room, in the layers that kvloom compresses; None without such layers.
        kv_bytes: Bytes of the cache's tensors in all layers, whole batch.
        times_smaller: `kv_bytes` of `full` over its own.
        prefill_s: Seconds for the contexts of the whole batch: the forward pass, which several
            recipes may share, and storing the contexts in this recipe's cache.
        decode_tokens_s: Tokens per second, all rows together, after a warm-up.
        perplexity: Of the continuation.
        agreement: Fraction of positions with the same greedy next token as `full`.
        needle: Fraction of questions answered correctly; None without questions.
        tokens_read: Tokens of a row that the last step read, the mean over compressed layers; None
            for a recipe without recall, which reads its whole cache.
        moved_bytes: Bytes copied from a tier to the device in a step, whole batch; None without a
            tier, or if nothing was read from it.
        ready: Fraction of the selected tokens that were on the device already; None as
            `moved_bytes`.
        problem: Why there are no figures.
        failed: Whether the recipe started and raised an error; one that does not fit the model did
            not start.
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


def to_data(rows: Sequence[Row], environment: dict[str, Any]) -> dict[str, Any]:
    """Return plain data; figures that are not finite are None."""
    plain = [{k: _finite(v) for k, v in asdict(row).items()} for row in rows]
    return {"environment": environment, "rows": plain}


def environment(
    model: PreTrainedModel, name: str, task: ComparisonTask, seed: int, text: str = ""
) -> dict[str, Any]:
    """Return versions, hardware and sizes as plain data. name: of the model; text: its name."""
    return {
        **machine(model),
        "model": name,
        "text": text,
        "context": task.context,
        "new_tokens": task.new_tokens,
        "batch": task.text.shape[0],
        "questions": task.questions,
        "ask": task.ask,
        "seed": seed,
    }


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
