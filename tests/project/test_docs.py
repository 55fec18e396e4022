"""What the documentation states of the code and of the results: defaults, names and figures."""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path

import pytest
import typer

from for_each import for_each
from kvloom.cache.saved_state import VERSION
from kvloom.keep import SCORERS
from kvloom.recipe import RECIPES
from kvloom_lab.cli.app import app

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
RESULTS = ROOT / "benchmarks" / "results" / "amd-epyc"


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


# command line

PAGE = DOCS / "reference" / "command-line.md"
GROUPS = "analyse", "bench"


def commands(group=None, name=""):
    """Yield (name, options) of all commands; options: {"--context": default}."""
    found = typer.main.get_command(app) if group is None else group
    for own, command in found.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, f"{own} ")
        else:
            options = [one for one in command.params if one.param_type_name == "option"]
            yield name + own, {one.opts[0]: one.default for one in options}


COMMANDS = dict(commands())


def documented(name):
    """Return {"--context": "`2048`"}: the options that the page has for a command."""
    group, _, own = name.rpartition(" ")
    text = section(PAGE, f"## kvloom {group or own}")
    if not group:
        found = {}
        for cells in rows(text)[2:]:
            names, defaults = cells[0].split(", "), cells[1].split(", ")
            if len(defaults) != len(names):
                defaults = [cells[1]] * len(names)
            names = [re.match("`(--[a-z-]+)", one)[1] for one in names]
            found |= dict(zip(names, defaults, strict=True))
        return found
    header, _, *table = rows(text)
    named = [cells for cells in table if cells[0] == f"`{own}`"]
    prose = [line for line in text.splitlines() if not line.startswith("|")]
    lines = [*(cells[1] for cells in named), *prose]
    found = dict(re.findall("`(--[a-z-]+)(?: ([^` ]+))?`", "\n".join(lines)))
    if not named:
        column = header.index(f"`{own}`")
        found |= {re.match("`(--[a-z-]+)", cells[0])[1]: cells[column] for cells in table}
    return found


def test_the_page_has_every_command():
    pages = re.findall("^## kvloom (.*)$", PAGE.read_text(), flags=re.MULTILINE)
    assert sorted(pages) == sorted({name.split()[0] for name in COMMANDS})


@for_each("name", [name for name in COMMANDS if name != "recipes"])
def test_options_and_defaults_of_a_command(name):
    found = documented(name)
    for_all = PAGE.read_text().partition("\n## ")[0]
    for option, default in COMMANDS[name].items():
        assert option in found or f"`{option}" in for_all, f"{option} is not documented"
        if option not in found:
            continue
        text = found[option].strip("`")
        if default is None:
            assert not re.fullmatch(r"[\d.]+", text), option
            assert found[option] == text, option
        else:
            assert text == ("off" if default is False else str(default)), option
    own = re.findall("`(--[a-z-]+)", section(PAGE, f"## kvloom {name.split()[0]}"))
    group = [options for other, options in COMMANDS.items() if other.split()[0] == name.split()[0]]
    assert set(own) <= set().union(*group), "the page has an option that does not exist"


# recipes


@pytest.mark.parametrize(
    ("page", "heading"), [(ROOT / "README.md", "## Recipes"), (DOCS / "recipes/index.md", "")]
)
def test_the_tables_of_recipes_have_every_recipe(page, heading):
    text = section(page, heading) if heading else page.read_text()
    names = [name for cells in rows(text) for name in re.findall("`([^`]+)`", cells[0])]
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
def figures():
    (found,) = (ROOT / "benchmarks" / "results").glob("*/evidence_smollm2-2k.json")
    return json.loads(found.read_text())["figures"]


def test_the_tables_of_evidence_are_those_of_the_results(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    tables = importlib.import_module("evidence_tables")
    text = tables.PAGE.read_text()
    assert tables.filled(text) == text
    assert {run for _, _, run, _ in tables.MARKED.findall(text)} == {
        "smollm2-2k",
        "smollm2-4k",
        "smollm2-2k-prose",
        "reference-2k",
    }


@pytest.fixture(scope="module")
def found(figures):
    """The figures of perplexity by recipe."""
    return {one["recipe"]: one for one in figures if one["task"] == "perplexity"}


def over_full(found, name):
    """Return the perplexity of a recipe as a multiple of that of `full`."""
    return (
        found[name]["scores"]["perplexity"]["mean"] / found["full"]["scores"]["perplexity"]["mean"]
    )


def test_the_table_of_recommended_recipes_is_that_of_the_results(figures, found):
    needles = {one["recipe"]: one["scores"]["correct"] for one in figures if one["task"] == "niah"}
    table = rows(section(DOCS / "start" / "which-recipe.md", "## Recommended recipes"))
    start = table.index(["Name", "Bytes", "Perplexity", "KL", "Agreement", "Needles of 30"]) + 2
    for cells in table[start:]:
        name = cells[0].strip("`")
        scores, correct = found[name]["scores"], needles[name]
        kl = scores["kl_mean"]["mean"]
        assert cells[1:] == [
            f"{found[name]['share']:.0%}",
            f"{over_full(found, name):.2f}×",
            f"{kl:#.2g}" if kl else "0",
            f"{scores['agreement']['mean']:.0%}",
            f"{correct['mean'] * correct['samples']:.0f}",
        ]
    assert len(table) - start == 5


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
        exec(code, names)
        assert capsys.readouterr().out == printed


def test_perplexities_in_the_readme(found):
    text = " ".join((ROOT / "README.md").read_text().split())
    kivi, balanced = (found[name]["share"] for name in ("kivi", "balanced"))
    assert (
        f"`kivi` has {over_full(found, 'kivi'):.2f}× the perplexity of `full` at {kivi:.0%} of the "
        f"bytes, and `balanced` {over_full(found, 'balanced'):.3f}× at {balanced:.0%}"
    ) in text
