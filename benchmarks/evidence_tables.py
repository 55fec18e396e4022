"""The tables of docs/internals/evidence.md, from the published results.

    python benchmarks/evidence_tables.py   # writes them into the page

A table stands between the comments `<!-- KIND RUN -->` and `<!-- end -->`, where KIND is one of
`KINDS`.
"""

from __future__ import annotations

import gzip
import json
import math
import re
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "internals" / "evidence.md"
MARKED = re.compile(r"(<!-- (\w+) (\S+) -->\n\n).*?(\n\n<!-- end -->)", re.DOTALL)


def table(figures: list[dict]) -> str:
    """Return perplexity and needles as a Markdown table, by bytes; KL with its interval."""
    rows = [f for f in figures if f["task"] == "perplexity" and f["scores"]]
    needles = {f["recipe"]: f["scores"].get("correct") for f in figures if f["task"] == "niah"}
    lines = [
        "|Recipe|Bytes|Perplexity|KL, mean|Agreement|Needles|",
        "|---|---|---|---|---|---|",
    ]
    for row in sorted(rows, key=lambda f: -f["share"]):
        s, found = row["scores"], needles.get(row["recipe"])
        lines.append(
            f"|`{row['recipe']}`|{row['share']:.1%}|{over_full(row):.3f}×|"
            f"{_interval(s['kl_mean'])}|{s['agreement']['mean']:.1%}|"
            f"{'' if found is None else format(found['mean'], '.0%')}|"
        )
    return "\n".join(lines)


def over_full(row: dict) -> float:
    """Return the perplexity of a row as a multiple of that of `full` on the same machine."""
    return math.exp(row["over_full"].get("nll", {"mean": 0.0})["mean"])


def free(figures: list[dict]) -> str:
    """Return the scores of free-running generation as a Markdown table, by bytes."""
    lines = [
        "|Recipe|Bytes|Free-running KL|Tokens until it differs|",
        "|---|---|---|---|",
    ]
    for row in sorted((f for f in figures if f["task"] == "free"), key=lambda f: -f["share"]):
        kl, tokens = (_interval(row["scores"][name]) for name in ("kl_mean", "diverged_at"))
        lines.append(f"|`{row['recipe']}`|{row['share']:.1%}|{kl}|{tokens}|")
    return "\n".join(lines)


def other(figures: list[dict]) -> str:
    """Return rules, passwords and changing state as a Markdown table, by bytes."""
    columns = {
        ("instructions", "followed"): "Rules followed",
        ("instructions", "as_full"): "Outcomes as `full`",
        ("instructions", "kl_mean"): "KL of the answer",
        ("instructions", "as_full_secret"): "Password as `full`",
        ("state", "correct"): "Last value",
    }
    return _scores(figures, columns)


def trace(figures: list[dict]) -> str:
    """Return the divergence along a text of the exact model as a Markdown table, by bytes."""
    titles = {
        "kl_mean": "KL, mean",
        "agreement": "Agreement",
        "kl_p999": "99.9th percentile",
        "kl_slope": "Slope per 1,000 tokens",
    }
    return _scores(figures, {("trace", name): title for name, title in titles.items()})


def _scores(figures: list[dict], columns: dict[tuple[str, str], str]) -> str:
    """Return means of some scores, and where they are worse than those of `full`.

    columns: titles by task and score.
    """
    tasks = {task for task, _ in columns}
    scored = {(f["task"], f["recipe"]): f for f in figures if f["task"] in tasks and f["scores"]}
    shares = {name: row["share"] for (_, name), row in scored.items()}
    lines = [f"|Recipe|Bytes|{'|'.join(columns.values())}|", f"|---|---|{'---|' * len(columns)}"]
    for name in sorted(shares, key=lambda name: -shares[name]):
        cells = (_mean(scored.get((task, name)), score) for task, score in columns)
        lines.append(f"|`{name}`|{shares[name]:.1%}|{'|'.join(cells)}|")
    return "\n".join(lines)


