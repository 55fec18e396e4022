"""Output tokens per second of as many requests as fit into a number of bytes.

`jobs` predicts by the planner how many requests each cache holds, `make_rows` makes a table of what
`serving` measured in several rounds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from statistics import median
from typing import Any

import numpy as np
import torch

from kvloom.errors import IncompatibleRecipe, InputError
from kvloom.progress import Progress
from kvloom.recipe import Protect, Recipe, resolve

from ..models import check_positions
from ..planner.model import ModelFacts, read_model
from ..planner.plan_recipes import fitting_cache
from ..planner.step import CacheBytes
from ..planner.units import Range, show_bytes
from ..workload.text import cut_rows, leading_ids, library_text, tokenize
from . import serving, transformers_caches
from .serving import DYNAMIC, PAGE, Job, RunFigures, as_paged
from .timing import problem

BASELINES = (*transformers_caches.NAMES, "kvpress", "continuous")
"""What recipes are compared with, by the names that `--baselines` takes."""
EQUAL_KL = 0.02
"""Nats from exact attention up to which a row counts as equal in quality."""


@dataclass
class ThroughputRow:
    """One cache with one size of requests.

    Attributes:
        name: Of the cache.
        prompt: Tokens of a request's prompt.
        new: Tokens that it generates.
        batch: Requests.
        predicted_bytes: Of the cache of one request, by the planner.
        kv_bytes: As measured at the end.
        peak_bytes: The most memory of the process, above that of the model.
        first_token_s: Seconds until a request's first token, median of requests and rounds.
        tokens_s: Output tokens per second in steps that only decode: least, median and most.
        processor_tokens_s: The same per second of processor time.
        whole_tokens_s: Output tokens per second, with the prompts.
        whole_processor_tokens_s: The same per second of processor time.
        times_dynamic: `processor_tokens_s` over that of DynamicCache.
        preemptions: Of continuous batching: requests that lost their blocks, of all rounds.
        kl: Mean KL divergence from exact attention, in nats.
        rounds: Measured.
        problem: Why there are no figures.
    """

    name: str
    prompt: int
    new: int
    batch: int | None = None
    predicted_bytes: int | None = None
    kv_bytes: int | None = None
    peak_bytes: int | None = None
    first_token_s: float | None = None
    tokens_s: Range | None = None
    processor_tokens_s: Range | None = None
    whole_tokens_s: Range | None = None
    whole_processor_tokens_s: Range | None = None
    times_dynamic: float | None = None
    preemptions: int | None = None
    kl: float | None = None
    rounds: int = 0
    problem: str | None = None


@dataclass(frozen=True)
class Requests:
    """Requests of one size on one model, within a bound of bytes.

    config: of the model. text: ids of a text, int64 [N]. first: ids that each prompt starts with.
    """

    config: Any
    facts: ModelFacts
    memory: int
    prompt: int
    new: int
    text: np.ndarray
    first: list[int]

    @property
    def part(self) -> int:
        """Requests whose prompts' activations fit into the bound."""
        found = self.facts.activations
        return max(1, self.memory // (found.nbytes(self.prompt, 1) if found else self.prompt))

    def job(
        self, name: str, cache: Recipe | str, nbytes: int | str, batch: int = 0, **more: Any
    ) -> Job | ThroughputRow:
        """Return a job; for a cache that cannot run, a row with the reason.

        nbytes: of one request, or why it is not known. batch: requests; 0: as many as fit.
        """
        if isinstance(nbytes, str):
            return ThroughputRow(name, self.prompt, self.new, problem=nbytes)
        batch = batch or self.memory // nbytes
        if not batch:
            return ThroughputRow(
                name, self.prompt, self.new, 0, nbytes, problem=f"one needs {show_bytes(nbytes)}"
            )
        ids = cut_rows(self.text, self.first, batch, self.prompt + self.new, 0)
        return Job(name, cache, self.memory, self.prompt, self.new, nbytes, self.part, ids, **more)

    def recipe_nbytes(self, recipe: Recipe) -> int | str:
        """Return the most bytes of one request, or why the recipe does not fit."""
        cache = fitting_cache(recipe, self.facts, self.prompt)
        if isinstance(cache, str):
            return cache
        lengths = range(self.prompt, self.prompt + self.new + 1)
        if recipe.keep is None or recipe.keep.when != "prompt":
            return max(cache.nbytes(tokens, 1) for tokens in lengths)
        # later tokens all stay
        protect = Protect(recipe.protect.sinks, recipe.protect.exact_recent)
        later = CacheBytes(replace(recipe, keep=None, protect=protect), self.facts)
        grown = max(later.nbytes(tokens, 1) for tokens in lengths) - later.nbytes(self.prompt, 1)
        return cache.nbytes(self.prompt, 1) + grown

    def exact_nbytes(self, tokens: int) -> int:
        """Return the bytes of one exact request."""
        return CacheBytes(resolve("full"), self.facts).nbytes(tokens, 1)

    def quantized_nbytes(self, name: str) -> int | str:
        """Return the bytes of one request in a quantized cache of transformers."""
        tokens = self.prompt + self.new
        g = self.facts.geometry
        k, v = torch.randn(2, 1, g.kv_heads, tokens, g.head_dim).to(g.dtype)
        try:
            cache = transformers_caches.filled(name, self.config, k, v)
        except (ImportError, ValueError) as error:
            return transformers_caches.missing(name, error)
        except Exception as error:
            return problem(error)
        waiting = getattr(cache.layers[0], "residual_length", 0)  # exact tokens
        return transformers_caches.nbytes(cache) + self.exact_nbytes(min(waiting, self.new))


def requests_of(
    config: Any, tokenizer: Any, dtype: str, memory: int, sizes: Sequence[tuple[int, int]]
) -> list[Requests]:
    """Return requests of each size, (prompt, new), with a text of CPython's library.

    config, tokenizer, dtype: of the model. Raises `InputError` for more tokens than it has
    positions.
    """
    for prompt, new in sizes:
        check_positions(config, prompt, new)
    if dtype != "auto":
        config.dtype = getattr(torch, dtype)
    facts, text = read_model(config), tokenize(tokenizer, library_text())
    first = leading_ids(tokenizer)
    return [Requests(config, facts, memory, *size, text, first) for size in sizes]


def jobs(
    requests: Requests, recipes: Sequence[Recipe], baselines: Sequence[str]
) -> list[Job | ThroughputRow]:
    """Return the job of each cache; for one that cannot run, a row with the reason.

    baselines: some of `BASELINES`. Raises `InputError` if no request fits into any cache.
    """
    r = requests
    tokens = r.prompt + r.new
    found: list[Job | ThroughputRow] = []
    for baseline, name in transformers_caches.NAMES.items():
        if baseline in baselines:
            exact = name == DYNAMIC
            nbytes = r.exact_nbytes(tokens) if exact else r.quantized_nbytes(name)
            found.append(r.job(name, name, nbytes))
    if "kvpress" in baselines:
        has_kvpress = find_spec("kvpress") is not None
        kept = r.exact_nbytes(tokens - r.prompt // 2)
        found.append(r.job("kvpress snapkv, half", DYNAMIC,
                           kept if has_kvpress else "not installed: pip install kvpress",
                           press=True))  # fmt: skip
    found += [r.job(recipe.name, recipe, r.recipe_nbytes(recipe)) for recipe in recipes]
    sizes = [row.predicted_bytes for row in found if isinstance(row, ThroughputRow)]
    if not any(isinstance(row, Job) for row in found) and any(sizes):
        least = min(size for size in sizes if size)
        raise InputError(
            f"{show_bytes(r.memory)} hold not even one request of {r.prompt:,} and {r.new:,} new "
            f"tokens; give --memory {-(-least >> 20) or 1}MiB or more"
        )
    return found + (list(_continuous_jobs(r, recipes)) if "continuous" in baselines else [])


def _continuous_jobs(r: Requests, recipes: Sequence[Recipe]) -> Iterator[Job | ThroughputRow]:
    """Yield the jobs of continuous batching: of recipes that pages hold, in blocks of equal bytes.

    transformers' own pages get as many requests as those of the first recipe, which they hold in
    turns.
    """
    blocks = r.memory // r.exact_nbytes(PAGE)
    exact = r.exact_nbytes(-(-(r.prompt + r.new) // PAGE) * PAGE)
    packed = []
    for recipe in recipes:
        try:
            pages = as_paged(recipe)
        except (IncompatibleRecipe, ValueError):  # other recipes are named by kvloom.continuous
            continue
        packed.append(r.job(f"continuous {recipe.name}", recipe, r.recipe_nbytes(pages),
                            blocks=blocks))  # fmt: skip
    most = max((job.batch for job in packed if isinstance(job, Job)), default=0)
    fits = blocks * PAGE >= r.prompt + r.new
    yield r.job("continuous", DYNAMIC, exact, batch=most if fits else 0, blocks=blocks)
    yield from packed


Measured = tuple[Job, RunFigures | str]
"""A run of a job, or why it failed."""


def measure(
    jobs: Sequence[Job], settings: tuple[str, str, int], rounds: int, on_step: Progress
) -> Iterator[Measured]:
    """Yield the runs of all jobs in turns. A job that failed does not run again.

    settings: model, dtype and threads. on_step: called with the current job; a trial, which comes
    before the first run, and a run are a unit each.
    """
    ready: dict[str, tuple[Job, float]] = {}
    for i in range(rounds):
        for job in jobs:
            name = str(job)
            on_step(name, 0)
            if i == 0:
                tried = _tried(job, settings)
                if isinstance(tried, str):
                    yield job, tried
                else:
                    ready[name] = tried
                on_step(name, 1)
            if name in ready:
                job, kl = ready[name]
                run = serving.in_process(serving.figures, job, *settings)
                if isinstance(run, RunFigures):
                    run.kl = kl
                else:
                    del ready[name]
                yield job, run
            on_step("", 1)


def _tried(job: Job, settings: tuple[str, str, int]) -> tuple[Job, float] | str:
    """Return the job with the requests that fit, and its divergence; or why it failed."""
    trial = serving.in_process(serving.trial, job, *settings)
    if isinstance(trial, str):
        return trial
    fits = job.batch if job.blocks else max(1, job.memory // trial.nbytes)
    return replace(job, ids=job.ids[:fits]), trial.kl


def make_rows(
    jobs_and_rows: Sequence[Job | ThroughputRow], measured: Iterable[Measured]
) -> list[ThroughputRow]:
    """Return a row for each job that was measured or cannot be."""
    runs: dict[str, list[RunFigures | str]] = {}
    for job, run in measured:
        runs.setdefault(str(job), []).append(run)
    rows = []
    for entry in jobs_and_rows:
        if isinstance(entry, ThroughputRow):
            rows.append(entry)
        elif str(entry) in runs:
            rows.append(_row(entry, runs[str(entry)]))
    exact = {
        (row.prompt, row.new): row.processor_tokens_s.best
        for row in rows
        if row.name == DYNAMIC and row.processor_tokens_s
    }
    for row in rows:
        base = exact.get((row.prompt, row.new))
        if base and row.processor_tokens_s:
            row.times_dynamic = row.processor_tokens_s.best / base
    return rows


def _row(job: Job, runs: Sequence[RunFigures | str]) -> ThroughputRow:
    row = ThroughputRow(job.name, job.prompt, job.new, job.batch, job.predicted_bytes)
    row.problem = next((run for run in runs if isinstance(run, str)), None)
    done = [run for run in runs if isinstance(run, RunFigures)]
    if not done or row.problem:
        return row
    row.rounds, row.batch = len(done), done[-1].batch
    row.kv_bytes = max(run.kv_bytes for run in done)
    peaks = [run.peak_bytes for run in done if run.peak_bytes is not None]
    row.peak_bytes = max(peaks, default=None)
    row.first_token_s = median(run.first_s for run in done)
    row.tokens_s, row.processor_tokens_s = (
        _spread([run.decoded / run.decode_s[i] for run in done if run.decode_s[i] > 0])
        for i in (0, 1)
    )
    row.whole_tokens_s, row.whole_processor_tokens_s = (
        _spread([run.batch * job.new / (run.prompt_s[i] + run.decode_s[i]) for run in done])
        for i in (0, 1)
    )
    if job.blocks:
        row.preemptions = sum(run.preemptions or 0 for run in done)
    row.kl = next((run.kl for run in done if run.kl is not None), None)
    return row


def _spread(rates: Sequence[float]) -> Range | None:
    return Range(min(rates), median(rates), max(rates)) if rates else None
