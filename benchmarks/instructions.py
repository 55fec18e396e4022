"""A protected system prompt, against the same recipe without: is it obeyed, what is lost?

Each file recipes/*-system-smollm2.toml is the recipe in front, whose system prompt stays. Figures
of the task `instructions` are those of a folder of `kvloom eval`. `text_kl` is the divergence from
`full` of the 64 tokens that follow such a prompt in its own text. A difference is that of the two
recipes on the same samples, with its 95% interval.

    cd benchmarks/recipes
    kvloom eval instructions --model smollm2 --context 2048 --samples 24 --max-new-tokens 64 \\
        --share 0.125 --out /tmp/instructions --recipes rotated,rotated-system-smollm2.toml,\\
        kvzip,kvzip-system-smollm2.toml,snapkv,snapkv-system-smollm2.toml
    python ../instructions.py --folder /tmp/instructions
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import torch

import kvloom
import record
from evaluation import recipe_of
from kvloom.hf import Follower, geometry, prefill_many
from kvloom.recipe import resolve
from kvloom_lab.eval.decoding import divergence
from kvloom_lab.eval.evaluate import at_share
from kvloom_lab.eval.results import read_run
from kvloom_lab.eval.sample import Source
from kvloom_lab.eval.summary import Interval, bootstrap
from kvloom_lab.eval.tasks import task_named
from kvloom_lab.models import load
from kvloom_lab.workload.text import library_text

PROTECTED = "-system-smollm2.toml"
SCORES = "followed", "as_full", "kl_mean", "kept_secret", "as_full_secret"
CONTEXT, FOLLOWING = 2048, 64
Values = dict[tuple[str, str], dict[str, float]]
"""Values of a recipe and a score, by sample."""


@torch.inference_mode()
def text_divergences(samples: int) -> Values:
    """Return the mean divergences of the text that follows the prompts."""
    model, tokenizer = load("smollm2")
    names = [f"{name}{end}" for name in ("rotated", "kvzip", "snapkv") for end in ("", PROTECTED)]
    recipes = {
        f"{name} at 0.125": at_share(recipe_of(name), 1 / 8, CONTEXT, geometry(model))
        for name in names
    }
    source = Source.of(
        tokenizer, library_text(), lengths=[CONTEXT + FOLLOWING], samples=samples, new_tokens=1,
        batch=1, seed=0,
    )  # fmt: skip
    values: Values = {}
    for batch in task_named("instructions").batches(source):
        exact = kvloom.Cache(model, resolve("full"))
        followers = {name: Follower(kvloom.Cache(model, x)) for name, x in recipes.items()}
        prefill_many(model, exact, list(followers.values()), input_ids=batch.ids[:, :CONTEXT])
        logs = {}
        for name, cache in {"full": exact, **{n: f.cache for n, f in followers.items()}}.items():
            logits = model(batch.ids[:, CONTEXT:], past_key_values=cache).logits
            logs[name] = logits.float().log_softmax(dim=-1)
        sample = batch.samples[0].name
        for name in recipes:
            found = divergence(logs["full"], logs[name]).mean().item()
            values.setdefault((name, "text_kl"), {})[sample] = found
            print(f"{sample} {name:<40} text_kl {found:.4f}", flush=True)
    return values


def main() -> None:
    options = record.options(__doc__, folder="/tmp/instructions", text_samples=24)
    run = read_run(Path(options.folder))
    values: Values = {}
    for (sample, recipe), line in run.lines["instructions"].items():
        for score in SCORES:
            if score in line["scores"]:
                values.setdefault((recipe, score), {})[sample] = line["scores"][score]
    values |= text_divergences(options.text_samples)
    rows = []
    for (recipe, score), found in values.items():
        plain = values.get((recipe.replace(PROTECTED, ""), score), {})
        gain = [x - plain[sample] for sample, x in found.items()] if PROTECTED in recipe else []
        mean, over = bootstrap(list(found.values())), bootstrap(gain) if gain else None
        row = {"recipe": recipe, "score": score, "mean": asdict(mean)}
        rows.append(row | ({} if over is None else {"over_plain": asdict(over)}))
        print(f"{recipe:<40} {score:<15} {shown(mean)}  {'' if over is None else shown(over)}")
    environment = {**run.environment, "text_samples": options.text_samples}
    record.write(
        "instructions", {"environment": environment, "settings": run.settings, "rows": rows}
    )


def shown(interval: Interval) -> str:
    """Return a mean with its interval."""
    return f"{interval.mean:.3f} [{interval.low:.3f}, {interval.high:.3f}] of {interval.samples}"


if __name__ == "__main__":
    main()
