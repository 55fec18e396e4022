"""`plan`: bytes, limits and speed of recipes on a model, before anything runs.

Decides the questions that a plan answers and its warnings; other modules have the numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig

from ..errors import IncompatibleRecipe, InputError, RecipeError
from ..recipe.resolve import resolve
from ..recipe.spec import Recipe
from ..workload.forward import Progress
from . import measure, stored
from .cache_bytes import CacheBytes
from .fits import largest
from .hardware import Hardware
from .hardware_file import read_file
from .model import ModelFacts, read_model
from .presets import PRESETS
from .ranges import Range
from .step import StepTime, StepWork, step_work
from .this import Machine
from .units import show_bytes, show_rate

THIS = "this"
RECIPES = (
    "full", "near-lossless", "balanced", "small", "tiny", "kivi", "skvq", "turbo", "minikv", "h2o",
    "snapkv", "streaming", "clusterkv", "quest",
)  # fmt: skip
CONTEXT = 32768


@dataclass(frozen=True)
class Point:
    """The cache's bytes at one context, and the decode speed (None without times)."""

    context: int
    kv_bytes: int
    tokens_s: Range | None


@dataclass(frozen=True)
class Row:
    """The plan of one recipe.

    kv_bytes: the cache at this context and batch. peak_bytes: the largest memory during a prompt in
    one step, weights included. fits: whether memory suffices for that. longest_context: at this
    batch. largest_batch: at this context. fits_in_chunks, longest_in_chunks: the same for weights
    and cache alone, for a prompt that is read in small chunks. step_ms, tokens_s: low, best, high.
    parts_ms: best, by part. limit: the longest part. reaches: whether the best estimate reaches the
    target, and memory holds weights and cache; longest_at_target: the longest context at which this
    is so. None: not known, or not asked. problem: why there are no figures; no_times: why there are
    no times. curve: bytes and speed at contexts of 1,024 tokens and their doubles.
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
    """The plan of several recipes on a model; printable, and plain data by `to_dict`."""

    model: ModelFacts
    context: int
    batch: int
    memory: int | None
    hardware: Hardware | Machine | None
    target: float | None
    rows: tuple[Row, ...]
    warnings: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = [f"{self.model.architecture}: {show_bytes(self.model.weights.nbytes)} of weights"]
        return "\n".join([*lines, *map(line, self.rows), *self.warnings])

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


def plan(
    model: str | Path | PreTrainedConfig,
    recipes: Sequence[Recipe | str | Path] = RECIPES,
    *,
    context: int | None = None,
    batch: int = 1,
    memory: int | None = None,
    hardware: str | Path | Hardware | None = None,
    target: float | None = None,
    on_step: Callable[[int], Progress] | None = None,
) -> Plan:
    """Return bytes, limits and decode times of recipes on a model, without running it.

    model: see `planner.model.read_model`. context: tokens (default: 32,768, or the model's
    positions if they are fewer). memory: bytes (default: the hardware's). hardware: "h100",
    "a100", "rtx4090", "this" (measures this machine, and stores the result), a TOML file, or a
    `Hardware`. target: tokens per second of the whole batch. on_step: called with the number of
    units to measure; returns the function to report them to.

    A recipe that does not fit the model has a row with the problem. Raises `InputError` for less
    memory than the weights need and for settings out of range, `UnsupportedModel` for a model that
    cannot be counted, and `RecipeError`.
    """
    for name, value in (("context", context), ("batch", batch), ("memory", memory)):
        if value is not None and (type(value) is not int or value < 1):
            raise InputError(f"{name}={value!r} must be a whole number, 1 or more")
    if target is not None and not target > 0:
        raise InputError(f"target={target!r} must be a number of tokens per second above 0")
    if target is not None and hardware is None:
        raise InputError(
            "a target speed needs hardware: give h100, a100, rtx4090, this, or a hardware file"
        )
    chosen = [resolve(recipe) for recipe in recipes]
    found = _hardware(hardware)
    facts = read_model(model)
    context = context or min(CONTEXT, facts.positions or CONTEXT)
    caches = {i: _cache(recipe, facts, context) for i, recipe in enumerate(chosen)}
    works = [
        step_work(facts, x, context, batch) for x in caches.values() if isinstance(x, CacheBytes)
    ]
    if found == THIS:
        machine = stored.load()
        _check_memory(facts, memory or measure.total_memory())
        if machine is None or measure.units(machine, works, facts.geometry):
            units = measure.units(machine, works, facts.geometry)
            report = on_step(units) if on_step else (lambda what, done: None)
            machine = measure.complete(machine, works, facts.geometry, report)
            stored.save(machine)
        found = machine
    memory = memory or (None if found is None else found.memory)
    if memory is not None:
        _check_memory(facts, memory)
    question = _Question(facts, context, batch, memory, found, target)
    rows = tuple(question.row(recipe.name, caches[i]) for i, recipe in enumerate(chosen))
    return Plan(
        facts, context, batch, memory, found, target, rows, tuple(_warnings(question, rows))
    )


def line(row: Row) -> str:
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


def _hardware(hardware: str | Path | Hardware | None) -> Any:
    """Return a preset, the hardware of a file, "this", or None."""
    if hardware is None or isinstance(hardware, Hardware) or hardware == THIS:
        return hardware
    if str(hardware) in PRESETS:
        return PRESETS[str(hardware)]
    if Path(hardware).is_file():
        return read_file(Path(hardware))
    raise InputError(
        f"hardware {str(hardware)!r} is unknown; use {', '.join(PRESETS)}, {THIS}, or the path of "
        "a hardware file"
    )


def _cache(recipe: Recipe, facts: ModelFacts, context: int) -> CacheBytes | str:
    """Return the bytes of a recipe's cache, or why the recipe does not fit."""
    try:
        recipe.check(facts.geometry)
        found = CacheBytes(recipe, facts)
        found.nbytes(context, 1)
    except (IncompatibleRecipe, RecipeError) as error:
        return str(error)
    return found


def _check_memory(facts: ModelFacts, memory: int) -> None:
    if memory < facts.weights.nbytes:
        raise InputError(
            f"the weights of {facts.name} take {show_bytes(facts.weights.nbytes)}, and there are "
            f"{show_bytes(memory)} of memory; give more memory, or a model with fewer or quantized "
            "weights"
        )


@dataclass(frozen=True)
class _Question:
    """What is asked about every recipe."""

    facts: ModelFacts
    context: int
    batch: int
    memory: int | None
    hardware: Any
    target: float | None

    def row(self, name: str, cache: CacheBytes | str) -> Row:
        if isinstance(cache, str):
            return Row(name, problem=cache)
        found: dict[str, Any] = {
            "kv_bytes": cache.nbytes(self.context, self.batch),
            "peak_bytes": self.peak(cache, self.context, self.batch),
        }
        if self.memory is not None:
            found["fits"] = self.fits(cache, self.context, self.batch)
            found["longest_context"] = largest(
                lambda n: self.fits(cache, n, self.batch), beyond=cache.sawtooth
            )
            found["largest_batch"] = largest(lambda b: self.fits(cache, self.context, b))
            found["fits_in_chunks"] = self.held(cache, self.context)
            found["longest_in_chunks"] = largest(
                lambda n: self.held(cache, n), beyond=cache.sawtooth
            )
        if self.hardware is not None:
            found |= self.times(cache)
        return Row(name, **found, curve=tuple(self.curve(cache, "no_times" not in found)))

    def curve(self, cache: CacheBytes, timed: bool) -> Iterator[Point]:
        """Return points up to the context of the question, and at least 32,768 tokens."""
        tokens = 1024
        while tokens < 2 * max(self.context, CONTEXT):
            rates = None
            try:
                nbytes = cache.nbytes(tokens, self.batch)
                if timed and self.hardware is not None:
                    rates = self.rates(cache, tokens)
            except RecipeError:  # a budget that is too small for a layer at this context
                return
            yield Point(tokens, nbytes, rates)
            tokens *= 2

    def rates(self, cache: CacheBytes, tokens: int) -> Range:
        """Return tokens per second of all rows together."""
        work = step_work(self.facts, cache, tokens, self.batch)
        return self.step(work).total.over(self.batch)

    def peak(self, cache: CacheBytes, tokens: int, batch: int) -> int | None:
        """Return the largest bytes during the prompt; None if activations are not known."""
        working = self.facts.working
        if working is None:
            return None
        prefill = cache.prefill_nbytes(tokens, batch)
        return self.facts.weights.nbytes + prefill + batch * tokens * working

    def fits(self, cache: CacheBytes, tokens: int, batch: int) -> bool:
        assert self.memory is not None
        try:
            peak = self.peak(cache, tokens, batch)
            if peak is None:
                peak = self.facts.weights.nbytes + cache.nbytes(tokens, batch)
        except RecipeError:  # a budget that this context leaves nothing of
            return False
        return peak <= self.memory

    def held(self, cache: CacheBytes, tokens: int) -> bool:
        """Return whether memory holds weights and cache."""
        assert self.memory is not None
        try:
            nbytes = cache.nbytes(tokens, self.batch)
        except RecipeError:
            return False
        return self.facts.weights.nbytes + nbytes <= self.memory

    def times(self, cache: CacheBytes) -> dict[str, Any]:
        work = step_work(self.facts, cache, self.context, self.batch)
        problem = self.hardware.problem(work)
        if problem:
            return {"no_times": problem}
        time = self.step(work)
        found: dict[str, Any] = {
            "step_ms": time.total.scaled(1e3),
            "tokens_s": time.total.over(self.batch),
            "parts_ms": {
                name: 1e3 * getattr(time, name).best
                for name in ("weights", "kv", "arithmetic", "overhead")
            },
            "limit": time.limit,
        }
        if self.target is not None:
            target = self.target

            def allowed(tokens: int) -> bool:
                if self.memory is not None and not self.held(cache, tokens):
                    return False
                try:
                    return self.rates(cache, tokens).best >= target
                except RecipeError:
                    return False

            found["longest_at_target"] = largest(allowed, beyond=cache.sawtooth)
            found["reaches"] = allowed(self.context)
        return found

    def step(self, work: StepWork) -> StepTime:
        if isinstance(self.hardware, Machine):
            return self.hardware.step(work, self.facts.geometry)
        time: StepTime = self.hardware.step(work)
        return time


def _warnings(question: _Question, rows: Sequence[Row]) -> list[str]:
    facts, found = question.facts, []
    if facts.positions is not None and question.context > facts.positions:
        found.append(
            f"The context of {question.context:,} tokens exceeds the {facts.positions:,} positions "
            f"of {facts.name}; it was not trained for more."
        )
    beyond = [
        row.recipe for row in rows
        if facts.positions and (row.longest_in_chunks or 0) > facts.positions
    ]  # fmt: skip
    if beyond and question.context <= (facts.positions or 0):
        found.append(
            f"Memory suffices for longer contexts than the {facts.positions:,} positions of "
            f"{facts.name}; it was not trained for them."
        )
    if not facts.dtype_stated:
        found.append(f"The config of {facts.name} states no dtype; float32 is counted.")
    if facts.working is None:
        found.append(
            f"The activations of a prompt cannot be traced for {facts.architecture}: limits count "
            "weights and cache alone."
        )
    for reason in dict.fromkeys(row.no_times for row in rows if row.no_times):
        names = ", ".join(row.recipe for row in rows if row.no_times == reason)
        found.append(f"No times for {names}: {reason}.")
    if question.target is not None:
        found += _target_warnings(question, rows)
    return found


def _target_warnings(question: _Question, rows: Sequence[Row]) -> list[str]:
    timed = [row for row in rows if row.tokens_s]
    if not timed or any(row.reaches for row in timed):
        return []
    fitting = [row for row in timed if row.fits_in_chunks is not False] or timed
    nearest = max(fitting, key=lambda row: row.tokens_s.best if row.tokens_s else 0.0)
    assert nearest.tokens_s is not None
    rate = show_rate(nearest.tokens_s.best)
    return [
        f"No recipe reaches {question.target:g} tok/s at {question.context:,} tokens and batch "
        f"{question.batch}; the nearest is {nearest.recipe} with {rate}."
    ]
