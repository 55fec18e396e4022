"""Read and write results of kvpress' evaluation: one folder per press, ratio and data set.

Each folder has `metrics.json`, `predictions.csv` and `config.yaml`. Its name joins the same facts:
`ruler__4096__meta-llama--Meta-Llama-3.1-8B-Instruct__snapkv__0.50`. A compression ratio counts
tokens, not bytes, so shares of these runs are shares of tokens. kvpress writes no score per sample:
the scores are its own means, without an interval. It does not write the contexts.

`write_kvpress` writes kvloom's results in this form. Their ratio counts bytes, as `kv_bytes` and
`exact_bytes` in `config.yaml` say, and they are read as such.
"""

from __future__ import annotations

import csv
import io
import json
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from kvloom.errors import InputError

from ..workload.files import parsed_json, write_whole
from .results import RunResults
from .summary import EXACT, Figures, Interval

_PERCENT = {"ruler", "longbench", "longbench-e", "longbench-v2"}  # kvpress writes 0 to 100
_CONTEXT = "(kvpress does not write the context to its result files)"


def is_kvpress(folder: Path) -> bool:
    """Return whether a folder is a result of kvpress, or contains some."""
    return next(_result_folders(folder), None) is not None


def read_kvpress(folder: Path) -> list[RunResults]:
    """Return the results of kvpress in a folder: one run for each model and length of the data.

    Raises `InputError` for a file that cannot be read.
    """
    runs: dict[tuple[str, str, str], RunResults] = {}
    for place in _result_folders(folder):
        config = _config(place)
        model, length = str(config["model"]), str(config.get("data_dir") or "")
        name = " · ".join(filter(None, ("kvpress", model.rpartition("/")[2], length)))
        counts = "bytes" if "kv_bytes" in config else "tokens"
        run = RunResults(name, counts, {"name": model}, {}, {})
        run = runs.setdefault((model, length, counts), run)
        _read_result(place, config, run)
    return list(runs.values())


def _result_folders(folder: Path) -> Iterator[Path]:
    """Yield the folders with metrics.json: this one, its children, and their repeated runs."""
    for pattern in ("metrics.json", "*/metrics.json", "*/*/metrics.json"):
        yield from (path.parent for path in sorted(folder.glob(pattern)))


def _config(place: Path) -> dict[str, Any]:
    """Return the facts of config.yaml; without one, those in the folder's name."""
    path = place / "config.yaml"
    if path.is_file():
        import yaml

        try:
            config = yaml.safe_load(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
            raise InputError(f"cannot read {str(path)!r} as YAML; run kvpress again") from error
    else:
        name = place.parent.name if place.name.isdigit() else place.name
        config = _config_of_name(name.split("__"))
    needed = ("dataset", "model", "press_name", "compression_ratio")
    if not isinstance(config, dict) or any(key not in config for key in needed):
        raise InputError(
            f"{str(place)!r} has metrics.json, but no config.yaml with {', '.join(needed)}; give a "
            "folder that kvpress' evaluation wrote"
        )
    if not isinstance(config["compression_ratio"], int | float):
        raise InputError(
            f"compression_ratio in {str(place)!r} is {config['compression_ratio']!r}, no number; "
            "run kvpress again"
        )
    return config


def _config_of_name(parts: list[str]) -> dict[str, Any] | None:
    """Return the facts in a name: data set, its directory (optional), model, press, ratio."""
    ratio = next((i for i in range(3, min(5, len(parts))) if _is_number(parts[i])), None)
    if ratio is None:
        return None
    return {
        "dataset": parts[0],
        "data_dir": parts[1] if ratio == 4 else "",
        "model": parts[ratio - 2].replace("--", "/"),
        "press_name": parts[ratio - 1],
        "compression_ratio": float(parts[ratio]),
        "more": parts[ratio + 1 :],
    }


def _is_number(text: str) -> bool:
    return re.fullmatch(r"\d+\.?\d*", text, re.ASCII) is not None


def _read_result(place: Path, config: dict[str, Any], run: RunResults) -> None:
    """Add the figures and the predictions of one folder."""
    path = place / "metrics.json"
    try:
        metrics = parsed_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"cannot read {str(path)!r} as JSON; run kvpress again") from error
    data = str(config["dataset"])
    task = "niah" if data == "needle_in_haystack" else data
    scores = _scores(metrics, data)
    if not scores:
        raise InputError(f"{str(path)!r} contains no number; run kvpress again")
    rows = _predictions(place / "predictions.csv")
    recipe = _recipe_name(config, {f.recipe for f in run.figures if f.task == task})
    run.figures.append(
        Figures(
            task, recipe, samples=len(rows), share=_share(config, rows),
            kv_bytes=config.get("kv_bytes"), exact_bytes=config.get("exact_bytes"),
            scores={name: Interval(x, None, None, len(rows)) for name, x in scores.items()},
        )
    )  # fmt: skip
    press = config.get("press_init_command") or config["press_name"]
    run.settings.setdefault(recipe, str(press))
    for i, row in enumerate(rows):
        sample = f"{row.get('task') or data} {i}"
        prompt = {
            "task": task, "sample": sample, "context": _CONTEXT,
            "question": row.get("question", ""),
            "reference": row.get("answer") or row.get("answers") or row.get("needle") or "",
            "variant": row.get("task", ""),
        }  # fmt: skip
        run.prompts.setdefault(task, {}).setdefault(sample, prompt)
        run.lines.setdefault(task, {})[sample, recipe] = {
            "answer": row.get("predicted_answer") or "", "tokens": [], "curves": {}, "scores": {},
        }  # fmt: skip


