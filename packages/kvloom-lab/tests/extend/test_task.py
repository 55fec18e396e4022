"""A task from another distribution: `kvloom eval` measures it, and a report shows its score."""

from __future__ import annotations

import json
import sys
from importlib import metadata
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvloom.errors import RecipeError
from kvloom.registry import GROUP
from kvloom.registry import registry as plugins
from kvloom_lab.cli.app import app
from kvloom_lab.eval.results import read_run
from kvloom_lab.eval.sample import Task
from kvloom_lab.eval.summary import main_score
from kvloom_lab.eval.tasks import TASKS, Niah, register_task
from kvloom_lab.show.pages import page_data

HERE = Path(__file__).parent


@pytest.fixture
def _installed(monkeypatch):
    """The example as a plugin that is not loaded yet; afterwards it never was."""
    before, others = dict(TASKS._entries), metadata.entry_points
    points = [metadata.EntryPoint("my_task", "my_task", GROUP)]

    def entry_points(**params):
        return points if params.get("group") == GROUP else others(**params)

    monkeypatch.syspath_prepend(HERE)
    monkeypatch.setattr(metadata, "entry_points", entry_points)
    monkeypatch.setattr(plugins, "_state", "new")
    yield
    TASKS._entries = before
    sys.modules.pop("my_task", None)


def run(*args):
    return CliRunner().invoke(app, [str(arg) for arg in args])


def test_the_example_is_short_and_the_documentation_includes_it():
    example = (HERE / "my_task.py").read_text()
    assert len(example.splitlines()) < 40
    page = (HERE.parents[3] / "docs" / "extending.md").read_text()
    assert '```python\n--8<-- "packages/kvloom-lab/tests/extend/my_task.py"\n```\n' in page


@pytest.mark.usefixtures("_installed")
def test_the_command_measures_the_task(here, tmp_path):
    assert "repeat" in run("eval", "--help").stdout
    args = ["eval", "repeat", "--model", here / "model", "--text", here / "text.txt",
            "--samples", 2, "--context", 60, "--max-new-tokens", 8]  # fmt: skip
    found = run(*args, "--recipes", "window:tokens=16", "--out", tmp_path / "out")
    assert found.exit_code == 0, found.output
    lines = [json.loads(x) for x in (tmp_path / "out" / "repeat.jsonl").read_text().splitlines()]
    names = {(line["recipe"], line["sample"]) for line in lines}
    assert names == {(r, f"60/{i}") for r in ("full", "window:tokens=16") for i in range(2)}
    for line in lines:
        assert set(line["scores"]) == {"expected"}
        assert line["scores"]["expected"] in [i / 8 for i in range(9)]
    page = run("report", tmp_path / "out", "--out", tmp_path / "page.html")
    assert page.exit_code == 0, page.output
    (shown,) = page_data([read_run(tmp_path / "out")])[0]["runs"][0]["tasks"]
    assert shown["about"] == "Does the model expect repeated tokens?"
    assert main_score("repeat", ["other", "expected"]) == "expected"
    for name in ("prompts", "repeat"):
        file = tmp_path / "out" / f"{name}.jsonl"
        file.write_text(file.read_text().replace('"repeat"', '"removed"'))
    unknown = run("report", tmp_path / "out", "--out", tmp_path / "page.html")
    assert "results of the task 'removed', which is not installed" in unknown.stderr
    refused = run(*args, "--out", tmp_path / "other", "--data", here / "text.txt")
    assert "repeat takes none" in refused.stderr


@pytest.mark.usefixtures("_installed")
def test_a_variant_of_a_task_without_variants_is_refused(tmp_path):
    found = run("eval", "repeat:twice", "--out", tmp_path)
    assert "the task 'repeat' has no variants" in found.stderr


@pytest.mark.parametrize(
    ("attributes", "says"),
    [
        ({}, "Mine has no name"),
        ({"name": "prompts"}, "is the name of a file of results"),
        ({"name": "niah"}, "'niah' is the name of a built-in task"),
        ({"name": "mine", "positions": Task.positions}, "Mine lacks positions"),
    ],
)
def test_a_task_that_cannot_be_registered(attributes, says):
    methods = {"batches": Niah.batches, "measure": Niah.measure, "positions": Niah.positions}
    with pytest.raises(RecipeError, match=says):
        register_task(type("Mine", (Task,), methods | attributes))
    with pytest.raises(RecipeError, match="is not a task"):
        register_task(type("Mine", (), {"name": "mine"}))
