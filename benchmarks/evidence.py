"""The published evidence: recipes at equal bytes on SmolLM2.

Each run below measures its recipes on tasks that need no data from outside, by the code of
`kvloom eval`. Models run in bfloat16, so the exact cache has 16 bits per number, as in use.
Recipes that evict are measured at shares of the exact cache's bytes. A run first freezes its
protocol, and leaves out samples with a passage of the text for calibration and tuning. It measures
the first samples of each task, and prints how long the others will take. An interrupted run can be
resumed: finished samples are in a folder, which `kvloom report` shows. Means with 95% intervals go
to results/<machine>/evidence_<run>.json, the answers and scores of all samples to
evidence_<run>.samples.jsonl.gz.

    python benchmarks/evidence.py            # every run; many hours on two cores
    python benchmarks/evidence.py --runs smollm2-2k-mixed --tasks perplexity,multiturn
    python benchmarks/evidence.py --quick    # are the published figures found again?

The run smollm2-2k has `kitty`: first `pip install --no-deps ./examples/kvloom-formats`.

--quick measures the first samples of `QUICK` again. It fails if one of them has a new problem, or a
mean lies outside the 95% interval over the same published samples. With the same processor,
versions, number of threads and recipes, every answer and score of one commit is equal; another
number of threads adds in another order, as do other recipes that decode in the same batch.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from operator import itemgetter
from pathlib import Path
from typing import Any

import protocol
import record
from evaluation import HERE, Evaluation, mixed_batches, recipe_of, source_of
from evidence_figures import rows_by_kind
from evidence_tables import (
    free,
    needles,
    published_samples,
    read_samples,
    table,
    table_by_kind,
)
from evidence_texts import KINDS, prose
from kvloom.errors import RecipeError
from kvloom.hf import CALIBRATION_FILE, geometry
from kvloom.recipe import Recipe
from kvloom_lab.cli.options import split_recipes
from kvloom_lab.eval.evaluate import at_share, with_full
from kvloom_lab.eval.sample import Batch, Sample, Source
from kvloom_lab.eval.summary import bootstrap, summarize
from kvloom_lab.eval.tasks import task_named
from kvloom_lab.models import load
from kvloom_lab.workload.text import calibration_text, library_text

DTYPE = "bfloat16"
Shares = tuple[float | None, ...]
"""Of the exact cache's bytes; None: the recipe's own budget."""
OWN: Shares = (None,)
SHARES = 1 / 3, 1 / 4, 1 / 5, 1 / 8, 1 / 12
RECOMMENDED: dict[str, Shares] = {
    "near-lossless": OWN,
    "balanced": OWN,
    "small": (None, 1 / 5),
    "tiny": OWN,
    "micro": OWN,
    "small-kvzip.toml": (None, 1 / 5),  # KVzip's score, and values as they are
    "tiny-kvzip.toml": OWN,
    "small-random.toml": OWN,  # controls: random tokens in place of the score
    "tiny-random.toml": OWN,
}
ALL: dict[str, Shares] = {
    **RECOMMENDED,
    **dict.fromkeys((
        "kivi-4", "kivi:bits=3", "kivi", "kivi-4-sinks4.toml", "kivi-k4v2-sinks4.toml",
        "kivi-sinks4.toml", "turbo:bits=4,sinks=4", "turbo:sinks=4", "turbo",
        "turbo:bits=2,sinks=4", "rtn:bits=4", "rtn", "kitty", "kitty:sinks=4,rotate=true",
        "kitty:boost=32,sinks=4,rotate=true", "skvq:group=32", "quest", "clusterkv",
        "clusterkv-2bit",
    ), OWN),
    **dict.fromkeys((
        "h2o", "keyformer", "snapkv", "pyramidkv", "streaming", "minikv", "minikv-snap",
        "snapkv+kivi-4.toml", "snapkv+turbo-4.toml", "expected:store=kivi-4",
        "expected:store=turbo",
    ), SHARES),
}  # fmt: skip
FEW: dict[str, Shares] = {
    **RECOMMENDED,
    **dict.fromkeys((
        "kivi-4", "kivi:bits=3", "kivi", "turbo:sinks=4", "skvq:group=32", "quest", "clusterkv",
        "clusterkv-2bit",
    ), OWN),
    **dict.fromkeys((
        "h2o", "keyformer", "snapkv", "streaming", "minikv", "minikv-snap", "snapkv+kivi-4.toml",
    ), (1 / 5, 1 / 8)),
}  # fmt: skip
MIXED: dict[str, Shares] = {
    **dict.fromkeys((*RECOMMENDED, "micro-kvzip.toml", "kivi", "kivi-4"), OWN),
    "snapkv": (1 / 5,),
}  # fmt: skip
PAPERS: dict[str, Shares] = {  # other papers' own recipes
    **dict.fromkeys(("clusterkv", "skvq:group=32"), OWN),
    **dict.fromkeys(("h2o", "keyformer", "minikv"), (1 / 5,)),
}


@dataclass(frozen=True, eq=False)
class TaskPlan:
    """How a task is measured.

    samples: of each kind of text. recipes: with their shares. kinds: of text; None: all. known: the
    prompt ends with the question, so that a recipe's score may depend on it.
    """

    spec: str
    samples: int
    new_tokens: int
    recipes: Mapping[str, Shares]
    kinds: Sequence[str] | None = None
    known: bool = False

    @property
    def label(self) -> str:
        """What the recipes and kinds of text are marked with, behind their names."""
        return ", question known" if self.known else ""


@dataclass(frozen=True)
class RunPlan:
    """A run: its model, the tokens of a context, its texts by kind, its tasks and its seed."""

    model: str
    context: int
    texts: Mapping[str, Callable[[], str]]
    tasks: Sequence[TaskPlan]
    seed: int = 0


ALL_TASKS = (  # 10 texts; 60 needles
    TaskPlan("perplexity", 10, 128, ALL),
    TaskPlan("niah:multikey", 6, 1, FEW),
)
PROSE = ("prose",)
ORACLE = dict.fromkeys(("small", "small-question.toml"), OWN)
MIXED_TASKS = (  # 32 texts; 300 needles; 128 questions; 10 samples of each part of RULER
    TaskPlan("perplexity", 8, 128, MIXED | PAPERS),
    TaskPlan("niah:multikey", 28, 1, MIXED | PAPERS, PROSE),
    TaskPlan("niah:single+passkey", 1, 1, MIXED, PROSE),
    TaskPlan("multiturn", 4, 1, MIXED),
    TaskPlan("niah:single+passkey", 3, 1, ORACLE, PROSE, known=True),
    TaskPlan("ruler", 10, 1, MIXED, PROSE),
)
FREE_TASKS = (  # 32 texts
    TaskPlan("free", 8, 256, dict.fromkeys((
        "near-lossless", "balanced", "small", "small-kvzip.toml", "tiny", "micro", "kivi",
    ), OWN)),
)  # fmt: skip
GROWING_TASKS = (  # 8 texts
    TaskPlan("free", 2, 1024, dict.fromkeys((
        "near-lossless", "small", "small:block=512", "tiny:block=512",
        "streaming:tokens=512", "h2o:tokens=512", "triattention:fraction=0.25,recent=128,block=128",
    ), OWN)),
)  # fmt: skip
OTHER: dict[str, Shares] = dict.fromkeys(
    ("near-lossless", "balanced", "small", "small-kvzip.toml", "tiny", "micro", "kivi"), OWN
)
OTHER_TASKS = (  # 20 system prompts; 32 texts; 40 short prompts
    TaskPlan("instructions", 5, 64, OTHER | {"snapkv": (1 / 5,)}),
    TaskPlan("state:update", 2, 1, OTHER | {"snapkv": (1 / 5,)}),
    TaskPlan("short", 2, 64, OTHER),
)
TRACE_TASKS = (  # 4 texts
    TaskPlan("trace", 1, 4096, dict.fromkeys(
        ("near-lossless", "small", "small:block=512", "tiny", "tiny:block=512", "kivi"), OWN
    )),
)  # fmt: skip
LONG: dict[str, Shares] = {
    **dict.fromkeys((
        "near-lossless", "balanced", "small", "small-kvzip.toml", "small-random.toml", "tiny",
        "tiny-kvzip.toml", "micro", "micro-kvzip.toml",
    ), OWN),
    "snapkv": (1 / 5,),
}  # fmt: skip
MIDDLE: dict[str, Shares] = {
    **LONG,
    **dict.fromkeys(("kivi-4", "kivi", "micro:fraction=0.05"), OWN),
    "h2o": (1 / 5,),
}
MIDDLE_TASKS = (  # 8 texts; 60 needles
    TaskPlan("perplexity", 2, 128, MIDDLE),
    TaskPlan("niah:multikey", 6, 1, MIDDLE, PROSE),
)
LONG_TASKS = (  # 8 texts; 60 needles
    TaskPlan("perplexity", 2, 128, LONG),
    TaskPlan("niah:multikey", 6, 1, LONG, PROSE),
)
ODD: dict[str, Shares] = dict.fromkeys(
    ("near-lossless", "small", "small-kvzip.toml", "tiny", "micro"), OWN
)
ODD_TASKS = (  # 16 texts; 60 needles
    TaskPlan("perplexity", 4, 128, ODD),
    TaskPlan("niah:multikey", 6, 1, ODD, PROSE),
)
RULER_TASKS = (  # 100 samples of each part
    TaskPlan("ruler", 100, 1, dict.fromkeys((
        "near-lossless", "balanced", "small", "tiny", "micro", "small-random.toml", "kivi",
    ), OWN)),
)  # fmt: skip
RUNS = {
    "smollm2-2k": RunPlan("smollm2", 2048, {"": library_text}, ALL_TASKS),
    "smollm2-2304": RunPlan("smollm2", 2304, KINDS, ODD_TASKS, seed=1),  # beyond one chunk
    "smollm2-4k": RunPlan("smollm2", 4096, KINDS, MIDDLE_TASKS, seed=1),
    "smollm2-2k-mixed": RunPlan("smollm2", 2048, KINDS, MIXED_TASKS, seed=1),
    "smollm2-2k-free": RunPlan("smollm2", 2048, KINDS, FREE_TASKS, seed=1),
    "smollm2-1k-free": RunPlan("smollm2", 1024, KINDS, GROWING_TASKS, seed=1),
    "smollm2-2k-other": RunPlan("smollm2", 2048, KINDS, OTHER_TASKS, seed=1),
    "smollm2-2k-ruler": RunPlan("smollm2", 2048, {"prose": prose}, RULER_TASKS, seed=2),
    "smollm2-1k-trace": RunPlan("smollm2", 1024, KINDS, TRACE_TASKS, seed=1),
    "smollm2-8k": RunPlan("smollm2", 8000, KINDS, LONG_TASKS, seed=1),  # of 8,192 positions
}
SHOWN = {"perplexity": table, "niah": needles, "free": free}
QUICK_RUN = "smollm2-2k-mixed"
QUICK = {"perplexity": 8, "niah:multikey": 2, "multiturn": 2}  # batches of each task
RAW = "task", "sample", "recipe", "kv_bytes", "exact_bytes", "scores", "answer", "problem"
KEY = itemgetter("task", "sample", "recipe")


def recipes(shares: Mapping[str, Shares], context: int, geometry: object) -> list[Recipe]:
    """Return `full` and the recipes at their shares, if they evict tokens there."""
    sized_recipes = []
    for spec, each in shares.items():
        recipe = recipe_of(spec)
        for share in each:
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


class Lab:
    """A run with its model, and the samples of its tasks."""

    def __init__(self, run: str) -> None:
        self.name, self.plan = run, RUNS[run]
        self.model, self.tokenizer = load(self.plan.model, DTYPE)
        self.geometry = geometry(self.model)
        self.sources = {
            kind: source_of(
                self.tokenizer, text(), self.plan.context, self.plan.seed, samples=1, new_tokens=1
            )
            for kind, text in self.plan.texts.items()
        }

    def samples(self, task: TaskPlan) -> tuple[Source, list[Batch]]:
        """Return a source and the samples of a task, from all its kinds of text."""
        sources = {
            kind + task.label: replace(
                source,
                samples=task.samples,
                new_tokens=task.new_tokens,
                ask="inside" if task.known else "after",
            )
            for kind, source in self.sources.items()
            if task.kinds is None or kind in task.kinds
        }
        return next(iter(sources.values())), mixed_batches(task_named(task.spec), sources)

    def recipes(self, task: TaskPlan, names: Iterable[str] | None) -> list[Recipe]:
        """Return the recipes of a task, or some recipes at the shares that they have there.

        names: a recipe that other tasks of the run have alone is left out; [] if all are.
        """
        shares = task.recipes
        if names is not None:
            planned = {name for each in self.plan.tasks for name in each.recipes}
            shares = {
                name: shares.get(name) or ALL.get(name, SHARES)
                for name in names
                if name in shares or name not in planned
            }
            if not shares:
                return []
        every = recipes(shares, self.plan.context, self.geometry)
        return [replace(recipe, name=recipe.name + task.label) for recipe in every]

    def calibrate(self, recipes: Iterable[Recipe]) -> None:
        """Calibrate the model if a recipe needs it and no file beside the weights has it.

        It takes minutes.
        """
        path = Path(self.model.config._name_or_path) / CALIBRATION_FILE
        needed = any(store.calibrated for recipe in recipes for store in recipe.stores)
        if needed and not path.exists():
            command = [sys.executable, "-m", "kvloom_lab", "calibrate", self.plan.model]
            options = ["--out", str(path), "--recipes", "skvq,skvq:group=32"]
            subprocess.run([*command, *options], check=True)

    def evaluation(self, folder: Path) -> Evaluation:
        """Return the model with a folder of samples."""
        settings = {"context": [self.plan.context], "seed": self.plan.seed}
        return Evaluation(self.model, self.tokenizer, self.plan.model, folder, settings)


def measure(run: str, specs: Sequence[str], names: Sequence[str] | None, folder: Path) -> None:
    """Freeze the protocol of a run, measure some of its tasks, and publish what is finished.

    names: of the recipes; None: those of each task.
    """
    lab = Lab(run)
    samples, texts, refused = {}, {}, {}
    used = protocol.UsedText(calibration_text())
    for task in lab.plan.tasks:
        source, batches = lab.samples(task)
        texts[task.spec + task.label], refused[task.spec + task.label] = used.without(batches)
        samples[task] = source, texts[task.spec + task.label]
    chosen = {task: lab.recipes(task, names) for task in lab.plan.tasks}
    every = list(dict.fromkeys(recipe for each in chosen.values() for recipe in each))
    frozen = protocol.protocol_of(
        texts, every, model=lab.plan.model, context=lab.plan.context, seed=lab.plan.seed,
        refused=refused, dtype=DTYPE,
    )  # fmt: skip
    published_before(run, frozen)  # exits where it could not be published beside it
    protocol.freeze(frozen, folder / run)
    evaluation = lab.evaluation(folder / run)
    lab.calibrate(every)
    try:
        for part in (slice(1), slice(1, None)):  # the first samples of all tasks before the others
            for task, (source, batches) in samples.items():
                if task.spec not in specs or not chosen[task]:
                    continue
                begun, before = time.perf_counter(), len(evaluation.lines([task.spec]))
                evaluation.measure_batches(
                    task_named(task.spec), batches[part], source, chosen[task], printer(run)
                )
                measured = len(evaluation.lines([task.spec])) - before
                if measured and part.start is None:
                    lines = len(chosen[task]) * sum(len(batch.samples) for batch in batches[1:])
                    minutes = (time.perf_counter() - begun) / 60 * lines / measured
                    print(f"{run} {task.spec}: about {minutes:.0f} more minutes", flush=True)
    finally:
        batches_by_task = [(task.spec, batches) for task, (_, batches) in samples.items()]
        specs = [task.spec for task in samples]
        publish(run, frozen, samples_of(batches_by_task), evaluation.lines(specs))


def samples_of(tasks: Iterable[tuple[str, list[Batch]]]) -> dict[tuple[str, str], Sample]:
    """Return the samples of tasks by their task and name."""
    return {
        (task_named(spec).name, sample.name): sample
        for spec, batches in tasks
        for batch in batches
        for sample in batch.samples
    }


def publish(
    run: str,
    frozen: dict[str, Any],
    samples: Mapping[tuple[str, str], Sample],
    lines: list[dict[str, Any]],
) -> None:
    """Print tables of all finished samples; write their figures, and their scores and answers.

    What was published of the same samples, with the same versions, stays.
    """
    before = published_before(run, frozen)
    lines = [*earlier_lines(run, before, frozen, lines), *lines]
    figures = [asdict(row) for row in summarize(lines)]
    measured = {row["task"] for row in figures}
    published_lines = {}
    for line in lines:
        sample = samples[line["task"], line["sample"]]
        raw = {name: line[name] for name in RAW if name in line}
        published_lines[KEY(line)] = {
            **raw,
            "text": protocol.text_sha256(sample),
            "commit": line.get("commit", frozen["commit"]),
        }
    rows = rows_by_kind(lines) if any(RUNS[run].texts) else []
    tables = [show(figures) for task, show in SHOWN.items() if task in measured]
    if rows:
        tables.append(table_by_kind(rows))
    print("\n\n".join(tables))
    of_recipe = {(row["task"], row["recipe"]) for row in figures}
    changed = redefined(before, frozen)
    result = {
        "environment": record.environment(dtype=DTYPE),
        "protocol": frozen,
        "earlier_protocols": earlier_protocols(before, frozen),
        "figures": [
            *(
                x
                for x in before.get("figures", [])
                if x["recipe"] not in changed and (x["task"], x["recipe"]) not in of_recipe
            ),
            *figures,
        ],
        "by_kind": rows,
    }
    record.write(f"evidence_{run}", result)
    record.write_samples(f"evidence_{run}", published_lines.values())


def printer(run: str) -> Callable[[str, int], None]:
    """Return a function that prints each step of a run once."""
    seen = ""

    def progress(what: str, units: int) -> None:
        nonlocal seen
        if what and what != seen:
            seen = what
            print(f"{run} {what}", file=sys.stderr, flush=True)

    return progress


def equal_answers(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Return whether two lines of a sample have the same bytes, scores and answer."""
    return all(one.get(name) == other.get(name) for name in RAW)


