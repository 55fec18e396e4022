"""Quality of eviction recipes on the reference model, and their ablations.

Sections: `bytes2k` and `bytes4k` (every recipe with the budget at which its cache, after the
context, has the size of 2-bit KIVI's, and at 2k also that of MiniKV at half the prompt), `noise`
(Keyformer's table 4), `recent` (share of the budget for the newest tokens), `shared` (one score per
layer, or one for all layers), `positions` (original or renumbered), `layers` (MiniKV's policies).
Every row is written as soon as it is measured; a second run continues where the first stopped.

    python benchmarks/evict.py [SECTION …]
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict, replace

import torch

import record
from kvloom.hf import geometry
from kvloom.recipe import Geometry, Recipe, resolve
from kvloom_lab.eval import Settings, iter_rows, load, prepare, with_full
from kvloom_lab.eval.comparison import correct_inside
from kvloom_lab.workload.passes import run_alone
from kvloom_lab.workload.text import library_text

QUESTIONS = 208
NAMES = (
    *("window", "dilated", "streaming", "random", "h2o", "keyformer", "snapkv", "snapkv:kernel=15"),
    *("pyramidkv:kernel=15", "minikv", "minikv-pyramid", "minikv-snap:kernel=15", "kivi"),
)
AT_4K = (
    *("window", "streaming", "h2o", "keyformer", "snapkv:kernel=15", "pyramidkv:kernel=15"),
    *("minikv", "minikv-pyramid", "kivi"),
)
HALF = "fraction=0.5,recent=0.3"


def fitted(name: str, nbytes: int, tokens: int, g: Geometry) -> Recipe | None:
    """Return the recipe with the largest budget whose cache has at most nbytes after a prompt."""
    recipe = resolve(name)
    if recipe.keep is None:
        return recipe
    low, high = 0, tokens
    while high - low > 1:
        middle = (low + high) // 2
        try:
            fits = recipe.with_budget(middle / tokens).nbytes(tokens, g) <= nbytes
        except ValueError:
            fits = True  # too small a budget for its layers
        low, high = (middle, high) if fits else (low, middle)
    fraction = low / tokens
    return replace(recipe.with_budget(fraction), name=f"{name} at {fraction:.3f}")


def named(*specs: str) -> list[Recipe]:
    """Return recipes by name."""
    return [resolve(spec) for spec in specs]


def policies() -> Iterator[Recipe]:
    """Yield MiniKV at 50 % and at 25 %, with every policy of layer budgets."""
    for fraction in (0.5, 0.25):
        for layers in ("uniform", "pyramid", "variance", "inverse-variance"):
            yield resolve(f"minikv:fraction={fraction},layers={layers}")


def at_equal_bytes(
    context: int, g: Geometry, targets: tuple[str, ...], names: tuple[str, ...]
) -> list[Recipe]:
    """Return every recipe at the size of each target recipe's cache right after the context."""
    found = []
    for target in targets:
        nbytes = resolve(target).nbytes(context, g)
        for name in names:
            recipe = fitted(name, nbytes, context, g)
            if recipe is not None and not (name == "kivi" and target == "minikv"):
                found.append(replace(recipe, name=f"{recipe.name}, {target}'s bytes"))
    return found


def sections(g: Geometry) -> dict[str, tuple[int, list[Recipe]]]:
    """Return the context and the recipes of every section."""
    noisy = [f"keyformer:{HALF},{more}" for more in
             ("noise=gumbel", "noise=gaussian", "noise=constant", "noise=none", "fixed=true",
              "noise=none,tau_end=1.0")]  # fmt: skip
    recent = [f"{name}:fraction=0.25,recent={share}" for name in ("h2o", "keyformer")
              for share in (0.0, 0.1, 0.2, 0.3, 0.5, 0.7, 0.9)]  # fmt: skip
    shared = [f"{name}:{HALF},shared={flag}" for name in ("h2o", "keyformer")
              for flag in ("false", "true")]  # fmt: skip
    positions = [f"{name}:tokens=512{more},positions={kind}" for name, more in
                 (("streaming", ""), ("h2o", ""), ("keyformer", ""), ("snapkv", ",kernel=15"))
                 for kind in ("original", "renumbered")]  # fmt: skip
    return {
        "noise": (2048, named(*noisy, f"h2o:{HALF}")),
        "recent": (2048, named(*recent)),
        "shared": (2048, named(*shared)),
        "positions": (2048, named(*positions)),
        "layers": (2048, list(policies())),
        "bytes2k": (2048, at_equal_bytes(2048, g, ("kivi", "minikv"), NAMES)),
        "bytes4k": (3840, at_equal_bytes(3840, g, ("kivi",), AT_4K)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sections", nargs="*", help="default: all")
    parser.add_argument("--fresh", action="store_true", help="measure everything again")
    options = parser.parse_args()
    model, tokenizer = load()
    path = record.results() / "evict.json"
    done = json.loads(path.read_text()) if path.exists() and not options.fresh else {}
    for section, (context, recipes) in sections(geometry(model)).items():
        if options.sections and section not in options.sections:
            continue
        settings = Settings(context=context, new_tokens=192, batch=8, questions=QUESTIONS)
        task = prepare(model, tokenizer, library_text(), settings)
        rows = {row["recipe"]: row for row in done.get(section, {}).get("rows", [])}
        missing = [recipe for recipe in recipes if recipe.name not in rows]
        for recipe, measured in zip(
            with_full(missing), iter_rows(model, missing, task), strict=True
        ):
            if recipe.name == "full":
                full = measured.perplexity
            row = asdict(measured)
            if section.startswith("bytes") and measured.problem is None:
                hays = task.haystacks[: len(task.haystacks) // 4]
                with torch.inference_mode():
                    right = sum(
                        run_alone(
                            model,
                            correct_inside(model, tokenizer, recipe, hay, settings.batch),
                        )
                        for hay in hays
                    )
                row["needle_with"] = right / sum(len(hay.questions) for hay in hays)
            rows[recipe.name] = row
            show(section, row, full)
            done[section] = {
                "environment": record.environment(**asdict(settings), dtype=str(model.dtype)),
                "rows": list(rows.values()),
            }
            record.write("evict", done)


def show(section: str, row: dict, full: float | None) -> None:
    """Print one row."""
    if row["problem"]:
        print(f"{section:>9} {row['recipe']}: {row['problem']}")
        return
    needle_with = f", {row['needle_with']:6.1%} with --ask inside" if "needle_with" in row else ""
    print(
        f"{section:>9} {row['recipe']:<48} {row['times_smaller']:5.2f}x smaller, perplexity "
        f"{row['perplexity'] / full:6.3f}x, agreement {row['agreement']:6.1%}, "
        f"needles {row['needle']:6.1%}{needle_with}",
        flush=True,
    )


if __name__ == "__main__":
    main()
