"""Tuned recipes against uniform ones at the same bytes: the divergence and needles.

For each bound in `BOUNDS`, the best uniform recipe is the one with the least mean KL divergence
among those whose cache takes at most so many bytes after the context; recipes that evict get the
budget that fills the bound. The tuned recipe has at most the bytes of that best one. Recipes are
tuned on CPython's library without the documents that are measured; scores are in kvloom's cache
folder, samples in --out. An interrupted run can be resumed.

    python benchmarks/tune.py reference
    python benchmarks/tune.py smollm2          # an hour on two cores
    python benchmarks/tune.py smollm2 --tasks perplexity
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict, replace
from pathlib import Path

import record
from kvloom.eval.environment import model_facts
from kvloom.eval.evaluate import evaluate
from kvloom.eval.result_files import ResultFolder
from kvloom.eval.sample import Source
from kvloom.eval.share import at_share
from kvloom.eval.summary import Figures, summarize
from kvloom.eval.tasks import task_named
from kvloom.hf import compat
from kvloom.recipe.resolve import resolve
from kvloom.recipe.spec import Recipe
from kvloom.reference.corpus import calibration_text
from kvloom.report.machine import machine
from kvloom.tuner import tune
from kvloom.workload.models import load
from kvloom.workload.text import library_text

HERE = Path(__file__).parent
BOUNDS = 1 / 12, 1 / 8, 1 / 6, 1 / 4, 1 / 3
CONTEXT = 2048
UNIFORM = (
    *("kivi-4", "kivi:bits=3", "kivi", "kivi:bits=8", "kivi-4-sinks4.toml"),
    *("kivi-k4v2-sinks4.toml", "turbo:bits=2,sinks=4", "turbo:sinks=4", "turbo:bits=4,sinks=4"),
)
EVICTING = "snapkv+kivi-4.toml", "snapkv+turbo-4.toml"
TASKS = {
    "perplexity": {"samples": 4, "new_tokens": 128},
    "niah:multikey": {"samples": 4, "new_tokens": 1},
}


def uniform(geometry: object) -> list[Recipe]:
    """Return the uniform recipes; those that evict once for each bound."""
    found = [_recipe(spec) for spec in UNIFORM]
    for bound in BOUNDS:
        found += [at_share(_recipe(spec), bound, CONTEXT, geometry) for spec in EVICTING]
    return found


def _recipe(spec: str) -> Recipe:
    recipe = resolve(HERE / "recipes" / spec if spec.endswith(".toml") else spec)
    return replace(recipe, name=spec.removesuffix(".toml"))


class Lab:
    """A model, the tasks, and the folder of the samples."""

    def __init__(self, name: str, tasks: list[str], out: Path) -> None:
        self.model, self.tokenizer = load(name)
        self.geometry = compat.geometry(self.model)
        facts = model_facts(self.model, name, self.geometry)
        run = {"environment": machine(self.model), "model": facts, "settings": {"tasks": tasks}}
        self.folder, self.tasks = ResultFolder.open(out / name, run), tasks
        self.exact = Recipe().nbytes(CONTEXT, self.geometry)

    def measure(self, recipes: list[Recipe]) -> dict[str, dict[str, Figures]]:
        """Return the figures of recipes and of `full`, by task and name."""
        recipes = [resolve("full"), *recipes]
        found = {}
        for spec in self.tasks:
            source = Source.of(
                self.tokenizer, library_text(), lengths=[CONTEXT], batch=4, seed=0, **TASKS[spec]
            )
            task = task_named(spec)
            plan = [(task, task.batches(source))]
            evaluate(self.model, source, recipes, plan, self.folder, lambda *_: None)
            found[spec] = {x.recipe: x for x in summarize(self.folder.lines(task.name))}
        return found

    def tuned(self, nbytes: int) -> Recipe:
        """Return the recipe that is tuned for at most so many bytes."""
        share = nbytes / self.exact
        found = tune(
            self.model, self.tokenizer, calibration_text(), bytes=share, context=CONTEXT,
            progress=lambda what, *_: print(what, file=sys.stderr, flush=True),
        )  # fmt: skip
        return replace(found.recipe, name=f"tuned at {share:.4f}")


def main() -> None:
    """Measure one model, print the rows and write them."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", help="reference or smollm2, or a folder")
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=list(TASKS))
    parser.add_argument("--out", type=Path, default=Path("results-tune"))
    given = parser.parse_args()
    if "perplexity" not in given.tasks:
        parser.error("the best uniform recipe is chosen by the task perplexity; add it")
    lab = Lab(given.model, given.tasks, given.out)
    recipes = uniform(lab.geometry)
    before = lab.measure(recipes)["perplexity"]

    def kl(figures: Figures) -> float:
        return figures.scores["kl_mean"].mean

    best = {}
    for bound in BOUNDS:
        fits = [r for r in recipes if r.nbytes(CONTEXT, lab.geometry) <= bound * lab.exact]
        best[bound] = min(fits, key=lambda r: kl(before[r.name]))
    tuned = {b: lab.tuned(r.nbytes(CONTEXT, lab.geometry)) for b, r in best.items()}
    figures = lab.measure(list({r.name: r for r in tuned.values()}.values()))
    rows = []
    for bound, recipe in tuned.items():
        both = {"uniform": best[bound], "tuned": recipe}
        row: dict = {"bound": bound}
        for kind, one in both.items():
            nbytes = one.nbytes(CONTEXT, lab.geometry)
            row[kind] = {"recipe": one.name, "share": nbytes / lab.exact}
            for task in given.tasks:
                scores = figures[task][one.name].scores
                row[kind] |= {name: asdict(score) for name, score in scores.items()}
        row["ratio"] = kl(figures["perplexity"][recipe.name]) / kl(before[best[bound].name])
        row["recipe"] = recipe.to_dict()
        rows.append(row)
        print(f"{bound:.4f} {row['ratio']:.3f}", *(row[kind]["recipe"] for kind in both))
    name = f"tune_{Path(given.model).name}"
    record.write(name, {"environment": record.environment(context=CONTEXT), "rows": rows})


if __name__ == "__main__":
    main()
