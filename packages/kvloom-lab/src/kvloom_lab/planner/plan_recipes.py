"""`plan`: bytes, limits and speed of recipes on a model, before anything runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig

from kvloom.errors import IncompatibleRecipe, InputError, RecipeError
from kvloom.progress import Progress
from kvloom.recipe import Recipe, resolve

from ..recommended import RECOMMENDED
from . import measure
from .hardware import PRESETS, Hardware, read_hardware
from .machine import UNMEASURED, Machine, load_machine, save_machine
from .model import ModelFacts, read_model
from .step import CHUNK, CacheBytes, step_work
from .units import Range, largest_fitting, show_bytes, show_rate


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
        fits_in_chunks: As `fits`, for a prompt that is read in chunks of up to `CHUNK` tokens.
        longest_in_chunks: As `longest_context`, for such a prompt.
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
        model: What the model needs in addition to its cache.
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
                "sliding_layers": len(m.geometry.sliding),
                "state_bytes": sum(m.states),
                "positions": m.positions,
                "activation_bytes": None
                if m.activations is None
                else m.activations.nbytes(self.context, self.batch),
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
    if row.problem:
        return f"{row.recipe}: {row.problem}"
    text = f"{row.recipe}: KV cache {show_bytes(row.kv_bytes or 0)}"
    if row.longest_context is not None:
        text += f", longest context {row.longest_context:,}, largest batch {row.largest_batch:,}"
    if row.step_ms and row.tokens_s:
        t = row.tokens_s
        text += f", {show_rate(t.best)} tok/s ({show_rate(t.low)} to {show_rate(t.high)})"
    return text


CONTEXT = 32768


def fitting_cache(recipe: Recipe, facts: ModelFacts, context: int) -> CacheBytes | str:
    """Return the bytes of a recipe's cache, or why the recipe does not fit."""
    try:
        recipe.check(facts.geometry)
        cache = CacheBytes(recipe, facts)
        cache.nbytes(context, 1)
    except (IncompatibleRecipe, RecipeError) as error:
        return str(error)
    return cache


@dataclass(frozen=True)
class RecipePlanner:
    """Plans one recipe after another for a model, a context and a batch."""

    facts: ModelFacts
    context: int
    batch: int
    memory: int | None
    hardware: Hardware | Machine | None
    target: float | None

    def row(self, recipe: Recipe, cache: CacheBytes | str) -> PlanRow:
        """Return the figures of a recipe; cache: what `fitting_cache` returns."""
        if isinstance(cache, str):
            return PlanRow(recipe.name, problem=cache)
        row = PlanRow(
            recipe.name,
            kv_bytes=cache.nbytes(self.context, self.batch),
            peak_bytes=self.peak(cache, self.context, self.batch),
        )
        if self.memory is not None:
            row = self.with_limits(row, cache)
        if self.hardware is not None:
            row = self.with_times(row, cache, self.hardware)
        return replace(row, curve=tuple(self.curve(cache, timed=row.step_ms is not None)))

    def with_limits(self, row: PlanRow, cache: CacheBytes) -> PlanRow:
        """Return the row with what fits into memory."""
        return replace(
            row,
            fits=self.fits(cache, self.context, self.batch),
            longest_context=self.longest(cache, lambda n: self.fits(cache, n, self.batch)),
            largest_batch=largest_fitting(lambda b: self.fits(cache, self.context, b)),
            fits_in_chunks=self.fits_in_chunks(cache, self.context),
            longest_in_chunks=self.longest(cache, lambda n: self.fits_in_chunks(cache, n)),
        )

    def longest(self, cache: CacheBytes, fits: Callable[[int], bool]) -> int:
        """Return the longest context that fits.

        Up to `compress_after` tokens, a cache may be larger than beyond.
        """
        limit, beyond = cache.compress_after, cache.packing_period
        found = largest_fitting(lambda n: n <= limit or fits(n), beyond=beyond)
        return found if fits(found) else largest_fitting(fits, beyond=beyond)

    def with_times(self, row: PlanRow, cache: CacheBytes, hardware: Hardware | Machine) -> PlanRow:
        """Return the row with the times of a step, or with the reason why they are missing."""
        work = step_work(self.facts, cache, self.context, self.batch)
        no_times = hardware.problem(work)
        if no_times is not None:
            return replace(row, no_times=no_times)
        time = hardware.step(work)
        row = replace(
            row,
            step_ms=time.total.scaled(1e3),
            tokens_s=time.total.over(self.batch),
            parts_ms={
                name: 1e3 * getattr(time, name).best
                for name in ("weights", "kv", "arithmetic", "overhead")
            },
            limit=time.limit,
        )
        if self.target is None:
            return row
        return replace(
            row,
            longest_at_target=self.longest(cache, lambda n: self.on_target(cache, n)),
            reaches=self.on_target(cache, self.context),
        )

    def curve(self, cache: CacheBytes, timed: bool) -> Iterator[Point]:
        """Yield points up to the planned context, and at least up to 32,768 tokens."""
        tokens = 1024
        while tokens < 2 * max(self.context, CONTEXT):
            try:
                nbytes = cache.nbytes(tokens, self.batch)
                rates = self.rates(cache, tokens) if timed else None
            except RecipeError:  # a budget that is too small for a layer at this context
                return
            yield Point(tokens, nbytes, rates)
            tokens *= 2

    def rates(self, cache: CacheBytes, tokens: int) -> Range:
        """Return tokens per second of all rows together."""
        assert self.hardware is not None
        work = step_work(self.facts, cache, tokens, self.batch)
        return self.hardware.step(work).total.over(self.batch)

    def peak(self, cache: CacheBytes, tokens: int, batch: int) -> int | None:
        """Return the largest bytes during the prompt; None if activations are not known."""
        activations = self.facts.activations
        if activations is None:
            return None
        prefill, scoring = (f(tokens, batch) for f in (cache.prefill_nbytes, cache.scoring_nbytes))
        widest = max(activations.nbytes(tokens, batch), scoring)
        return self.facts.weights.nbytes + prefill + widest

    def fits(self, cache: CacheBytes, tokens: int, batch: int) -> bool:
        """Return whether memory suffices for a prompt in one step."""
        assert self.memory is not None
        try:
            peak = self.peak(cache, tokens, batch)
            if peak is None:
                peak = self.facts.weights.nbytes + cache.nbytes(tokens, batch)
        except RecipeError:  # the budget is too small for this context
            return False
        return peak <= self.memory

    def fits_in_chunks(self, cache: CacheBytes, tokens: int) -> bool:
        """Return whether memory suffices for a prompt that is read in small chunks."""
        assert self.memory is not None
        try:
            nbytes = cache.chunked_nbytes(tokens, self.batch)
        except RecipeError:
            return False
        found = self.facts.activations
        activations = 0 if found is None else found.nbytes(min(tokens, CHUNK), self.batch)
        return self.facts.weights.nbytes + nbytes + activations <= self.memory

    def on_target(self, cache: CacheBytes, tokens: int) -> bool:
        """Return whether a context decodes at the target speed, in memory that holds it."""
        assert self.target is not None
        if self.memory is not None and not self.fits_in_chunks(cache, tokens):
            return False
        try:
            return self.rates(cache, tokens).best >= self.target
        except RecipeError:
            return False


