"""Quality of eviction recipes on the reference model, at the bytes of `kivi` and of `minikv`.

A question stands after the context, which is compressed without it, or at the end of the context.
Every row is written as soon as it is measured; a second run continues where the first stopped.

    python benchmarks/evict.py
"""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import torch

import record
from kvloom.hf import geometry
from kvloom.recipe import Geometry, Recipe, resolve
from kvloom_lab.eval import Settings, iter_rows, load, prepare
from kvloom_lab.eval.comparison import correct_inside
from kvloom_lab.eval.evaluate import at_share, with_full
from kvloom_lab.workload.passes import run_alone
from kvloom_lab.workload.text import library_text

CONTEXT, QUESTIONS = 2048, 208
NAMES = (
    *("window", "dilated", "streaming", "random", "h2o", "keyformer", "snapkv", "snapkv:kernel=15"),
    *("pyramidkv:kernel=15", "minikv", "minikv-pyramid", "minikv-snap:kernel=15", "kivi"),
)


def at_bytes_of(target: str, g: Geometry) -> list[Recipe]:
    """Return every recipe at the size of the target's cache right after the context."""
    share = resolve(target).nbytes(CONTEXT, g) / (CONTEXT * g.token_nbytes())
    names = [name for name in NAMES if name == target or resolve(name).keep is not None]
    recipes = [at_share(resolve(name), share, CONTEXT, g) for name in names]
    return [replace(recipe, name=f"{recipe.name}, {target}'s bytes") for recipe in recipes]


def main() -> None:
    record.options(__doc__)
    model, tokenizer = load()
    path = record.results() / "evict.json"
    done = json.loads(path.read_text())["bytes2k"]["rows"] if path.exists() else []
    settings = Settings(context=CONTEXT, new_tokens=192, batch=8, questions=QUESTIONS)
    task = prepare(model, tokenizer, library_text(), settings)
    hays = task.haystacks[: len(task.haystacks) // 4]
    recipes = [*at_bytes_of("kivi", geometry(model)), *at_bytes_of("minikv", geometry(model))]
    present = {"full", *(recipe.name for recipe in recipes)}
    rows = {row["recipe"]: row for row in done if row["recipe"] in present}
    missing = with_full([recipe for recipe in recipes if recipe.name not in rows])
    for recipe, measured in zip(missing, iter_rows(model, missing, task), strict=True):
        row = asdict(measured)
        if measured.problem is None:
            with torch.inference_mode():
                right = sum(
                    run_alone(model, correct_inside(model, tokenizer, recipe, hay, settings.batch))
                    for hay in hays
                )
            row["needle_with"] = right / sum(len(hay.questions) for hay in hays)
            print(
                f"{recipe.name:<48} {row['times_smaller']:5.2f}x smaller, needles "
                f"{row['needle']:6.1%}, asked at the end {row['needle_with']:6.1%}",
                flush=True,
            )
        rows[recipe.name] = row
        environment = record.environment(**asdict(settings), dtype=str(model.dtype))
        record.write(
            "evict", {"bytes2k": {"environment": environment, "rows": list(rows.values())}}
        )


if __name__ == "__main__":
    main()
