"""`kvloom check`: its table, its JSON and its exit code."""

import json

from command_line import run

from kvloom_lab.analyse import modes


def test_check_prints_a_table_and_writes_json(here):
    found = run("check", here / "model", "--recipe", "full", "--json", here / "check.json")
    assert found.exit_code == 0, found.output
    assert "beams" in found.output
    data = json.loads((here / "check.json").read_text())
    assert {mode["result"] for mode in data["modes"]} == {"equal"}
    assert data["class"] == "LlamaForCausalLM"


def test_a_difference_makes_the_exit_code_1(here, monkeypatch):
    monkeypatch.setattr(modes, "rounding_tolerance", lambda *_: -1.0)
    found = run("check", here / "model", "--recipe", "full")
    assert found.exit_code == 1
    assert "different" in found.output


def test_a_recipe_that_does_not_fit_is_refused(here):
    found = run("check", here / "model", "--recipe", "kivi:group=64")
    assert found.exit_code == 2
    assert "group=64 does not divide" in found.output
