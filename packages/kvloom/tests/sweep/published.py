"""The results of the sweep, and the lists that the page docs/guides/architectures.md has of them.

The lists stand between `<!-- sweep -->` and `<!-- end -->`.
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
# Each section: its heading, and the outcomes in it.
SECTIONS = {
    "Equal": ("equal",),
    "Refused": ("refused",),
    "Wrong": ("different", "unused", "crash"),
    "Not compared": ("plain fails", "not built"),
}
# What a reason has besides the reason: errors and classes before it, remedies and sizes in it.
BESIDE = re.compile(
    r"^\w+: (\w+ (cannot be used with kvloom: |(?=cannot be verified)))?(layer \d+: )?(\w+Error: )?"
    r"|(?<=cannot be verified: ).*raises .*|;.*|,? of shape.*|,? which kvloom.*|, so this.*"
    r"| by [\d.]+ of.*| of type <.*| of layers [\d-]+"
)
Records = list[dict[str, Any]]  # of one model: its default form first


def page() -> str:
    """Return the page with the lists of the results between its marks."""
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
    """Return the counts and the models by outcome and reason as Markdown."""
    newest: dict[tuple[str, str], Records] = {}
    for models in results.values():
        newest |= models
    lines = _counts(results)
    for title, outcomes in SECTIONS.items():
        chosen = [(name, r[0]) for (name, _), r in newest.items() if r[0]["outcome"] in outcomes]
        if chosen:
            lines += ["", f"## {title}", "", *_grouped(chosen)]
    forms = [
        (name, record)
        for (name, _), (default, *others) in newest.items()
        for record in others
        if record["outcome"] != default["outcome"]
    ]
    if forms:
        lines += ["", "## Forms with another outcome", "", *_grouped(forms, "{form}: {outcome} ")]
    for version, models in list(results.items())[:-1]:
        changed = {
            name
            for (name, kind), records in models.items()
            if records[0]["outcome"] != newest[name, kind][0]["outcome"]
        }
        title = f"## Models with another outcome in transformers {version}"
        lines += ["", title, "", ", ".join(f"`{name}`" for name in sorted(changed))]
    return "\n".join(lines)


def _grouped(records: list[tuple[str, dict[str, Any]]], label: str = "") -> list[str]:
    """Return a list item for each reason, with the model types that it holds for.

    label: a format of a record's fields, to stand before the reason.
    """
    types: dict[str, set[str]] = {}
    for name, record in records:
        reason = f"{label.format(**record)}({_detail(record)})" if label else _detail(record)
        types.setdefault(reason, set()).add(name)
    ordered = sorted(types.items(), key=lambda item: (-len(item[1]), item[0]))
    return [
        f"- {reason}: {', '.join(f'`{name}`' for name in sorted(names))}"
        for reason, names in ordered
    ]


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
    for outcome in (outcome for outcomes in SECTIONS.values() for outcome in outcomes):
        numbers = [counted[column][outcome] for column in columns]
        if any(numbers):
            rows.append(_row(outcome, *map(str, numbers)))
    return [*rows, _row("all", *(str(counted[column].total()) for column in columns))]


def _row(*cells: str) -> str:
    return f"|{'|'.join(cells)}|"


def _detail(record: dict[str, Any]) -> str:
    """Return the layers that kvloom compresses, or why it compresses none."""
    if record["outcome"] != "equal":
        return {**NOT_BUILT, **PLAIN_FAILS}.get(record["type"]) or _reason(record)
    kept = sorted({f"`{kind}`" for kind in record["layers"]} - {"`full_attention`"})
    if record["compressed"] == len(record["layers"]):
        return "all layers"
    if not kept:
        return "some layers"
    return f"{'all layers but' if record['compressed'] else 'none of'} {', '.join(kept)}"


def _reason(record: dict[str, Any]) -> str:
    """Return why a model is refused, or how it differs."""
    if "detail" not in record:
        return f"logits differ by {record['difference']:.0%} of the largest"
    reason = BESIDE.sub("", record["detail"])
    return f"{reason}it needs more than tokens" if reason.endswith(": ") else reason
