"""Tuned recipes against uniform ones at the same bytes: the divergence and needles.

For each bound in `BOUNDS`, the best uniform recipe is the one with the least mean KL divergence
among those whose cache takes at most so many bytes after the context; recipes that evict get the
budget that fills the bound. The tuned recipe has at most the bytes of that best one. The models run
in bfloat16. Recipes are tuned on CPython's library without the documents that are measured; scores
are in kvloom's cache folder, samples in --out. An interrupted run can be resumed.

    python benchmarks/tune.py reference
    python benchmarks/tune.py smollm2            # half an hour on two cores
    python benchmarks/tune.py smollm2 --needles  # and as long again
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

import record
from evaluation import Evaluation, recipe_of
from kvloom.recipe import Recipe, resolve
from kvloom_lab.eval.evaluate import at_share
from kvloom_lab.eval.summary import Figures
from kvloom_lab.models import load
from kvloom_lab.tuner import tune
from kvloom_lab.workload.text import calibration_text, library_text

BOUNDS = 1 / 12, 1 / 8, 1 / 6, 1 / 4, 1 / 3
CONTEXT = 2048
DTYPE = "bfloat16"
UNIFORM = (
    *("near-lossless", "balanced", "kivi-4", "kivi:bits=3", "kivi-k4v2-sinks4.toml"),
    *("turbo:bits=2,sinks=4", "turbo:sinks=4", "turbo:bits=4,sinks=4", "kitty:sinks=4,rotate=true"),
)
EVICTING = "small", "snapkv+kivi-4.toml", "expected:store=kivi-4"
KL = "perplexity"
NEEDLES = "niah:single+multikey+passkey"
TASKS = {
    KL: {"samples": 4, "new_tokens": 128},
    NEEDLES: {"samples": 1, "new_tokens": 1},
}


def uniform(geometry: object) -> list[Recipe]:
    """Return the uniform recipes; those that evict once for each bound."""
    found = [recipe_of(spec) for spec in UNIFORM]
    for bound in BOUNDS:
        sized = [at_share(recipe_of(spec), bound, CONTEXT, geometry) for spec in EVICTING]
        found += [recipe for recipe in sized if recipe.keep.budget.tokens < CONTEXT]
    return found


class Lab:
    """A model, the tasks, and the folder of the samples."""

    def __init__(self, name: str, out: Path) -> None:
        model, tokenizer = load(name, DTYPE)
        self.evaluation = Evaluation(model, tokenizer, name, out / name, {"tasks": TASKS})
        self.geometry = self.evaluation.geometry
        self.exact = Recipe().nbytes(CONTEXT, self.geometry)
        self.seconds: list[float] = []

    def share(self, recipe: Recipe) -> float:
        """Return the share of the exact cache's bytes that a recipe has after the context."""
        return recipe.nbytes(CONTEXT, self.geometry) / self.exact

    def measure(self, spec: str, recipes: list[Recipe]) -> dict[str, Figures]:
        """Return the figures of recipes and of `full` in a task, by name."""
        every = [resolve("full"), *recipes]
        self.evaluation.measure(spec, every, library_text(), CONTEXT, **TASKS[spec])
        return {x.recipe: x for x in self.evaluation.figures(spec)}

    def tuned(self, nbytes: int) -> Recipe:
        """Return the recipe that is tuned for at most so many bytes."""
        share, begun = nbytes / self.exact, time.perf_counter()
        found = tune(
            self.evaluation.model, self.evaluation.tokenizer, calibration_text(), share=share,
            context=CONTEXT, progress=lambda what, *_: print(what, file=sys.stderr, flush=True),
        )  # fmt: skip
        self.seconds.append(time.perf_counter() - begun)
        return replace(found.recipe, name=f"tuned at {share:.4f}")


def main() -> None:
    """Measure one model, print the rows and write them."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", help="reference or smollm2, or a folder")
    parser.add_argument("--needles", action="store_true", help="count needles, too")
    parser.add_argument("--out", type=Path, default=Path("results-tune"))
    given = parser.parse_args()
    lab = Lab(given.model, given.out)
    recipes = uniform(lab.geometry)
    before = lab.measure(KL, recipes)
    best = {}
    for bound in BOUNDS:
        fits = [r for r in recipes if r.nbytes(CONTEXT, lab.geometry) <= bound * lab.exact]
        best[bound] = min(fits, key=lambda r: before[r.name].scores["kl_mean"].mean)
    tuned = {b: lab.tuned(r.nbytes(CONTEXT, lab.geometry)) for b, r in best.items()}
    chosen = list({r.name: r for r in (*best.values(), *tuned.values())}.values())
    tasks = list(TASKS) if given.needles else [KL]
    figures = {task: lab.measure(task, chosen) for task in tasks}
    rows = []
    for bound, recipe in tuned.items():
        both = {"uniform": best[bound], "tuned": recipe}
        row: dict = {"bound": bound}
        for kind, one in both.items():
            row[kind] = {"recipe": one.name, "share": lab.share(one)}
            for task in tasks:
                scores = figures[task][one.name].scores
                row[kind] |= {name: asdict(score) for name, score in scores.items()}
        row["ratio"] = row["tuned"]["kl_mean"]["mean"] / row["uniform"]["kl_mean"]["mean"]
        row["recipe"] = recipe.to_dict()
        rows.append(row)
    print("| Bound | Uniform | Bytes | KL | Needles | Tuned: bytes | KL | Needles | KL ratio |")
    print("|---|---|---|---|---|---|---|---|---|")
    for row in rows:
        cells = [f"{row['bound']:.1%}", f"`{row['uniform']['recipe']}`"]
        for kind in ("uniform", "tuned"):
            one = row[kind]
            needles = f"{one['correct']['mean']:.0%}" if given.needles else ""
            cells += [f"{one['share']:.1%}", f"{one['kl_mean']['mean']:.4f}", needles]
        print("|", " | ".join([*cells, f"{row['ratio']:.2f}"]), "|")
    print(f"\nseconds of the five runs: {', '.join(f'{x:.0f}' for x in lab.seconds)}")
    name = f"tune_{Path(given.model).name}"
    environment = record.environment(context=CONTEXT, dtype=DTYPE)
    record.write(name, {"environment": environment, "seconds": lab.seconds, "rows": rows})


if __name__ == "__main__":
    main()