def not_found(
    lines: Iterable[Mapping[str, Any]], before: Mapping[tuple[str, str, str], Mapping[str, Any]]
) -> list[str]:
    """Return a sentence for each new problem, and each mean outside its published 95% interval.

    before: the published lines, by `KEY`. Both have the same contexts, so intervals are over
    samples.
    """
    sentences = []
    values: dict[tuple[str, str, str], list[tuple[float, float]]] = {}
    for line in lines:
        published = before[KEY(line)]
        if line.get("problem") and not published.get("problem"):
            sentences.append(f"{line['recipe']} on {line['sample']}: {line['problem']}")
        for score, now in line.get("scores", {}).items():
            if score in published.get("scores", {}):
                pair = now, published["scores"][score]
                values.setdefault((line["task"], line["recipe"], score), []).append(pair)
    for (task, recipe, score), pairs in values.items():
        now, was = (bootstrap(each) for each in zip(*pairs, strict=True))
        if was.low is None or not was.low - 1e-9 <= now.mean <= was.high + 1e-9:
            sentences.append(
                f"{recipe} on {task}: {score} {now.mean:.4g} not in {was.low} … {was.high}"
            )
    return sentences


def repeat(folder: Path) -> list[str]:
    """Measure the first samples of `QUICK` again; print what is equal, return what is not found."""
    lab = Lab(QUICK_RUN)
    evaluation = lab.evaluation(folder / QUICK_RUN)
    before = {KEY(line): line for line in published_samples(QUICK_RUN)}
    samples: dict[tuple[str, str], Sample] = {}
    tasks = [task for task in lab.plan.tasks if task.spec in QUICK]
    chosen = {task: lab.recipes(task, None) for task in tasks}
    lab.calibrate(recipe for each in chosen.values() for recipe in each)
    for task in tasks:
        source, batches = lab.samples(task)
        batches = batches[: QUICK[task.spec]]
        samples |= samples_of([(task.spec, batches)])
        evaluation.measure_batches(
            task_named(task.spec), batches, source, chosen[task], printer(QUICK_RUN)
        )
    lines = [line for line in evaluation.lines(QUICK) if (line["task"], line["sample"]) in samples]
    for line in lines:
        text = protocol.text_sha256(samples[line["task"], line["sample"]])
        if KEY(line) not in before or before[KEY(line)]["text"] != text:
            return [f"{line['recipe']} on {line['task']} {line['sample']}: not published"]
    equal = sum(equal_answers(before[KEY(line)], line) for line in lines)
    print(
        f"{equal} of {len(lines)} samples of {QUICK_RUN} are equal to the published ones. The "
        "processor, versions, threads and recipes of a batch may change the order of additions "
        f"(threads here: {record.environment()['threads']})"
    )
    return not_found(lines, before)


