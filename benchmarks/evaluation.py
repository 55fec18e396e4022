"""Recipes on tasks, by the code of `kvloom eval`: for evidence.py and tune.py."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from kvloom.hf import geometry
from kvloom.progress import Progress
from kvloom.recipe import Recipe, resolve
from kvloom_lab.eval.evaluate import evaluate
from kvloom_lab.eval.results import ResultFolder
from kvloom_lab.eval.sample import Source
from kvloom_lab.eval.summary import Figures, summarize
from kvloom_lab.eval.tasks import task_named
from kvloom_lab.workload.machine import machine, model_facts

HERE = Path(__file__).parent


def recipe_of(spec: str) -> Recipe:
    """Return a recipe by its name, or by its file in recipes/; it is named as spelled."""
    recipe = resolve(HERE / "recipes" / spec if spec.endswith(".toml") else spec)
    return replace(recipe, name=spec.removesuffix(".toml"))


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
        **size: int,
    ) -> None:
        """Measure recipes and `full` on a task. size: the source's samples and new_tokens."""
        source = Source.of(self.tokenizer, text, lengths=[context], batch=4, seed=0, **size)
        task = task_named(spec)
        batches = [(task, task.batches(source))]
        evaluate(self.model, source, recipes, batches, self.folder, progress)

    def figures(self, *specs: str) -> list[Figures]:
        """Return the figures of all finished samples of some tasks."""
        names = [task_named(spec).name for spec in specs]
        return summarize(line for name in names for line in self.folder.lines(name))
