"""What the documentation states of the code and of the results: defaults, names and figures."""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path

import pytest

from kvloom.cache.layer_state import VERSION
from kvloom.keep import SCORERS
from kvloom.kernels import use_backend
from kvloom.recipe import RECIPES

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


def section(page, heading):
    """Return the text below a heading, up to the next one of its level or above."""
    level = heading.index(" ")
    _, found, rest = page.read_text().partition(f"\n{heading}\n")
    assert found, f"{page.name} has no heading {heading!r}"
    return re.split(rf"^#{{1,{level}}} ", rest, maxsplit=1, flags=re.MULTILINE)[0]


def rows(text):
    """Return the cells of every line of Markdown tables."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


# generated tables


@pytest.fixture
def generate(monkeypatch):
    monkeypatch.syspath_prepend(DOCS)
    return importlib.import_module("generate")


def test_the_tables_of_the_reference_are_those_of_the_code(generate):
    for page in generate.PAGES:
        assert generate.filled(page.read_text()) == page.read_text()


def test_the_page_has_every_command(generate):
    text = (DOCS / "reference" / "command-line.md").read_text()
    marked = re.findall(r"^## kvloom (\w+)\n(?:(?!^## ).*\n)*?<!-- options \1 -->$", text, re.M)
    assert sorted(marked) == sorted(generate.COMMANDS)


# recipes


def test_the_table_of_recipes_has_every_recipe():
    table = rows((DOCS / "recipes" / "index.md").read_text())
    names = [name for cells in table for name in re.findall("`([^`]+)`", cells[0])]
    assert sorted(names) == sorted(RECIPES)


def test_the_format_of_a_saved_cache():
    text = section(DOCS / "guides" / "save.md", "## File format")
    assert re.findall(r"format (\d+)", text) == [str(VERSION)]


def test_the_glossary_is_in_alphabetical_order():
    text = (DOCS / "glossary.md").read_text()
    terms = [term.casefold() for term in re.findall(r"^\*\*(.+?)\*\*$", text, re.MULTILINE)]
    assert len(terms) == text.count("\n:   ")
    assert terms == sorted(set(terms))


# published figures


@pytest.fixture(scope="module")
def tables():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "benchmarks")
        return importlib.import_module("evidence_tables")


@pytest.fixture(scope="module")
def figures(tables):
    return tables.published("smollm2-2k-mixed")


def test_the_tables_of_evidence_are_those_of_the_results(tables):
    text = tables.PAGE.read_text()
    assert tables.filled(text) == text
    assert {run for _, _, run, _ in tables.MARKED.findall(text)} == {
        "smollm2-2k",
        "smollm2-4k",
        "smollm2-8k",
        "smollm2-2k-mixed",
        "smollm2-2k-mixed+smollm2-2k-ruler",
        "peers",
        "smollm2-2k-free",
        "smollm2-1k-free",
        "smollm2-2k-other",
        "smollm2-1k-trace",
    }


def test_the_page_of_the_papers_claims_is_that_of_the_results(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    papers_page = importlib.import_module("papers_page")
    data = papers_page.newest()
    assert papers_page.PAGE.read_text() == papers_page.page(data)
    assert papers_page.filled(papers_page.GUIDE.read_text(), data) == papers_page.GUIDE.read_text()


@pytest.fixture(scope="module")
def found(figures):
    """The figures of perplexity by recipe."""
    return {one["recipe"]: one for one in figures if one["task"] == "perplexity"}


def test_the_table_of_recommended_recipes_is_that_of_the_results(tables, figures, found):
    needles = {one["recipe"]: one["scores"]["correct"] for one in figures if one["task"] == "niah"}
    table = rows(section(DOCS / "start" / "which-recipe.md", "## Recommended recipes"))
    start = table.index(["Name", "Bytes", "Perplexity", "KL", "Agreement", "Needles"]) + 2
    for cells in table[start:]:
        name = cells[0].strip("`")
        scores, correct = found[name]["scores"], needles[name]
        kl = scores["kl_mean"]["mean"]
        assert cells[1:] == [
            f"{found[name]['share']:.0%}",
            f"{tables.over_full(found[name]):.2f}×",
            f"{kl:#.2g}" if kl else "0",
            f"{scores['agreement']['mean']:.0%}",
            f"{correct['mean']:.0%}",
        ]
    assert len(table) - start == 6


@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_the_examples_of_the_readme_print_what_it_says(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(SCORERS, "_entries", dict(SCORERS._entries))  # the example adds one
    text = (ROOT / "README.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```\n\n```\n(.*?)```", text, re.DOTALL)
    assert len(blocks) == 2
    names = {"__name__": "readme"}
    for code, printed in blocks:
        with use_backend("auto"):
            exec(code, names)
        assert capsys.readouterr().out == printed


def test_speeds_in_the_readme():
    text = " ".join((ROOT / "README.md").read_text().split())
    files = (
        ROOT / "benchmarks" / "results" / "amd-epyc" / f"bench_{verb}.json"
        for verb in ("generate", "decode")
    )
    model, layer = (
        {
            row["name"]: row
            for row in json.loads(file.read_text())["rows"]
            if row["context"] == 32768
        }
        for file in files
    )
    mib = {name: model[name]["kv_bytes"] / 2**20 for name in ("kivi", "DynamicCache")}
    ms = {name: model[name]["ms"] for name in ("kivi", "full", "DynamicCache")}
    assert (
        f"`kivi` takes {mib['kivi']:.0f} MiB, transformers' own cache {mib['DynamicCache']:.0f}. "
        f"A step takes {ms['kivi']:.0f} ms with `kivi`, {ms['full']:.0f} with kvloom's exact cache "
        f"(`full`) and {ms['DynamicCache']:.0f} with transformers'"
    ) in text
    full = layer["full"]["ms"]
    quest, kivi = (full / layer[name]["ms"] for name in ("quest", "kivi"))
    fast, slow = (layer[name]["ms"] / full for name in ("SDPA bf16 rows", "SDPA bf16"))
    assert (
        f"`quest` {quest:.1f}×, `kivi` {kivi:.1f}×; `full` is {fast:.1f}× as fast as the "
        f"faster of two calls of torch's SDPA in bf16, {slow:.0f}× as fast as the slower"
    ) in text


def test_perplexities_in_the_readme(tables, found):
    text = " ".join((ROOT / "README.md").read_text().split())
    rows = [found[name] for name in ("kivi", "balanced")]
    (kivi, balanced), (most, least) = ([row["share"] for row in rows], map(tables.over_full, rows))
    assert (
        f"`kivi` has {most:.2f}× the perplexity of `full` at {kivi:.0%} of the "
        f"bytes, and `balanced` {least:.3f}× at {balanced:.0%}"
    ) in text
