"""The page of the papers' claims on SmolLM2, docs/assets/papers-smollm2.html, from papers.json.

The guide docs/guides/papers.md has the number of verdicts.

A claim is "not measured yet" if its rule has changed since its measurement, or it has none.

    python benchmarks/papers_page.py   # writes the page
"""

from __future__ import annotations

import json
import re
from collections import Counter
from html import escape
from pathlib import Path
from typing import Any

from kvloom_lab.papers import PAPERS, Claim
from kvloom_lab.papers.claim import NOT_REPRODUCED, NOT_TESTABLE, STYLES, Verdict
from kvloom_lab.papers.tables import verdict_data

ROOT = Path(__file__).parent.parent
GUIDE = ROOT / "docs" / "guides" / "papers.md"
COUNTS = re.compile(r"(<!-- verdicts -->\n).*?(\n<!-- end -->)", re.DOTALL)
PAGE = ROOT / "docs" / "assets" / "papers-smollm2.html"
NOT_MEASURED = "not measured yet"
COLORS = {"green": "#1a7f37", "red": "#b3261e", "yellow": "#9a6700", "dim": "#6e7781"}
STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 76rem;
  padding: 0 1rem; color-scheme: light dark }
table { border-collapse: collapse } td, th { text-align: left; vertical-align: top; padding: .3rem }
.claims > tbody > tr > td, .claims > tbody > tr > th { border-top: 1px solid #8886; padding: .6rem }
.figures { font-size: .8rem } .figures td, .figures th { padding: 0 .5rem 0 0 }
small { color: #777 }
"""


def newest() -> dict[str, Any]:
    """Return the published verdicts, of one machine."""
    [path] = (ROOT / "benchmarks" / "results").glob("*/papers.json")
    return json.loads(path.read_text())


def figures(table: dict[str, Any] | None) -> str:
    """Return a small table of figures."""
    if table is None:
        return ""

    def cell(x: Any) -> str:
        return "" if x is None else escape(f"{x:.4g}" if isinstance(x, float) else str(x))

    head = "".join(f"<th>{escape(str(name))}</th>" for name in ("", *table["columns"]))
    rows = "".join(
        f"<tr><th>{escape(name)}</th>{''.join(f'<td>{cell(x)}</td>' for x in cells)}</tr>"
        for name, cells in table["rows"].items()
    )
    return f'<table class="figures"><tr>{head}</tr>{rows}</table>'


def known(paper: str, claim: Claim, verdicts: dict[str, Any]) -> dict[str, Any]:
    """Return the verdict of a claim as data, as it was measured by the rule of today."""
    row = verdicts.get(paper, {}).get(claim.name)
    if claim.test is None:
        verdict = Verdict(claim, NOT_TESTABLE, explanation=claim.why_not_testable)
    else:
        verdict = Verdict(claim, NOT_MEASURED)
    if row is None or row["rule"] != claim.rule:
        [row] = verdict_data(paper, [verdict], {})["claims"]
    if row["status"] == NOT_REPRODUCED:
        row = {**row, "reason": claim.why_not_on_smollm2 or row["reason"]}
    return row


def row_of(row: dict[str, Any]) -> str:
    """Return a claim as a row of the table of its paper."""
    color = COLORS[STYLES.get(row["status"], "dim")]
    notes = [
        f"<small>rule: {escape(row['rule'])}</small>" if row["rule"] else "",
        escape(row["evidence"]),
        escape(row["reason"]),
    ]
    cells = (
        f"<b>{escape(row['name'])}</b><br>{escape(row['claim'])}"
        f"<br><small>{escape(row['where'])}</small>",
        figures(row["paper"]),
        figures(row["ours"]),
        f'<b style="color: {color}">{escape(row["status"])}</b>',
        "<br>".join(filter(None, notes)),
    )
    return f"<tr>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"


def rows_of(paper: str, data: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the verdicts of a paper's claims as data."""
    return [known(paper, claim, data["verdicts"]) for claim in PAPERS[paper][1]]


def page(data: dict[str, Any]) -> str:
    """Return the page of all claims."""
    about = data["environment"]
    head = "<tr><th>Claim<th>Paper<th>SmolLM2<th>Verdict<th>Rule, measurement, cause</tr>"
    tables = "".join(
        f"<h2>{escape(title)}</h2>\n<table class='claims'><tbody>{head}\n"
        + "\n".join(map(row_of, rows_of(paper, data)))
        + "</tbody></table>\n"
        for paper, (title, _) in PAPERS.items()
    )
    return (
        f"<!doctype html>\n<html lang='en'><meta charset='utf-8'><title>The papers' claims on "
        f"SmolLM2</title>\n<style>{STYLE}</style>\n<h1>The papers' claims on SmolLM2</h1>\n"
        f"<p>SmolLM2-135M-Instruct, {escape(about['dtype'])}, {about['context']:,} tokens, "
        f"{about['samples']} samples, {about['long_context']:,} tokens for recall, on an "
        f"{escape(about['cpu'])}: <code>python benchmarks/papers.py --quick</code>. Verdicts on a "
        "small model neither confirm nor refute what a paper measured on a large one.</p>\n"
        f"{tables}"
        "</html>\n"
    )


def filled(text: str, data: dict[str, Any]) -> str:
    """Return the text of the guide with the number of verdicts."""
    names = (*STYLES, NOT_MEASURED)
    counts = {p: Counter(row["status"] for row in rows_of(p, data)) for p in PAPERS}
    shown = [name for name in names if any(by[name] for by in counts.values())]
    lines = [f"|Paper|{'|'.join(shown)}|", f"|---|{'---|' * len(shown)}"]
    lines += [f"|{p}|{'|'.join(str(by[name]) for name in shown)}|" for p, by in counts.items()]
    return COUNTS.sub(lambda found: found[1] + "\n" + "\n".join(lines) + "\n" + found[2], text)


if __name__ == "__main__":
    PAGE.write_text(page(newest()))
    GUIDE.write_text(filled(GUIDE.read_text(), newest()))