def _mean(row: dict | None, score: str) -> str:
    """Return the mean of a score; "" if unknown; "worse" if `full` answers better itself."""
    if row is None or score not in row["scores"]:
        return ""
    over = row["over_full"].get(score, {}) if score in ("followed", "correct") else {}
    worse = over.get("verdict") == "worse"
    return format(row["scores"][score]["mean"], ".3g") + " worse" * worse


def short(samples: list[dict]) -> str:
    """Return the mean divergence after short prompts as a Markdown table, by their tokens."""
    by_length: dict[tuple[str, int], list[float]] = {}
    for line in samples:
        if line["task"] == "short" and line.get("scores"):
            tokens = int(line["sample"].split("/")[1])  # kind/tokens/number
            by_length.setdefault((line["recipe"], tokens), []).append(line["scores"]["kl_mean"])
    lengths = sorted({tokens for _, tokens in by_length})
    lines = [f"|Recipe|{'|'.join(map(str, lengths))}|", f"|---|{'---|' * len(lengths)}"]
    for name in dict.fromkeys(name for name, _ in by_length):
        means = (sum(x) / len(x) for x in (by_length[name, tokens] for tokens in lengths))
        lines.append(f"|`{name}`|{'|'.join(format(x, '.4f') for x in means)}|")
    return "\n".join(lines)


FEWEST = 30  # samples of a row of `needles`
MORE_TASKS = {"Δ turns": "multiturn", "Δ RULER": "ruler"}


def needles(figures: list[dict]) -> str:
    """Return how recipes differ from `full` on texts and questions, as a Markdown table.

    Needles have the mean, and the pairs won and lost. A Δ is a mean difference, because recipes may
    have different samples of a task.
    """
    scored = {(f["task"], f["recipe"]): f for f in figures if f["scores"]}
    more = [title for title, task in MORE_TASKS.items() if any(x == task for x, _ in scored)]
    titles = ["Recipe", "Bytes", "KL, mean", "Perplexity", "Verdict"]
    titles += ["Needles", "Won", "Lost", "Verdict"]
    titles += [title for name in more for title in (name, "Verdict")]
    lines = [f"|{'|'.join(titles)}|", f"|{'---|' * len(titles)}"]
    rows = [f for (task, _), f in scored.items() if task == "niah" and f["samples"] >= FEWEST]
    for row in sorted(rows, key=lambda f: -f["share"]):
        name = row["recipe"]
        cells = [f"`{name}`", f"{row['share']:.1%}"]
        if text := scored.get(("perplexity", name)):
            divergence = _interval(text["scores"]["kl_mean"])
            cells += [divergence, f"{over_full(text):.3f}×", *_over_full(text, "nll", ("verdict",))]
        else:
            cells += ["", "", ""]
        cells.append(_interval(row["scores"]["correct"]))
        cells += _over_full(row, "correct", ("won", "lost", "verdict"))
        for title in more:
            other = scored.get((MORE_TASKS[title], name))
            cells += _over_full(other, "correct", ("mean", "verdict"))
        lines.append(f"|{'|'.join(cells)}|")
    return "\n".join(lines)


def _over_full(row: dict | None, score: str, names: Sequence[str]) -> list[str]:
    """Return parts of the difference from `full`, each "" if it is unknown."""
    over = row and row["over_full"].get(score)
    if not over:
        return [""] * len(names)
    return [f"{over[x]:+.3f}" if isinstance(over[x], float) else f"{over[x]}" for x in names]


