"""Run tasks for many recipes: one forward pass compresses a context for a group of them.

Finished samples are written at once; a run that is repeated measures what is missing. `full` is
measured first on every batch, because the others are compared with it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic

import torch
from transformers import PreTrainedModel

from kvloom.errors import InputError
from kvloom.hf import attachment_restored, supported_model
from kvloom.progress import Progress
from kvloom.recipe import Recipe

from ..report.errors import logged_line
from ..workload.crew import Work
from ..workload.prefill import Prefilled
from .decoding import decode_seconds
from .passes import measure_all, with_full
from .result_files import ResultFolder
from .sample import Batch, Exact, Run, Sample, Source, Task
from .task_batches import TaskBatches

TIMED_STEPS = 8  # with those that warm up


def evaluate(
    model: PreTrainedModel,
    source: Source,
    recipes: Sequence[Recipe],
    tasks: TaskBatches,
    folder: ResultFolder,
    progress: Progress | None = None,
) -> None:
    """Measure every recipe on every sample that the folder lacks.

    tasks: what to measure. recipes: each with another name. progress: called with the current work
    and the finished (sample, recipe) pairs since the last call, first with those that the folder
    has. The model is left as it was. A recipe that fails on a batch gets lines with the reason; the
    others continue. Raises `InputError` if the folder has another text for a sample.
    """
    supported_model(model)
    report = progress or (lambda what, units: None)
    written = _written(tasks, folder)
    done = {
        task.name: {(line["sample"], line["recipe"]) for line in folder.lines(task.name)}
        for task, _ in tasks
    }
    missing_units = sum(
        len(batch.samples) * len(_missing(recipes, batch, done[task.name]))
        for task, batches in tasks
        for batch in batches
    )
    report("", units(tasks, recipes) - missing_units)
    with attachment_restored(model):
        for task, batches in tasks:
            finished = done[task.name]
            for batch in batches:
                prompts = [
                    _prompt(task, s) for s in batch.samples if (task.name, s.name) not in written
                ]
                folder.append("prompts", prompts)
                missing = _missing(recipes, batch, finished)
                if not missing:
                    continue
                measurement = _BatchMeasurement(
                    model, source, task, batch, batch is batches[0], report
                )
                for recipe, lines in measurement.lines(missing):
                    if recipe in missing:
                        new = [x for x in lines if (x["sample"], recipe.name) not in finished]
                        folder.append(task.name, new)
                        report("", len(batch.samples))


def _missing(
    recipes: Sequence[Recipe], batch: Batch, finished: set[tuple[str, str]]
) -> list[Recipe]:
    """Return the recipes that lack a sample of the batch; finished: pairs of sample and recipe."""
    names = [sample.name for sample in batch.samples]
    return [r for r in recipes if any((name, r.name) not in finished for name in names)]


def units(tasks: TaskBatches, recipes: Sequence[Recipe]) -> int:
    """Return how many (sample, recipe) pairs `evaluate` measures or finds finished."""
    return len(recipes) * sum(len(b.samples) for _, batches in tasks for b in batches)


@dataclass
class _Measured(Generic[Exact]):
    """The fields of one recipe's lines, and what others are compared with."""

    fields: list[dict[str, Any]]
    compared: Exact


@dataclass
class _BatchMeasurement(Generic[Exact]):
    """The measurement of recipes on a batch of a task.

    timed: whether a decode step of each recipe is timed, alone.
    """

    model: PreTrainedModel
    source: Source
    task: Task[Exact]
    batch: Batch
    timed: bool
    report: Progress

    def lines(self, recipes: Sequence[Recipe]) -> Iterator[tuple[Recipe, list[dict[str, Any]]]]:
        """Yield the lines of `full`, then those of each other recipe."""
        for recipe, found in measure_all(
            self.model, with_full(recipes), [self.batch.ids], self._measure, self._on_pass
        ):
            if isinstance(found, Exception):
                problem = {"problem": logged_line(found, f"recipe {recipe.name!r}")}
                yield recipe, self._lines(recipe, [problem] * len(self.batch.samples))
            else:
                (measured,) = found  # of the one prompt
                yield recipe, self._lines(recipe, measured.fields)

    def _on_pass(self, number: int, recipes: Sequence[Recipe]) -> None:
        self.report(f"{self._where}: reading the context", 0)

    def _lines(self, recipe: Recipe, found: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the line of each sample; found: the fields that were measured."""
        return [
            {"task": self.task.name, "sample": s.name, "recipe": recipe.name, **fields}
            for s, fields in zip(self.batch.samples, found, strict=True)
        ]

    @property
    def _where(self) -> str:
        return f"{self.task.name} {self.batch.samples[0].name}"

    def _measure(
        self, number: int, prompt: Prefilled, full: _Measured[Exact] | None
    ) -> Work[_Measured[Exact]]:
        """Measure one recipe. Bytes and seconds are those of one context."""
        model, contexts, cache = self.model, len(self.batch.ids), prompt.cache
        assert cache is not None
        self.report(f"{self._where}: {prompt.recipe.name}", 0)
        seconds = {"prefill": prompt.seconds / contexts}
        if self.timed:
            new = torch.zeros(contexts, TIMED_STEPS, dtype=torch.long, device=model.device)
            seconds |= {"decode": decode_seconds(model, cache, new) / contexts, "steps": 1}
        exact = None if full is None else full.compared
        run = Run(model, self.source, cache, self.batch, exact)
        outcomes, compared = yield from self.task.measure(run)
        sizes = {
            "kv_bytes": cache.nbytes // contexts,
            "exact_bytes": cache.full_nbytes // contexts,
        }
        fields = [
            {
                "scores": {name: _finite(x) for name, x in outcome.scores.items()},
                **sizes,
                "answer": outcome.answer,
                "tokens": outcome.tokens,
                "curves": {k: [_finite(x, 5) for x in xs] for k, xs in outcome.curves.items()},
                "seconds": seconds,
            }
            for outcome in outcomes
        ]
        return _Measured(fields, compared)


def _written(tasks: TaskBatches, folder: ResultFolder) -> set[tuple[str, str]]:
    """Return the task and name of the samples in the folder; each must be the same as ours."""
    found = {(line["task"], line["sample"]): line for line in folder.lines("prompts")}
    for task, batches in tasks:
        for sample in (s for batch in batches for s in batch.samples):
            before = found.get((task.name, sample.name))
            if before is not None and before != json.loads(json.dumps(_prompt(task, sample))):
                raise InputError(
                    f"{str(folder.path)!r} has another text for the sample {sample.name} of "
                    f"{task.name}; give the same --text and --data, or another --out"
                )
    return set(found)


def _prompt(task: Task[Any], sample: Sample) -> dict[str, Any]:
    return {
        "task": task.name,
        "sample": sample.name,
        "context": sample.context,
        "question": sample.question,
        "reference": sample.reference,
        **sample.fields,
    }


def _finite(value: float, digits: int | None = None) -> float | None:
    if not math.isfinite(value):
        return None
    return value if digits is None else float(f"{value:.{digits}g}")
