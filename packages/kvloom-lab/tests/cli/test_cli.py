"""The command line: output, exit codes, and one sentence for every mistake."""

import inspect
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from command_line import run
from transformers import AutoModelForCausalLM

import kvloom
from kvloom.errors import RecipeError
from kvloom.recipe import part_options
from kvloom.recipe.resolve import RECIPES, resolve
from kvloom_lab.cli.options import parse_recipes, split_recipes, with_budget
from kvloom_lab.eval.comparison import ComparisonTask
from kvloom_lab.models import WEIGHTS
from kvloom_lab.recommended import DEFAULT_RECIPE, RECOMMENDED

SMALL = ["--context", "120", "--max-new-tokens", "32", "--batch", "2", "--questions", "2"]


# compare


@pytest.fixture(scope="module")
def by_default(here):
    """What `compare --json -` prints of the recipes that it takes by default."""
    return run("compare", here / "text.txt", "--model", here / "model", *SMALL, "--json", "-")


def test_compare_prints_a_table_and_writes_files(here):
    found = run(
        "compare", here / "text.txt", "--model", here / "model", *SMALL,
        "--recipes", "kivi:group=32,residual=32,window:tokens=64,kivi:group=64",
        "--json", here / "out.json", "--plot", here / "out.png",
    )  # fmt: skip
    assert found.exit_code == 1, found.output
    assert found.stderr.endswith("kvloom: no figures for kivi:group=64; see above\n")
    assert "text.txt" in found.stdout
    assert "kivi:group=64 cannot run: " in found.stdout
    rows = json.loads((here / "out.json").read_text())["rows"]
    names = ["full", "kivi:group=32,residual=32", "window:tokens=64", "kivi:group=64"]
    assert [row["recipe"] for row in rows] == names
    assert all(name in found.stdout for name in names)
    assert [row["problem"] is None for row in rows] == [True, True, True, False]
    assert rows[2]["kv_bytes"] < rows[0]["kv_bytes"]
    assert (here / "out.png").read_bytes().startswith(b"\x89PNG")


def test_json_to_stdout_is_nothing_else(by_default):
    data = json.loads(by_default.stdout)
    methods = [name for name in RECIPES if not part_options(name)]
    assert [row["recipe"] for row in data["rows"]] == methods
    assert data["environment"]["context"] == 120
    assert data["environment"]["batch"] == 2
    assert data["environment"]["text"] == "text.txt"


def test_one_budget_for_all_and_questions_with_the_prompt(here):
    recipes = "h2o,window,quest:page=4,recent=8,full_layers=0,kivi:group=32"
    args = ["--recipes", recipes, "--ask", "inside", "--json", "-"]
    found = run("compare", here / "text.txt", "--model", here / "model", *SMALL, *args,
                "--budget", "0.25")  # fmt: skip
    data = json.loads(found.stdout)
    assert data["environment"]["budget"] == 0.25
    assert data["environment"]["ask"] == "inside"
    assert data["environment"]["without_budget"] == ["full", "kivi:group=32"]
    full, h2o, window, quest, kivi = data["rows"]
    assert h2o["kv_bytes"] < 0.4 * full["kv_bytes"]
    assert window["kv_bytes"] < 0.4 * full["kv_bytes"]
    assert 30 <= quest["tokens_read"] < 34  # of the 120 a quarter, and what is in no page yet
    assert kivi["bits_per_value"] > 3


def test_the_table_says_whose_budget_it_is(here):
    text, model = here / "text.txt", here / "model"
    found = run("compare", text, "--model", model, *SMALL, "--budget", "0.5", "--recipes", "h2o")
    said = " ".join(found.stdout.split())
    assert (
        "budget: 0.5 of the context, to keep, or to read per step for recipes with recall" in said
    )
    assert "without a budget: full." in said


def test_compare_reads_the_library_by_default(here):
    found = run("compare", "--model", here / "model", *SMALL, "--recipes", "full", "--json", "-")
    assert json.loads(found.stdout)["environment"]["text"] == "CPython's library"


@pytest.mark.skipif(not any(WEIGHTS.glob("*.safetensors")), reason="no weights yet")
def test_compare_takes_the_reference_model_by_default():
    args = ["--context", "256", "--max-new-tokens", "32", "--batch", "1", "--questions", "2"]
    found = json.loads(run("compare", *args, "--recipes", "kivi", "--json", "-").stdout)
    full, kivi = found["rows"]
    assert found["environment"]["model"] == "reference"
    assert found["environment"]["dtype"] == "bfloat16"
    assert full["perplexity"] < 100
    assert kivi["bits_per_value"] < full["bits_per_value"]


def test_the_same_seed_gives_the_same_quality(here):
    args = ["compare", here / "text.txt", "--model", here / "model", *SMALL, "--recipes", "rtn",
            "--json", "-", "--seed"]  # fmt: skip
    first, again, other = (json.loads(run(*args, s).stdout)["rows"][1] for s in (1, 1, 2))
    assert first["perplexity"] == again["perplexity"]
    assert first["perplexity"] != other["perplexity"]