def peers(figures: list[dict]) -> str:
    """Return the needles that peers and recipes find as a Markdown table, by bytes if freed."""
    lines = [
        "|Peer or recipe|Bytes|If freed|Needles|Beside|Won|Lost|Verdict|",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in sorted(figures, key=lambda f: -f.get("freed_share", f["share"])):
        found, name, cells = row["scores"]["correct"], f"`{row['recipe']}`", ["", "", "", ""]
        freed = ""
        if "beside" in row:  # a peer
            name, freed, over = row["recipe"], f"{row['freed_share']:.1%}", row["over_beside"]
            cells = [f"`{row['beside']}`", over["won"], over["lost"], over["verdict"]]
        bounds = ""
        if found["low"] is not None:
            bounds = f" [{100 * found['low']:.0f}–{found['high']:.0%}]"
        lines.append(
            f"|{name}|{row['share']:.1%}|{freed}|{found['mean']:.0%}{bounds}|"
            f"{'|'.join(map(str, cells))}|"
        )
    return "\n".join(lines)


def _interval(score: dict) -> str:
    low, high = score["low"], score["high"]
    bounds = "" if low is None else f" [{low:.3g}, {high:.3g}]"
    return f"{score['mean']:.3g}{bounds}"


def table_by_kind(rows: list[dict]) -> str:
    """Return the divergence of each recipe on each kind of text as a Markdown table, by bytes.

    rows: figures with their `kind`.
    """
    scored = [row for row in rows if "kl_mean" in row["scores"]]
    kinds = list(dict.fromkeys(row["kind"] for row in scored))
    cells = {
        (x["recipe"], x["kind"]): format(x["scores"]["kl_mean"]["mean"], ".3g") for x in scored
    }
    shares = {row["recipe"]: row["share"] for row in scored}
    lines = [f"|Recipe|Bytes|{'|'.join(kinds)}|", f"|---|---|{'---|' * len(kinds)}"]
    for name in sorted(shares, key=lambda name: -shares[name]):
        row = "|".join(cells.get((name, kind), "") for kind in kinds)
        lines.append(f"|`{name}`|{shares[name]:.1%}|{row}|")
    return "\n".join(lines)


KINDS = {  # of tables, each from a part of the results
    "table": (table, "figures"),
    "free": (free, "figures"),
    "needles": (needles, "figures"),
    "peers": (peers, "figures"),
    "other": (other, "figures"),
    "trace": (trace, "figures"),
    "kinds": (table_by_kind, "by_kind"),
    "short": (short, "samples"),
}


def published(run: str, part: str = "figures") -> list[dict]:
    """Return a part of the published results of a run: a recipe on a task is from one machine.

    Each machine compares with the exact cache of its own; the table shows one of them. run: of
    "one+other", other has the tasks that both have. part: "samples" are those of one machine.
    """
    if part == "samples":
        return published_samples(run)
    if "+" in run:
        one, other = (published(name, part) for name in run.split("+"))
        tasks = {row["task"] for row in other}
        return [*(row for row in one if row["task"] not in tasks), *other]
    machines: dict[tuple[str, str], str] = {}
    figures = []
    for file in sorted(RESULTS.glob(f"*/evidence_{run}.json")):
        machine = file.parent.name
        for row in json.loads(file.read_text())[part]:
            key = row["task"], row["recipe"]
            first = machines.setdefault(key, machine)
            if first == machine:
                figures.append(row)
            elif row["recipe"] != "full":
                sys.exit(f"{first} and {machine} both have figures of {run}, {key[1]} on {key[0]}")
    if not figures:
        sys.exit(f"no machine has published figures of {run}")
    return figures


def published_samples(run: str) -> list[dict]:
    """Return the published samples of a run, of one machine."""
    files = sorted(RESULTS.glob(f"*/evidence_{run}.samples.jsonl.gz"))
    if not files:
        sys.exit(f"no machine has published samples of {run}")
    return read_samples(files[0])


def read_samples(file: Path) -> list[dict]:
    """Return the samples of a file that `record.write_samples` wrote."""
    return [json.loads(line) for line in gzip.decompress(file.read_bytes()).splitlines()]


def filled(text: str) -> str:
    """Return the text of a page with its tables as the results are."""

    def new(match: re.Match[str]) -> str:
        show, part = KINDS[match[2]]
        return f"{match[1]}{show(published(match[3], part))}{match[4]}"

    return MARKED.sub(new, text)


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text()))