def _scores(metrics: Any, data: str) -> dict[str, float]:
    """Return the mean of each metric over its sub-tasks; percentages of known data as 0 to 1."""
    values_by_score: dict[str, list[float]] = {}

    def collect(value: Any, name: str) -> None:
        if isinstance(value, dict):
            for key, inner in value.items():
                collect(inner, str(key) if len(str(key)) > 1 else f"{name}-{key}")
        elif isinstance(value, list):
            for inner in value:
                collect(inner, name)
        elif isinstance(value, int | float) and not isinstance(value, bool) and value == value:
            values_by_score.setdefault(name, []).append(float(value))

    collect(metrics, "score")
    if values_by_score and data in _PERCENT:
        return {"correct": fmean(x for values in values_by_score.values() for x in values) / 100}
    return {name: fmean(values) for name, values in values_by_score.items()}


def _share(config: dict[str, Any], rows: list[dict[str, str]]) -> float | None:
    """Return the share that is kept: of the predictions, else of the configuration."""
    column = [row.get("compression_ratio", "") for row in rows]
    if ratios := [float(text) for text in column if _is_number(text)]:
        return 1 - fmean(ratios)
    if str(config["press_name"]).startswith("decoding"):  # such a press has a size, not a ratio
        return None
    return 1 - float(config["compression_ratio"])


def _recipe_name(config: dict[str, Any], taken: set[str]) -> str:
    """Return a name as kvloom spells recipes; a repeated run gets a number."""
    if config["press_name"] == "no_press":
        name = EXACT
    elif "kv_bytes" in config:
        name = config["press_name"]
    else:
        name = f"{config['press_name']}:compression_ratio={float(config['compression_ratio']):.2f}"
        for option in ("threshold", "key_channel_compression_ratio", "needle_depth"):
            if config.get(option) is not None:
                name += f",{option}={config[option]}"
        if config.get("query_aware"):
            name += ",query_aware"
        if isinstance(more := config.get("more"), list):
            name += "".join(f",{part}" for part in more)
    numbered = (name, *(f"{name} ({i})" for i in range(2, 1000)))
    return next(candidate for candidate in numbered if candidate not in taken)


def _predictions(path: Path) -> list[dict[str, str]]:
    """Return the rows of predictions.csv; none without the file."""
    if not path.is_file():
        return []
    csv.field_size_limit(min(sys.maxsize, 2**31 - 1))
    try:
        with path.open(encoding="utf-8", newline="") as file:
            return [{k: v or "" for k, v in row.items() if k} for row in csv.DictReader(file)]
    except (OSError, ValueError, csv.Error) as error:
        raise InputError(f"cannot read {str(path)!r} as CSV; run kvpress again") from error


def write_kvpress(runs: Sequence[RunResults], folder: Path) -> None:
    """Write results of `kvloom eval` as folders of kvpress' evaluation.

    Recipes are presses, and `full` is `no_press`. Raises `InputError` for results that count
    tokens, a folder of a result that exists, and one that cannot be written.
    """
    texts: dict[Path, dict[str, str]] = {}  # of the files of each folder
    for run in runs:
        if run.counts != "bytes":
            raise InputError(f"{run.name!r} has no bytes; give a folder that 'kvloom eval' wrote")
        for figures in run.figures:
            if figures.share is None:  # it has problems only
                continue
            config = _config_of_figures(figures, run)
            ratio = round(config["compression_ratio"], 2) + 0.0  # not -0.00
            facts = (*list(config.values())[:4], f"{ratio:.2f}")
            place = folder / "__".join(fact.replace("/", "--") for fact in facts)
            if place in texts or place.exists():
                raise InputError(f"{str(place)!r} exists; give a folder without results")
            texts[place] = _texts(figures, run, config)
    try:
        for place, files in texts.items():
            for name, text in files.items():
                write_whole(place / name, text)
    except OSError as error:
        raise InputError(
            f"cannot write to {str(folder)!r}: {error.strerror}; give another folder"
        ) from error


def _config_of_figures(figures: Figures, run: RunResults) -> dict[str, Any]:
    assert figures.share is not None
    return {
        "dataset": figures.task,
        "data_dir": "+".join(map(str, run.settings.get("context", ()))),
        "model": str(run.model["name"]),
        "press_name": "no_press" if figures.recipe == EXACT else figures.recipe,
        "compression_ratio": 1 - figures.share,
        "kv_bytes": figures.kv_bytes,
        "exact_bytes": figures.exact_bytes,
    }


def _texts(figures: Figures, run: RunResults, config: dict[str, Any]) -> dict[str, str]:
    """Return the files of a folder by their names."""
    import yaml

    predictions = io.StringIO(newline="")
    writer = csv.writer(predictions, lineterminator="\n")
    writer.writerow(("task", "question", "answer", "predicted_answer"))
    percent: dict[str, list[float]] = {}  # of each sub-task
    for (sample, recipe), line in run.lines[figures.task].items():
        if recipe == figures.recipe and "scores" in line:
            prompt = run.prompts[figures.task][sample]
            part = str(prompt.get("variant", figures.task))
            texts = prompt.get("question", ""), prompt.get("reference", ""), line.get("answer", "")
            writer.writerow((part, *texts))
            percent.setdefault(part, []).extend(
                100 * score for score in line["scores"].values() if score is not None
            )
    metrics: dict[str, Any] = {name: score.mean for name, score in figures.scores.items()}
    if figures.task in _PERCENT:
        metrics = {part: fmean(scores) for part, scores in percent.items() if scores}
    if figures.task == "ruler":
        metrics = {part: {"string_match": score} for part, score in metrics.items()}
    return {
        "config.yaml": yaml.safe_dump(config, sort_keys=False),
        "metrics.json": json.dumps(metrics, indent=4),
        "predictions.csv": predictions.getvalue(),
    }
