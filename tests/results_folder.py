"""Folders of results as `kvloom eval` and kvpress write them, with made-up figures, for tests.

The figures follow simple rules, so that a test can compute what a page must show: a recipe of a
method with quality `q` at share `s` loses (1 - q) * (1 - s) of the score of `full`.
"""

from __future__ import annotations

import csv
import json
import math
import random
from pathlib import Path

METHODS = {
    "kivi": 0.96, "kivi-4": 0.99, "rtn": 0.4, "turbo": 0.97, "skvq": 0.95, "minikv": 0.9,
    "h2o": 0.8, "snapkv": 0.85, "pyramidkv": 0.82, "keyformer": 0.83, "window": 0.5,
    "streaming": 0.55, "clusterkv": 0.98, "quest": 0.93, "random": 0.3,
}  # fmt: skip
SHARES = (1 / 3, 1 / 4, 1 / 5, 1 / 8, 1 / 12)
TASKS = ("perplexity", "free", "niah", "ruler")
HOSTILE = "</script><script>document.title = 'broken'</script> <!-- <b>bold</b> & naïve 日本 @DATA@"
ENVIRONMENT = {
    "python": "3.12.1", "kvloom": "0.1.0", "torch": "2.9.0", "transformers": "5.10.0",
    "cpu": "A processor", "gpu": None, "threads": 1, "dtype": "float32",
    "date": "2026-01-02T03:04:05+00:00",
}  # fmt: skip
TEXT = "the cache holds keys and values of every token that a model has read so far today"
WORDS = TEXT.split()


def recipe_name(method: str, share: float) -> str:
    """A method at a share, as recipes are spelled."""
    return f"{method}:fraction={share:.3f}"


def write_results(
    folder: Path, *, methods=tuple(METHODS), shares=SHARES, tasks=TASKS, samples=12, positions=48,
    length=2048, model="smollm2", context_words=1200, broken="skvq",
) -> Path:  # fmt: skip
    """Write a folder of results; `broken` is a method that fails on every sample."""
    folder.mkdir(parents=True, exist_ok=True)
    recipes = [("full", None, 1.0)]
    recipes += [(recipe_name(m, s), m, s) for m in methods for s in shares]
    head = {
        "format": 1, "environment": ENVIRONMENT,
        "model": {
            "name": model, "weights": "0" * 64, "layers": 30, "heads": 9, "kv_heads": 3,
            "head_dim": 64,
        },
        "settings": {
            "tasks": list(tasks), "recipes": [r[0] for r in recipes], "context": [length],
            "samples": samples, "seed": 0, "budget": None, "bytes": list(shares), "text": "CPython",
        },
    }  # fmt: skip
    (folder / "run.json").write_text(json.dumps(head))
    with (folder / "prompts.jsonl").open("w", encoding="utf-8") as prompts:
        for task in tasks:
            with (folder / f"{task}.jsonl").open("w", encoding="utf-8") as file:
                for i in range(samples):
                    rng = random.Random(f"{task} {i}")
                    prompt = _prompt(task, i, rng, length, context_words)
                    prompts.write(json.dumps(prompt, ensure_ascii=False) + "\n")
                    for name, method, share in recipes:
                        if method == broken:
                            line = {"problem": f"groups of 128 do not fit heads of 64 ({name})"}
                        else:
                            loss = (1 - METHODS.get(method, 1)) * (1 - share)
                            line = _line(
                                task,
                                loss,
                                share,
                                positions,
                                random.Random(f"{task} {i} {name}"),
                                prompt,
                            )
                        line = {"task": task, "sample": prompt["sample"], "recipe": name, **line}
                        file.write(json.dumps(line, ensure_ascii=False) + "\n")
    return folder


