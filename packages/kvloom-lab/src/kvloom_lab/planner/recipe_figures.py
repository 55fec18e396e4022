"""The figures of one recipe in a plan: its bytes, the limits of memory, and the times of a step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from kvloom.errors import IncompatibleRecipe, RecipeError
from kvloom.recipe import Recipe

from .cache_bytes import CacheBytes
from .decode_step import step_work
from .hardware import Hardware
from .largest import largest
from .machine import Machine
from .model import ModelFacts
from .ranges import Range
from .result import Point, Row

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

    def row(self, recipe: Recipe, cache: CacheBytes | str) -> Row:
        """Return the figures of a recipe; cache: what `fitting_cache` returns."""
        if isinstance(cache, str):
            return Row(recipe.name, problem=cache)
        row = Row(
            recipe.name,
            kv_bytes=cache.nbytes(self.context, self.batch),
            peak_bytes=self.peak(cache, self.context, self.batch),
        )
        if self.memory is not None:
            row = self.with_limits(row, cache)
        if self.hardware is not None:
            row = self.with_times(row, cache, self.hardware)
        return replace(row, curve=tuple(self.curve(cache, timed=row.step_ms is not None)))

    def with_limits(self, row: Row, cache: CacheBytes) -> Row:
        """Return the row with what fits into memory."""
        return replace(
            row,
            fits=self.fits(cache, self.context, self.batch),
            longest_context=largest(
                lambda n: self.fits(cache, n, self.batch), beyond=cache.sawtooth
            ),
            largest_batch=largest(lambda b: self.fits(cache, self.context, b)),
            fits_in_chunks=self.fits_in_chunks(cache, self.context),
            longest_in_chunks=largest(
                lambda n: self.fits_in_chunks(cache, n), beyond=cache.sawtooth
            ),
        )

    def with_times(self, row: Row, cache: CacheBytes, hardware: Hardware | Machine) -> Row:
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
            longest_at_target=largest(lambda n: self.on_target(cache, n), beyond=cache.sawtooth),
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
        working = self.facts.working
        if working is None:
            return None
        prefill = cache.prefill_nbytes(tokens, batch)
        return self.facts.weights.nbytes + prefill + batch * tokens * working

    def fits(self, cache: CacheBytes, tokens: int, batch: int) -> bool:
        """Return whether memory suffices for a prompt in one step."""
        assert self.memory is not None
        try:
            peak = self.peak(cache, tokens, batch)
            if peak is None:
                peak = self.facts.weights.nbytes + cache.nbytes(tokens, batch)
        except RecipeError:  # a budget that this context leaves nothing of
            return False
        return peak <= self.memory

    def fits_in_chunks(self, cache: CacheBytes, tokens: int) -> bool:
        """Return whether memory holds weights and cache: a prompt that is read in small chunks."""
        assert self.memory is not None
        try:
            nbytes = cache.nbytes(tokens, self.batch)
        except RecipeError:
            return False
        return self.facts.weights.nbytes + nbytes <= self.memory

    def on_target(self, cache: CacheBytes, tokens: int) -> bool:
        """Return whether a context decodes at the target speed, in memory that holds it."""
        assert self.target is not None
        if self.memory is not None and not self.fits_in_chunks(cache, tokens):
            return False
        try:
            return self.rates(cache, tokens).best >= self.target
        except RecipeError:
            return False