def test_a_recipe_of_the_default_list_that_does_not_fit_is_no_failure(by_default):
    rows = json.loads(by_default.stdout)["rows"]
    assert any(row["problem"] for row in rows)
    assert not any(row["failed"] for row in rows)
    assert by_default.exit_code == 0


def test_finished_rows_go_to_stderr_and_the_table_to_stdout(here):
    found = run("compare", here / "text.txt", "--model", here / "model", *SMALL,
                "--recipes", "rtn,window")  # fmt: skip
    lines = [line for line in found.stderr.splitlines() if not line.startswith("kvloom: ")]
    assert [line.partition(":")[0] for line in lines] == ["full", "rtn", "window"]
    assert "x smaller, prefill " in lines[1]
    assert not any(line in found.stdout for line in lines)


@pytest.mark.parametrize("finished", [0, 1])
def test_an_interrupt_leaves_the_finished_rows(here, monkeypatch, tmp_path, finished):
    whole, measured, out = ComparisonTask.measure, [], tmp_path / "out.json"

    def interrupted(task, run):
        if run.batch.timed is not None:  # the text, which comes last
            if len(measured) == finished:
                raise KeyboardInterrupt
            measured.append(run.cache.recipe.name)
        return whole(task, run)

    monkeypatch.setattr(ComparisonTask, "measure", interrupted)
    found = run("compare", here / "text.txt", "--model", here / "model", *SMALL, "--json", out,
                "--recipes", "rtn,window,h2o")  # fmt: skip
    missing = ["full", "rtn", "window", "h2o"][finished:]
    assert found.exit_code == 130
    assert f"kvloom: interrupted; not measured: {', '.join(missing)}" in found.stderr
    if not finished:
        assert found.stdout == ""
        assert not out.exists()
        return
    assert f"not measured: {', '.join(missing)}" in found.stdout
    assert re.search(r"^ full .*\d", found.stdout, re.MULTILINE)
    data = json.loads(out.read_text())
    assert [row["recipe"] for row in data["rows"]] == ["full"]
    assert data["environment"]["missing"] == missing


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (MemoryError(), "there is not enough memory for the tensors of this run"),
        (kvloom.errors.NotFinite("layer 1: NaN"), "layer 1: NaN"),
        (KeyError("a bug"), "KeyError: 'a bug'"),
    ],
)
def test_a_recipe_that_fails_leaves_the_others(here, monkeypatch, caplog, error, said):
    whole = ComparisonTask.measure

    def fails(task, run):
        if run.cache.recipe.name == "rtn":
            raise error
        return whole(task, run)

    monkeypatch.setattr(ComparisonTask, "measure", fails)
    found = run("compare", here / "text.txt", "--model", here / "model", *SMALL, "--json", "-",
                "--recipes", "rtn,window")  # fmt: skip
    assert found.exit_code == 1
    full, rtn, window = json.loads(found.stdout)["rows"]
    assert rtn["problem"].startswith(said)
    assert (rtn["failed"], rtn["perplexity"]) == (True, None)
    assert full["perplexity"] > 1 < window["perplexity"]
    assert f"rtn failed: {said}" in found.stderr
    assert ("Traceback" in caplog.text) == isinstance(error, KeyError)  # of a defect alone


@pytest.mark.parametrize("command", ["compare", "inspect", "analyse attention", "generate"])
def test_new_tokens_are_called_the_same_everywhere(command):
    shown = run(*command.split(), "--help").stdout
    assert "--max-new-tokens" in shown
    assert "--new-tokens" not in shown