def plan_warnings(
    planner: RecipePlanner, recipes: Sequence[Recipe], rows: Sequence[PlanRow]
) -> list[str]:
    """Return what a reader of the rows of these recipes has to know."""
    facts, warnings = planner.facts, []
    if facts.positions is not None and planner.context > facts.positions:
        warnings.append(
            f"The context of {planner.context:,} tokens exceeds the {facts.positions:,} positions "
            f"of {facts.name}; it was not trained for more."
        )
    beyond = [
        row.recipe for row in rows
        if facts.positions and (row.longest_in_chunks or 0) > facts.positions
    ]  # fmt: skip
    if beyond and planner.context <= (facts.positions or 0):
        warnings.append(
            f"Memory suffices for longer contexts than the {facts.positions:,} positions of "
            f"{facts.name}; it was not trained for them."
        )
    if not facts.dtype_stated:
        warnings.append(f"The config of {facts.name} states no dtype; float32 is counted.")
    if facts.weights.quantized == "mxfp4":
        warnings.append(
            "transformers expands mxfp4 weights to bfloat16 where it has no kernels for them, as "
            "on a CPU by default: 16 bits a number instead of 4.25."
        )
    if facts.activations is None:
        warnings.append(
            f"The activations of a prompt cannot be traced for {facts.architecture}: limits count "
            "weights and cache alone."
        )
    if facts.image_token:
        warnings.append(
            f"Some layers of {facts.architecture} attend to images alone. They store "
            f"{facts.image_token / 1024:,.2f} KiB for each token of an image, and are not counted."
        )
    for reason in dict.fromkeys(row.no_times for row in rows if row.no_times):
        names = ", ".join(row.recipe for row in rows if row.no_times == reason)
        warnings.append(f"No times for {names}: {reason}.")
    if planner.target is not None:
        warnings += _target_warnings(planner, rows)
    if tiers := [x.name for x in recipes if x.recall is not None and x.recall.tier is not None]:
        warnings.append(f"Tokens in a tier count as in memory: {', '.join(tiers)}.")
    return warnings