def main() -> None:
    specs = dict.fromkeys(task.spec for plan in RUNS.values() for task in plan.tasks)
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", default=",".join(RUNS))
    parser.add_argument("--tasks", default=",".join(specs), help='"" publishes finished samples')
    parser.add_argument("--recipes", help="instead of the recipes of each task")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--folder", type=Path, default=HERE / "out")
    options = parser.parse_args()
    if options.quick:
        wrong = repeat(options.folder / "quick")
        print("\n".join(wrong) or "every figure is in its interval")
        sys.exit(bool(wrong))
    tasks = options.tasks.split(",") if options.tasks else []
    if unknown := [task for task in tasks if task not in specs]:
        parser.error(f"no run has the task {unknown[0]}; there are {', '.join(specs)}")
    names = options.recipes and split_recipes(options.recipes)
    for run in options.runs.split(","):
        measure(run, tasks, names, options.folder)


def published_before(run: str, frozen: Mapping[str, Any]) -> dict[str, Any]:
    """Return this machine's published result of a run; {} without one.

    Raises `SystemExit` where it has other samples, versions or threads.
    """
    path = record.results() / f"evidence_{run}.json"
    if not path.exists():
        return {}
    before = json.loads(path.read_text())
    former = before["protocol"]
    names = {*former, *frozen} - {"commit", "clean", "recipes"}
    if other := sorted(name for name in names if former.get(name) != frozen.get(name)):
        sys.exit(
            f"{path} was measured with other {', '.join(other)}: run it as its protocol says, or "
            "remove it and its samples to measure all recipes again"
        )
    return before


