"""The evaluator: run tasks for many recipes; `kvloom eval`, `compare` and `papers` measure by it.

One forward pass compresses a context for a group of recipes. `full` is measured first on every
batch, because the others are compared with it. Every recipe gets its bytes and seconds, the
bits per value, and the tokens that a step of recall reads; `Measured` has its traffic too.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic

import torch
from transformers import PreTrainedModel

from kvloom.errors import InputError, KvloomError, RecipeError
from kvloom.hf import attachment_restored, supported_model
from kvloom.progress import Progress
from kvloom.recall import Traffic
from kvloom.recipe import Geometry, Recipe, resolve

from ..workload.errors import logged_line
from ..workload.files import finite
from ..workload.passes import BATCH, Measurement, Prefilled, groups, prefill, run_alone, run_batch
from .decoding import decode_seconds
from .results import ResultFolder
from .sample import Baseline, Batch, Outcome, Run, Sample, Source, Task, TaskBatches

TIMED_STEPS = 8  # of the first batch of a task, with those that warm up


@dataclass
class Measured(Generic[Baseline]):
    """What a recipe did on a batch. Bytes and seconds are those of the whole batch.

    baseline: what others are compared with, if the recipe is `full`. kv_bytes, exact_bytes: after
    the samples, of this cache and of an exact one. decode_s: seconds of a decode step; None: not
    timed. bits_per_value, tokens_read, traffic: of `Cache`; None where no layer is compressed, or
    without recall.
    """

    outcomes: list[Outcome]
    baseline: Baseline
    kv_bytes: int
    exact_bytes: int
    prefill_s: float
    decode_s: float | None
    bits_per_value: float | None
    tokens_read: float | None
    traffic: Traffic


Count = Callable[[Recipe, str, int], None]
"""Called with a recipe, its current work, and the units finished since the last call."""


@torch.inference_mode()
def measure_batch(
    model: PreTrainedModel,
    source: Source,
    task: Task[Baseline],
    batch: Batch,
    recipes: Sequence[Recipe],
    count: Count,
) -> Iterator[tuple[Recipe, Measured[Baseline] | Exception]]:
    """Yield what each recipe did on a batch, or the error that it raised.

    source: of the samples. recipes: without repetitions, `full` first, whose error is raised. As
    many recipes share a pass as fit into memory.
    """
    baseline: Baseline | None = None
    for group in groups(model, recipes, *batch.ids.shape):
        count(group[0], "reading the context", 0)
        prompts = _fill(model, group, batch)
        if baseline is None:
            first = run_alone(
                model, _measure(model, source, task, batch, prompts.pop(0), None, count)
            )
            baseline = first.baseline
            yield group[0], first
        while prompts:
            together = prompts[:BATCH]
            del prompts[:BATCH]
            measurements = [
                _measure(model, source, task, batch, prompt, baseline, count) for prompt in together
            ]
            results = run_batch(model, measurements)
            for prompt, result in zip(together, results, strict=True):
                yield prompt.recipe, result


def _fill(model: PreTrainedModel, group: Sequence[Recipe], batch: Batch) -> list[Prefilled]:
    """Fill the caches of a group with a prompt; an error of the forward pass fails all of them."""
    try:
        return prefill(model, group, batch.ids.to(model.device))[1]
    except Exception as error:
        if resolve("full") in group:
            raise
        return [Prefilled(recipe, error=error) for recipe in group]


def _measure(
    model: PreTrainedModel,
    source: Source,
    task: Task[Baseline],
    batch: Batch,
    prompt: Prefilled,
    baseline: Baseline | None,
    count: Count,
) -> Measurement[Measured[Baseline]]:
    """Measure one recipe, and drop its cache. First, a copy decodes some tokens and is timed."""
    if prompt.error is not None:
        raise prompt.error
    recipe = prompt.recipe
    cache, prompt.cache = prompt.cache, None
    assert cache is not None
    count(recipe, "decoding", 0)
    decode_s = None
    if batch.timed is not None:
        timed = batch.timed.to(model.device)
        decode_seconds(model, cache, timed)  # kernels may be compiled on the way
        decode_s = decode_seconds(model, cache, timed)
    before = cache.traffic
    run = Run(model, source, cache, batch, baseline, lambda what, units: count(recipe, what, units))
    outcomes, own_baseline = yield from task.measure(run)
    return Measured(
        outcomes,
        own_baseline,
        cache.nbytes,
        cache.full_nbytes,
        prompt.seconds,
        decode_s,
        cache.bits_per_value if cache.full_layers else None,
        cache.tokens_read if cache.full_layers and recipe.recall is not None else None,
        Traffic(*(b - a for a, b in zip(before, cache.traffic, strict=True))),
    )


# a run whose results are in a folder


def evaluate(
    model: PreTrainedModel,
    source: Source,
    recipes: Sequence[Recipe],
    tasks: TaskBatches,
    folder: ResultFolder,
    progress: Progress | None = None,
) -> None:
    """Measure every recipe on every sample that the folder lacks; write finished ones at once.

    tasks: what to measure. recipes: each with another name. progress: called with the current work
    and the finished (sample, recipe) pairs since the last call, first with those that the folder
    has. The model is left as it was. A recipe that does not fit or fails on a batch gets lines with
    the reason; the others continue. A later run measures samples that failed once more. Raises
    `InputError` if the folder has another text for a sample.
    """
    supported_model(model)
    on_step = progress or (lambda what, units: None)
    written = _written(tasks, folder)
    finished = {
        (task.name, *names)
        for task, _ in tasks
        for names, line in folder.outcomes(task.name).items()
        if not line.get("failed")
    }

    def lacks(task: Task[Any], sample: str, recipe: Recipe) -> bool:
        return (task.name, sample, recipe.name) not in finished

    pending = [
        (task, i, batch, [r for r in recipes if any(lacks(task, s.name, r) for s in batch.samples)])
        for task, batches in tasks
        for i, batch in enumerate(batches)
    ]
    units = sum(len(batch.samples) * len(lacking) for *_, batch, lacking in pending)
    on_step("", units_to_measure(tasks, recipes) - units)
    with attachment_restored(model):
        for task, i, batch, lacking in pending:
            new = [sample for sample in batch.samples if (task.name, sample.name) not in written]
            folder.append("prompts", [_prompt(task, sample) for sample in new])
            if not lacking:
                continue
            if i == 0:  # a decode step of each recipe is timed
                timed = torch.zeros(len(batch.ids), TIMED_STEPS, dtype=torch.long)
                batch = replace(batch, timed=timed)
            count = _without_units(on_step, f"{task.name} {batch.samples[0].name}")
            measurements = measure_batch(model, source, task, batch, with_full(lacking), count)
            for recipe, measured in measurements:
                if recipe in lacking:  # not if `full` is measured for the others only
                    lines = _lines(task, batch, recipe, measured)
                    folder.append(task.name, [x for x in lines if lacks(task, x["sample"], recipe)])
                    on_step("", len(batch.samples))


def _without_units(on_step: Progress, batch: str) -> Count:
    """Return a function that reports the work on a batch; its samples count once written."""
    return lambda recipe, what, _: on_step(f"{batch}: {recipe.name}, {what}", 0)


def units_to_measure(tasks: TaskBatches, recipes: Sequence[Recipe]) -> int:
    """Return how many (sample, recipe) pairs `evaluate` measures or finds finished."""
    return len(recipes) * sum(len(b.samples) for _, batches in tasks for b in batches)


def _lines(
    task: Task[Any], batch: Batch, recipe: Recipe, measured: Measured[Any] | Exception
) -> list[dict[str, Any]]:
    """Return the line of each sample. Bytes and seconds are those of one context."""
    contexts = len(batch.ids)
    if isinstance(measured, Exception):
        problem: dict[str, Any] = {"problem": logged_line(measured, f"recipe {recipe.name!r}")}
        if not isinstance(measured, KvloomError):  # which says that the recipe does not fit
            problem["failed"] = True
        fields: list[dict[str, Any]] = [problem] * len(batch.samples)
    else:
        seconds: dict[str, float] = {"prefill": measured.prefill_s / contexts}
        if measured.decode_s is not None:
            seconds |= {"decode": measured.decode_s / contexts, "steps": 1}
        storage: dict[str, float | None] = {
            "kv_bytes": measured.kv_bytes // contexts,
            "exact_bytes": measured.exact_bytes // contexts,
            "bits_per_value": measured.bits_per_value,
            "tokens_read": measured.tokens_read,
        }
        fields = [
            _no_numbers(outcome)
            or {
                "scores": outcome.scores,
                **{name: number for name, number in storage.items() if number is not None},
                "answer": outcome.answer,
                "tokens": outcome.tokens,
                "curves": finite(
                    {k: [float(f"{x:.5g}") for x in xs] for k, xs in outcome.curves.items()}
                ),
                "seconds": seconds,
            }
            for outcome in measured.outcomes
        ]
    return [
        {"task": task.name, "sample": sample.name, "recipe": recipe.name, **values}
        for sample, values in zip(batch.samples, fields, strict=True)
    ]


def _no_numbers(outcome: Outcome) -> dict[str, Any] | None:
    """Return the problem of a sample whose scores are not all finite; None if they are."""
    names = [name for name, x in outcome.scores.items() if not math.isfinite(x)]
    if not names:
        return None
    return {"problem": f"the model predicts NaN or infinity: no {', '.join(names)}", "failed": True}


def _written(tasks: TaskBatches, folder: ResultFolder) -> set[tuple[str, str]]:
    """Return the task and name of the samples in the folder; each must be the same as ours."""
    lines = {(line["task"], line["sample"]): line for line in folder.lines("prompts")}
    for task, batches in tasks:
        for sample in (s for batch in batches for s in batch.samples):
            before = lines.get((task.name, sample.name))
            if before is not None and before != json.loads(json.dumps(_prompt(task, sample))):
                raise InputError(
                    f"{str(folder.path)!r} has another text for the sample {sample.name} of "
                    f"{task.name}; give the same --text and --data, or another --out"
                )
    return set(lines)


def _prompt(task: Task[Any], sample: Sample) -> dict[str, Any]:
    texts = {"context": sample.context, "question": sample.question, "reference": sample.reference}
    return {"task": task.name, "sample": sample.name, **texts, **sample.fields}


# recipes


def with_full(recipes: Sequence[Recipe | str | Path]) -> list[Recipe]:
    """Return the recipes, resolved and without repetitions, with `full` first."""
    return list(dict.fromkeys(resolve(recipe) for recipe in ("full", *recipes)))


def at_share(
    recipe: Recipe, share: float, tokens: int, geometry: Geometry, states: int = 0
) -> Recipe:
    """Return the recipe with the largest budget whose bytes are at most this share.

    tokens: of the context that is compressed. share: 0 to 1, of the bytes of an exact cache after
    it, windows and states included. states: their bytes. A recipe whose budget does not change its
    bytes (none, or recall's) is returned unchanged. The name says the share. Raises `RecipeError`
    if no budget is small enough, or some layers evict and others recall.
    """

    def nbytes(recipe: Recipe) -> int:
        full, windows = recipe.nbytes(tokens, geometry), recipe.sliding_nbytes(tokens, geometry)
        return full + windows + states

    plain = [recipe.for_layer(i, geometry.layer_indices) for i in geometry.layer_indices]
    evicts = any(x.keep is not None and x.recall is None for x in plain)
    if not evicts or (recipe.recall is not None and not recipe.layers):
        return recipe
    if any(x.recall is not None for x in plain):
        raise RecipeError(
            f"{recipe.name}: some layers evict and others recall, and a share sets one budget; "
            "give each its budget in the recipe, and no share"
        )
    most = share * nbytes(Recipe())
    fits, low, high = 0, 1, tokens
    while low <= high:
        middle = (low + high) // 2
        try:
            size = nbytes(recipe.with_budget(middle))
        except RecipeError:  # for example, too small for the recipe's window
            low = middle + 1
            continue
        if size <= most:
            fits, low = middle, middle + 1
        else:
            high = middle - 1
    if not fits:
        raise RecipeError(
            f"{recipe.name} has no budget that takes {share:.3g} of the exact cache after {tokens} "
            "tokens; use a larger share, or a longer context"
        )
    return replace(recipe.with_budget(fits), name=f"{recipe.name} at {share:.3g}")