def test_a_recipe_file_is_a_recipe_everywhere(here, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    Path("mine.toml").write_text(resolve("kivi:group=16,residual=16").to_toml())
    args = [here / "text.txt", "--model", here / "model"]
    found = run("compare", *args, *SMALL, "--recipes", "mine.toml,rtn", "--json", "-")
    assert [row["recipe"] for row in json.loads(found.stdout)["rows"]] == [
        "full",
        "mine.toml",
        "rtn",
    ]
    assert json.loads(found.stdout)["rows"][1]["bits_per_value"] < 16
    found = run("analyse", "error", *args, "--context", 64, "--recipes", "mine.toml", "--json", "-")
    assert json.loads(found.stdout)["rows"][0]["recipe"] == "mine.toml"
    few = ["--recipe", "mine.toml", "--max-new-tokens", 2]
    assert "mine.toml: 64 tokens" in run("inspect", *args, *few, "--context", 64).stdout
    assert "mine.toml: " in run("generate", "line 7", *args[1:], *few).stderr
    assert run("analyse", "attention", *args, *few, "--context", 64).exit_code == 0
    args = ["--heads", "4/2", "--head-dim", 32, "--context", 64, "--repeats", 1, "--json", "-"]
    found = run("bench", "decode", *args, "--recipes", "mine.toml")
    assert json.loads(found.stdout)["rows"][-1]["ms"] > 0
    page = run("recipes", "mine.toml").stdout
    assert page.startswith("mine.toml: A recipe file.\n")
    assert "residual = 16" in page


def test_the_default_recipe_is_that_of_the_library():
    default = inspect.signature(kvloom.attach).parameters["recipe"].default
    assert default == inspect.signature(kvloom.Cache).parameters["recipe"].default == DEFAULT_RECIPE
    assert set(RECOMMENDED) < set(RECIPES)


@pytest.mark.parametrize("kind", [str, Path])
def test_a_model_takes_a_recipe_file(here, tmp_path, kind):
    path = tmp_path / "mine.toml"
    path.write_text(resolve("rtn:bits=4").to_toml())
    model = AutoModelForCausalLM.from_pretrained(here / "model")
    assert kvloom.Cache(model, kind(path)).recipe.store.keys.bits == 4
    assert kvloom.attach(model, kind(path)).recipe.name == str(path)
    kvloom.detach(model)


@pytest.mark.parametrize(
    ("spec", "parts"),
    [
        ("full,kivi", ["full", "kivi"]),
        ("kivi:bits=4,group=64,rtn", ["kivi:bits=4,group=64", "rtn"]),
        ("rtn, kivi:bits=4 , window:tokens=8", ["rtn", "kivi:bits=4", "window:tokens=8"]),
        ("kivi,bits=4", ["kivi", "bits=4"]),
    ],
)
def test_recipes_are_parted_at_names(spec, parts):
    assert split_recipes(spec) == parts


# recipes


def test_calibrate_writes_what_compare_then_uses(here, tmp_path):
    out, spec = tmp_path / "c.kvcal", "skvq:group=16,window=16"
    arguments = ["calibrate", here / "model", "--text", here / "text.txt", "--out", out,
                 "--samples", "4", "--context", "272", "--recipes", f"{spec},rptq"]  # fmt: skip
    done = run(*arguments)
    assert done.exit_code == 0, done.output
    assert "4 contexts" in done.stdout
    assert [p.name for p in tmp_path.iterdir()] == ["c.kvcal"]
    found = run(
        "compare", here / "text.txt", "--model", here / "model", *SMALL, "--json", "-",
        "--recipes", f"{spec},calibration={out},skvq:group=16",
    )  # fmt: skip
    rows = {row["recipe"]: row for row in json.loads(found.stdout)["rows"]}
    assert rows[f"{spec},calibration={out}"]["bits_per_value"] > 2
    assert "it needs a calibration of this model" in rows["skvq:group=16"]["problem"]


def test_recipes_lists_every_recipe_in_one_line():
    lines = run("recipes").stdout.splitlines()
    for name in RECIPES:
        assert any(line.split()[:1] == [name] for line in lines)
    assert max(map(len, lines)) <= 100


@pytest.mark.parametrize("width", [20, 60, 140])
def test_recipes_are_listed_in_the_columns_there_are(monkeypatch, width):
    monkeypatch.setenv("COLUMNS", str(width))
    shown = run("recipes").stdout
    assert width - 20 <= max(map(len, shown.splitlines())) <= width
    words = set(shown.split())
    assert {*RECIPES, "round-to-nearest", "half"} <= {*words, *(w.lower() for w in words)}


def test_recipes_as_json_have_options_and_defaults():
    found = json.loads(run("recipes", "--json").stdout)
    assert [one["name"] for one in found] == list(RECIPES)
    kivi = next(one for one in found if one["name"] == "kivi")
    assert kivi["options"]["group"] == 32
    assert kivi["summary"].startswith("KIVI")


def test_one_recipe_in_full():
    page = run("recipes", "kivi:bits=4").stdout
    assert "arXiv:2402.02750" in page
    assert "residual=128" in page
    found = json.loads(run("recipes", "kivi:bits=4", "--json").stdout)
    assert found["toml"].rstrip() in page
    recipe = kvloom.Recipe.from_toml(found["toml"])
    assert recipe == resolve("kivi:bits=4") == kvloom.Recipe.from_dict(found["recipe"])
    assert run("recipes", "kivi:bits=4", "--toml").stdout == found["toml"]


# the program


def test_version_and_help():
    assert run("--version").stdout.strip() == f"kvloom {kvloom.__version__}"
    shown = run("--help").stdout
    assert all(verb in shown for verb in ("compare", "generate", "recipes"))


def test_the_command_line_starts_without_torch():
    code = (
        "import sys, kvloom_lab.cli.app; print([m for m in ('torch', 'rich') if m in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def test_python_m_kvloom():
    args = [sys.executable, "-m", "kvloom_lab", "--version"]
    found = subprocess.run(args, capture_output=True, text=True, check=True)
    assert found.stdout.startswith("kvloom ")


def test_a_recipe_that_cannot_have_a_budget_is_left_out_if_nobody_named_it():
    recipes, skipped = parse_recipes("clusterkv-2bit,snapkv"), []
    (found,) = with_budget(recipes, 0.25, 512, skipped.append)
    assert found.keep.budget.fraction == 0.25
    assert skipped == [
        "clusterkv-2bit: a budget of 128 tokens leaves nothing to find beside "
        "144 protected tokens; use 145 or more"
    ]
    with pytest.raises(RecipeError, match="clusterkv-2bit"):
        with_budget(recipes, 0.25, 512)