def earlier_protocols(before: dict[str, Any], frozen: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the protocols of a published result, with the recipes that `frozen` has not."""
    protocols = []
    known = set(frozen["recipes"])
    for each in (before.get("protocol", frozen), *before.get("earlier_protocols", [])):
        others = {name: text for name, text in each["recipes"].items() if name not in known}
        if others:
            protocols.append({**each, "recipes": others})
        known |= set(others)
    return protocols


def earlier_lines(
    run: str, before: dict[str, Any], frozen: dict[str, Any], lines: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Return the published lines of recipes that have not changed since.

    A recipe has changed if its definition has, or its answer to a published sample of the task.
    Raises `SystemExit` where an answer of `full` has changed: then the machine differs.
    """
    if not before:
        return []
    published = read_samples(record.results() / f"evidence_{run}.samples.jsonl.gz")
    now = {KEY(line): line for line in lines}
    other_answers = {
        (line["task"], line["recipe"]): line["sample"]
        for line in published
        if not equal_answers(now.get(KEY(line), line), line)
    }
    for (task, recipe), sample in other_answers.items():
        if recipe.startswith("full"):
            sys.exit(
                f"{recipe} gave {sample} of {task} another answer than is published: measure all "
                f"recipes of {run} again, without its published result"
            )
        print(f"{recipe} answers {sample} of {task} otherwise: its samples of {task} are removed")
    changed, protocols = redefined(before, frozen), protocol_of_recipe(before)
    return [
        {"commit": protocols[line["recipe"]]["commit"], **line}
        for line in published
        if line["recipe"] not in changed and (line["task"], line["recipe"]) not in other_answers
    ]


def redefined(before: dict[str, Any], frozen: dict[str, Any]) -> set[str]:
    """Return the names of published recipes that have another definition in `frozen`."""
    former = protocol_of_recipe(before)
    return {
        name
        for name, recipe in frozen["recipes"].items()
        if name in former and former[name]["recipes"][name] != recipe
    }


def protocol_of_recipe(before: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the protocol under which each recipe of a published result was measured."""
    if not before:
        return {}
    protocols = earlier_protocols(before, {"recipes": {}})
    return {name: each for each in protocols for name in each["recipes"]}


if __name__ == "__main__":
    main()
