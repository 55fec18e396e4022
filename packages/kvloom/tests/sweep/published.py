"""The results of the sweep, and the tables that the page docs/guides/architectures.md has of them.

The tables stand between `<!-- sweep -->` and `<!-- end -->`.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

from by_hand import NOT_BUILT, PLAIN_FAILS

RESULTS = Path(__file__).parent / "results"
PAGE = Path(__file__).parents[4] / "docs" / "guides" / "architectures.md"
MARKED = re.compile(r"(<!-- sweep -->\n\n).*?(\n\n<!-- end -->)", re.DOTALL)
GROUPS = "causal", "image-text"
# Each table: its heading, the outcomes in it, and the heading of its column of details.
TABLES = (
    ("Equal", ("equal",), "Layers that kvloom compresses"),
    ("Refused", ("refused",), "Reason"),
    ("Wrong", ("different", "unused", "crash"), "What happens"),
    ("Not compared", ("plain fails", "not built"), "Reason"),
)
PREFIX = re.compile(r"^\w+: (\w+ (cannot be used with kvloom: |(?=cannot be verified)))?")
Records = list[dict[str, Any]]  # of one model: its default form first


def page() -> str:
    """Return the page with the tables of the results between its marks."""
    return MARKED.sub(lambda mark: mark[1] + text(load()) + mark[2], PAGE.read_text())


def load() -> dict[str, dict[tuple[str, str], Records]]:
    """Return the records of each (model type, class) by version of transformers, oldest first."""
    found = {}
    for path in RESULTS.glob("*.json"):
        models: dict[tuple[str, str], Records] = {}
        for record in json.loads(path.read_text())["models"]:
            models.setdefault((record["type"], record["class"]), []).append(record)
        found[path.stem] = models
    return dict(sorted(found.items(), key=lambda item: [int(n) for n in item[0].split(".")]))


def text(results: dict[str, dict[tuple[str, str], Records]]) -> str:
    """Return the counts and the tables as Markdown."""
    versions = list(results)
    newest: dict[tuple[str, str], Records] = {}
    for models in results.values():
        newest |= models
    lines = _counts(results)
    for title, outcomes, column in TABLES:
        chosen = sorted(pair for pair in newest if newest[pair][0]["outcome"] in outcomes)
        if not chosen:
            continue
        others = versions[:-1]
        lines += [
            "",
            f"## {title}",
            "",
            _row("Model type", "Class", column, "Other forms", *others),
        ]
        lines += ["|---" * (4 + len(others)) + "|"]
        for pair in chosen:
            records = newest[pair]
            before = [_in_version(results[version].get(pair), records) for version in versions[:-1]]
            forms = [f"{r['form']}: {_form(r, records[0])}" for r in records[1:]]
            names = (f"`{name}`" for name in pair)
            lines.append(_row(*names, _detail(records[0]), "; ".join(forms), *before))
    return "\n".join(lines)


def _counts(results: dict[str, dict[tuple[str, str], Records]]) -> list[str]:
    """Return a table of how many models have each outcome, by group and version."""
    columns = [(version, group) for version in results for group in GROUPS]
    counted = {
        (version, group): Counter(
            records[0]["outcome"]
            for records in results[version].values()
            if records[0]["group"] == group
        )
        for version, group in columns
    }
    rows = [_row("Outcome", *(f"{group}, {version}" for version, group in columns))]
    rows.append("|---" * (1 + len(columns)) + "|")
    for outcome in (outcome for _, outcomes, _ in TABLES for outcome in outcomes):
        numbers = [counted[column][outcome] for column in columns]
        if any(numbers):
            rows.append(_row(outcome, *map(str, numbers)))
    return [*rows, _row("all", *(str(counted[column].total()) for column in columns))]


def _row(*cells: str) -> str:
    return "| " + " | ".join(cells) + " |"


def _detail(record: dict[str, Any]) -> str:
    """Return the compressed layers of a model, or why there are none."""
    if record["outcome"] != "equal":
        return {**NOT_BUILT, **PLAIN_FAILS}.get(record["type"]) or _reason(record)
    kinds = record["layers"]
    if record["compressed"] == len(kinds):
        return "all"
    share = f"{record['compressed']} of {len(kinds)}" if record["compressed"] else "none"
    return f"{share}: " + ", ".join(f"{n} `{kind}`" for kind, n in Counter(kinds).items())


def _form(record: dict[str, Any], default: dict[str, Any]) -> str:
    """Return the outcome of another form of a model, and why, where that differs."""
    outcome = record["outcome"]
    if outcome == "equal" or record.get("detail") == default.get("detail"):
        return outcome
    return f"{outcome} ({_reason(record)})"


def _reason(record: dict[str, Any]) -> str:
    """Return why a model is refused, or how it differs."""
    if "detail" not in record:
        return f"logits differ by {record['difference']:.0%} of the largest"
    return PREFIX.sub("", record["detail"]).replace("|", "\\|")


def _in_version(records: Records | None, newest: Records) -> str:
    """Return the outcome in another version of transformers."""
    if records is None:
        return "–"
    outcome = records[0]["outcome"]
    if outcome == newest[0]["outcome"]:
        return outcome
    return f"{outcome}: {_detail(records[0])}"