def _target_warnings(planner: RecipePlanner, rows: Sequence[PlanRow]) -> list[str]:
    timed = [row for row in rows if row.tokens_s]
    if not timed or any(row.reaches for row in timed):
        return []
    fitting = [row for row in timed if row.fits_in_chunks is not False] or timed
    nearest = max(fitting, key=lambda row: row.tokens_s.best if row.tokens_s else 0.0)
    assert nearest.tokens_s is not None
    rate = show_rate(nearest.tokens_s.best)
    return [
        f"No recipe reaches {planner.target:g} tok/s at {planner.context:,} tokens and batch "
        f"{planner.batch}; the nearest is {nearest.recipe} with {rate}."
    ]


THIS = "this"
PLAN_RECIPES = (
    "full", *RECOMMENDED, "kivi", "skvq", "turbo", "minikv", "h2o", "snapkv", "streaming",
    "clusterkv", "quest",
)  # fmt: skip


def plan(
    model: str | Path | PreTrainedConfig,
    recipes: Sequence[Recipe | str | Path] = PLAN_RECIPES,
    *,
    context: int | None = None,
    batch: int = 1,
    memory: int | None = None,
    hardware: str | Path | Hardware | None = None,
    target: float | None = None,
    on_step: Callable[[int], Progress] | None = None,
) -> Plan:
    """Return bytes, limits and decode times of recipes on a model, without running it.

    Args:
        model: A folder, a config file, a hub id, "reference", "smollm2", or a config; see
            `planner.model.read_model`.
        recipes: Recipes, their names or their files. One that does not fit the model has a row with
            the problem.
        context: Tokens (default: 32,768, or the model's positions if they are fewer).
        batch: Rows.
        memory: Bytes (default: the hardware's).
        hardware: A name in `planner.hardware.PRESETS` such as "h100", "this" (measures this
            machine, and stores the result), a TOML file, or a `Hardware`.
        target: Tokens per second of the whole batch.
        on_step: Called with the number of units to measure; returns the function to report them to.

    Raises:
        InputError: The weights need more memory, or a setting is out of range.
        UnsupportedModel: The model cannot be counted.
        RecipeError: There is no such recipe.
    """
    _check_settings(context, batch, memory, hardware, target)
    chosen = [resolve(recipe) for recipe in recipes]
    device: Hardware | Machine | None = None
    if hardware is not None and hardware != THIS:
        device = _hardware(hardware)
    facts = read_model(model)
    context = context or min(CONTEXT, facts.positions or CONTEXT)
    caches = [fitting_cache(recipe, facts, context) for recipe in chosen]
    if hardware == THIS:
        _check_memory(facts, memory or measure.total_memory())
        works = [step_work(facts, x, context, batch) for x in caches if isinstance(x, CacheBytes)]
        before = load_machine() or UNMEASURED
        device = machine = measure.complete(before, works, facts.geometry, on_step)
        if machine is not before:
            save_machine(machine)
    memory = memory or (None if device is None else device.memory)
    if memory is not None:
        _check_memory(facts, memory)
    planner = RecipePlanner(facts, context, batch, memory, device, target)
    rows = tuple(planner.row(*pair) for pair in zip(chosen, caches, strict=True))
    warnings = tuple(plan_warnings(planner, chosen, rows))
    return Plan(facts, context, batch, memory, device, target, rows, warnings)


def _check_settings(
    context: int | None, batch: int, memory: int | None, hardware: object, target: float | None
) -> None:
    for name, value in (("context", context), ("batch", batch), ("memory", memory)):
        if value is not None and (type(value) is not int or value < 1):
            unit = " of bytes" if name == "memory" else ""
            raise InputError(f"{name}={value!r} must be a whole number{unit}, 1 or more")
    if target is not None and not target > 0:
        raise InputError(f"target={target!r} must be a number of tokens per second above 0")
    if target is not None and hardware is None:
        raise InputError(
            f"a target speed needs hardware: give {', '.join(PRESETS)}, {THIS}, or a hardware file"
        )


def _hardware(hardware: str | Path | Hardware) -> Hardware:
    """Return a preset, or the hardware of a file."""
    if isinstance(hardware, Hardware):
        return hardware
    if str(hardware) in PRESETS:
        return PRESETS[str(hardware)]
    if Path(hardware).is_file():
        return read_hardware(Path(hardware))
    raise InputError(
        f"hardware {str(hardware)!r} is unknown; use {', '.join(PRESETS)}, {THIS}, or the path of "
        "a hardware file"
    )


def _check_memory(facts: ModelFacts, memory: int) -> None:
    if memory < facts.weights.nbytes:
        raise InputError(
            f"the weights of {facts.name} take {show_bytes(facts.weights.nbytes)}, and there are "
            f"{show_bytes(memory)} of memory; give more memory, or a model with fewer or quantized "
            "weights"
        )
