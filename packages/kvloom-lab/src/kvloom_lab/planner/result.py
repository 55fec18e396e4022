"""A plan as data and as text."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from .hardware import Hardware
from .machine import Machine
from .model import ModelFacts
from .units import Range, show_bytes, show_rate


@dataclass(frozen=True)
class Point:
    """The cache's bytes at one context, and the decode speed (None without times)."""

    context: int
    kv_bytes: int
    tokens_s: Range | None


@dataclass(frozen=True)
class PlanRow:
    """The plan of one recipe. None: not known, or not asked for.

    Attributes:
        recipe: Its name.
        kv_bytes: Bytes of the cache at this context and batch.
        peak_bytes: The largest memory during a prompt in one step, weights included.
        fits: Whether memory suffices for that.
        longest_context: Tokens, at this batch.
        largest_batch: Rows, at this context.
        fits_in_chunks: As `fits` for weights and cache alone: a prompt that is read in small
            chunks.
        longest_in_chunks: As `longest_context` for weights and cache alone.
        step_ms: Milliseconds of a decode step: low, best, high.
        tokens_s: Tokens per second of the batch: low, best, high.
        parts_ms: The best estimate, by part of a step.
        limit: The longest part.
        reaches: Whether the best estimate reaches the target, and memory holds weights and cache.
        longest_at_target: The longest context at which this is so.
        problem: Why there are no figures.
        no_times: Why there are no times.
        curve: Bytes and speed at contexts of 1,024 tokens and their doubles.
    """

    recipe: str
    kv_bytes: int | None = None
    peak_bytes: int | None = None
    fits: bool | None = None
    longest_context: int | None = None
    largest_batch: int | None = None
    fits_in_chunks: bool | None = None
    longest_in_chunks: int | None = None
    step_ms: Range | None = None
    tokens_s: Range | None = None
    parts_ms: dict[str, float] | None = None
    limit: str | None = None
    reaches: bool | None = None
    longest_at_target: int | None = None
    problem: str | None = None
    no_times: str | None = None
    curve: tuple[Point, ...] = ()


@dataclass(frozen=True)
class Plan:
    """The plan of several recipes on a model; printable, and plain data by `to_dict`.

    Attributes:
        model: What the model needs beside its cache.
        context: Tokens.
        batch: Rows.
        memory: Bytes; None: not given.
        hardware: What times are estimated for.
        target: Tokens per second of the whole batch.
        rows: One for each recipe.
        warnings: Sentences.
    """

    model: ModelFacts
    context: int
    batch: int
    memory: int | None
    hardware: Hardware | Machine | None
    target: float | None
    rows: tuple[PlanRow, ...]
    warnings: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = [f"{self.model.architecture}: {show_bytes(self.model.weights.nbytes)} of weights"]
        return "\n".join([*lines, *map(_line, self.rows), *self.warnings])

    def to_dict(self) -> dict[str, Any]:
        """Return plain data; the fields are in docs/reference/json.md."""
        m = self.model
        return {
            "model": {
                "name": m.name,
                "architecture": m.architecture,
                "weights_bytes": m.weights.nbytes,
                "quantized": m.weights.quantized,
                "dtype": str(m.geometry.dtype).removeprefix("torch."),
                "layers": m.layers,
                "sliding_layers": len(m.windows),
                "positions": m.positions,
                "working_bytes_per_token": m.working,
            },
            "context": self.context,
            "batch": self.batch,
            "memory": self.memory,
            "target": self.target,
            "hardware": None if self.hardware is None else self.hardware.to_dict(),
            "rows": [asdict(row) for row in self.rows],
            "warnings": list(self.warnings),
        }


def _line(row: PlanRow) -> str:
    """Return a row in one line."""
    if row.problem:
        return f"{row.recipe}: {row.problem}"
    text = f"{row.recipe}: KV cache {show_bytes(row.kv_bytes or 0)}"
    if row.longest_context is not None:
        text += f", longest context {row.longest_context:,}, largest batch {row.largest_batch:,}"
    if row.step_ms and row.tokens_s:
        t = row.tokens_s
        text += f", {show_rate(t.best)} tok/s ({show_rate(t.low)} to {show_rate(t.high)})"
    return text
