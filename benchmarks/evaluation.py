"""Recipes on tasks, by the code of `kvloom eval`: for evidence.py and tune.py."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvloom.hf import geometry
from kvloom.progress import Progress
from kvloom.recipe import Recipe, resolve
from kvloom_lab.eval.evaluate import evaluate
from kvloom_lab.eval.results import ResultFolder
from kvloom_lab.eval.sample import Batch, Sample, Source, Task
from kvloom_lab.eval.summary import Figures, summarize
from kvloom_lab.eval.tasks import task_named
from kvloom_lab.workload.machine import machine, model_facts

HERE = Path(__file__).parent


def recipe_of(spec: str) -> Recipe:
    """Return a recipe by its name, or by its file in recipes/; it is named as spelled."""
    recipe = resolve(HERE / "recipes" / spec if spec.endswith(".toml") else spec)
    return replace(recipe, name=spec.removesuffix(".toml"))


def source_of(tokenizer: Any, text: str, context: int, seed: int = 0, **size: Any) -> Source:
    """Return a source of contexts of one length. size: its samples, new_tokens and ask."""
    return Source.of(tokenizer, text, lengths=[context], batch=4, seed=seed, **size)


def mixed_batches(task: Task[Any], sources: Mapping[str, Source]) -> list[Batch]:
    """Return the samples of a task from texts of several kinds, named by kind.

    Kinds and variants alternate, so that the first part of the list is balanced. The kind "" is not
    named.
    """
    groups: dict[tuple[str, Any], list[Batch]] = {}
    for kind, source in sources.items():
        for batch in task.batches(source):
            named = replace(batch, samples=[_of_kind(kind, x) for x in batch.samples])
            groups.setdefault((kind, batch.samples[0].fields.get("variant")), []).append(named)
    placed = [((i + 0.5) / len(x), batch) for x in groups.values() for i, batch in enumerate(x)]
    return [batch for _, batch in sorted(placed, key=lambda pair: pair[0])]


def _of_kind(kind: str, sample: Sample) -> Sample:
    if not kind:
        return sample
    return replace(sample, name=f"{kind}/{sample.name}", fields={**sample.fields, "kind": kind})


class Evaluation:
    """A model, and the folder of its samples."""

    def __init__(
        self, model: Any, tokenizer: Any, name: str, folder: Path, settings: dict[str, Any]
    ) -> None:
        self.model, self.tokenizer, self.geometry = model, tokenizer, geometry(model)
        facts = model_facts(model, name, self.geometry)
        run = {"environment": machine(model), "model": facts, "settings": settings}
        self.folder = ResultFolder.open(folder, run)

    def measure(
        self,
        spec: str,
        recipes: list[Recipe],
        text: str,
        context: int,
        progress: Progress | None = None,
        **size: Any,
    ) -> None:
        """Measure recipes and `full` on a task. size: the source's samples and new_tokens."""
        source, task = source_of(self.tokenizer, text, context, **size), task_named(spec)
        self.measure_batches(task, task.batches(source), source, recipes, progress)

    def measure_batches(
        self,
        task: Task[Any],
        batches: list[Batch],
        source: Source,
        recipes: list[Recipe],
        progress: Progress | None = None,
    ) -> None:
        """Measure recipes and `full` on samples. source: of one of them."""
        evaluate(self.model, source, recipes, [(task, batches)], self.folder, progress)

    def figures(self, *specs: str) -> list[Figures]:
        """Return the figures of all finished samples of some tasks."""
        return summarize(self.lines(specs))

    def lines(self, specs: Iterable[str]) -> list[dict[str, Any]]:
        """Return the lines of all finished samples of some tasks."""
        names = dict.fromkeys(task_named(spec).name for spec in specs)
        return [line for name in names for line in self.folder.lines(name)]