def _prompt(task, i, rng, length, words):
    text = " ".join(rng.choice(WORDS) for _ in range(words))
    fields = {"length": length}
    reference = " ".join(rng.choice(WORDS) for _ in range(12))
    question = ""
    if task == "niah":
        fields = {
            "length": length * (1 + i % 3) // 3,
            "depth": (i // 3 % 5) / 4,
            "variant": ("single", "multikey")[i % 2],
        }
    if task in ("niah", "ruler"):
        number = rng.randrange(10_000, 99_999)
        reference, question = str(number), "What is the magic number for copper?"
        text += f" The magic number for copper is {number}."
    if i == 0:
        text, question = f"{HOSTILE} {text}", question + HOSTILE
    return {
        "task": task,
        "sample": f"{task}-{i}",
        "context": text,
        "question": question,
        "reference": reference,
        **fields,
    }


def _line(task, loss, share, positions, rng, prompt):
    exact_bytes = 1_000_000
    line = {
        "kv_bytes": round(share * exact_bytes), "exact_bytes": exact_bytes, "curves": {},
        "tokens": [],
        "seconds": {
            "prefill": 1.6 + loss, "decode": 2.0 * (0.4 + share), "steps": positions,
        },
    }  # fmt: skip
    if task in ("perplexity", "free"):
        exact = random.Random(prompt["sample"])  # the tokens of full, the same for every recipe
        tokens = [f" {exact.choice(WORDS)}" for _ in range(positions)]
        kl = [2 * loss * (0.2 + at / positions) * rng.uniform(0.8, 1.2) for at in range(positions)]
        first = positions
        if task == "perplexity":
            changed = [t if rng.random() > loss else f" {rng.choice(WORDS)}" for t in tokens]
        else:
            first = positions if not loss else min(positions, int(rng.expovariate(loss)))
            changed = tokens[:first] + [f" {rng.choice(WORDS)}" for _ in tokens[first:]]
        line |= {
            "tokens": changed,
            "curves": {"kl": kl},
            "answer": "".join(changed) if task == "free" else "",
        }
        nll = 2.2 + loss + 0.3 * math.sin(hash_of(prompt["sample"]))
        same = sum(a == b for a, b in zip(tokens, changed, strict=True)) / positions
        kl_mean = sum(kl) / positions
        if task == "free":
            line["scores"] = {"diverged_at": first, "kl_mean": kl_mean, "repetition": loss / 2}
        else:
            line["scores"] = {
                "nll": nll, "kl_mean": kl_mean, "kl_median": sorted(kl)[positions // 2],
                "kl_p999": max(kl), "agreement": same,
            }  # fmt: skip
    else:
        right = rng.random() >= loss
        answer = prompt["reference"] if right else str(rng.randrange(10_000, 99_999))
        line |= {
            "answer": f" {answer}.",
            "tokens": [f" {answer[:2]}", answer[2:], "."],
            "scores": {"correct": float(right)},
        }
    return line


def hash_of(text: str) -> int:
    """A number of a text that is the same in every process."""
    return sum(map(ord, text))


def write_kvpress(
    folder: Path, presses=("snapkv", "knorm"), ratios=(0.25, 0.5, 0.75), *, config=True
) -> Path:
    """Write result folders of kvpress' evaluation on RULER, with the exact cache (`no_press`)."""
    runs = [("no_press", 0.0), *((press, ratio) for press in presses for ratio in ratios)]
    for press, ratio in runs:
        place = (
            folder / f"ruler__4096__meta-llama--Meta-Llama-3.1-8B-Instruct__{press}__{ratio:.2f}"
        )
        place.mkdir(parents=True)
        score = 95.5 - 40 * ratio
        metrics = {"niah_single_1": {"string_match": score}, "vt": {"string_match": score - 10}}
        (place / "metrics.json").write_text(json.dumps(metrics, indent=4))
        if config:
            (place / "config.yaml").write_text(
                "dataset: ruler\ndata_dir: '4096'\nmodel: meta-llama/Meta-Llama-3.1-8B-Instruct\n"
                f"device: null\npress_name: {press}\ncompression_ratio: {ratio}\nthreshold: null\n"
                f"fraction: 1.0\nquery_aware: false\nmodel_kwargs: {{}}\nseed: 42\n"
                f"press_init_command: {press.title()}Press(compression_ratio={ratio})\n"
            )
        with (place / "predictions.csv").open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(
                [
                    "task",
                    "answer",
                    "question",
                    "predicted_answer",
                    "compression_ratio",
                    "max_new_tokens",
                ]
            )
            for i, task in enumerate(("niah_single_1", "vt")):
                answer = f"the number is {1000 + i}, says {press}"
                writer.writerow([task, f"['{1000 + i}']", "Which number?", answer, ratio, 128])
    return folder
