"""report: folders of kvloom eval and of kvpress become one page that no text can break."""

from __future__ import annotations

import base64
import gzip
import json
import math
import re
import shutil

import pytest
from typer.testing import CliRunner

from html_elements import parse
from kvloom.errors import InputError
from kvloom_lab.cli.app import app
from kvloom_lab.eval.kvpress import is_kvpress, read_kvpress
from kvloom_lab.eval.results import read_run
from kvloom_lab.show.pages import page_data, results_page, shorten
from results_folder import HOSTILE, recipe_name, write_kvpress, write_results

FEW = {"methods": ("kivi", "h2o", "skvq"), "shares": (1 / 4, 1 / 8), "samples": 6, "positions": 20}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_results(tmp_path_factory.mktemp("results") / "small", **FEW)


@pytest.fixture(scope="module")
def made(folder):
    summary, chunks = page_data([read_run(folder)])
    return summary, chunks, results_page(summary, chunks)


@pytest.fixture
def copy(folder, tmp_path):
    return shutil.copytree(folder, tmp_path / "copy")


def run(*args):
    return CliRunner().invoke(app, ["report", *map(str, args)])


def task_of(summary, name, i=0):
    return next(task for task in summary["runs"][i]["tasks"] if task["name"] == name)


def samples_of(chunks, task):
    return [
        s
        for _, i in task["chunks"]
        for s in json.loads(gzip.decompress(base64.b64decode(chunks[i])))
    ]


# the page


def test_the_page_contains_the_data_and_nothing_else_runs(made):
    summary, chunks, html = made
    found = parse(html)
    scripts = [attrs for tag, attrs in found.tags if tag == "script"]
    packed = [{"type": "text/plain", "id": f"chunk{i}"} for i in range(len(chunks))]
    assert scripts == [{"type": "application/json", "id": "data"}, *packed, {}]
    assert json.loads(found.scripts[0]) == summary
    assert [text.strip() for text in found.scripts[1:-1] if text.strip()] == chunks


def test_no_text_can_end_its_script(tmp_path):
    folder = write_results(tmp_path / HOSTILE.replace("/", "_"), **FEW)
    head = json.loads((folder / "run.json").read_text())
    head["model"]["name"] = head["settings"]["text"] = HOSTILE
    (folder / "run.json").write_text(json.dumps(head))
    summary, chunks = page_data([read_run(folder)])
    found = parse(results_page(summary, chunks))
    assert len([tag for tag, _ in found.tags if tag == "script"]) == 2 + len(chunks)
    assert json.loads(found.scripts[0])["runs"][0]["model"]["name"] == HOSTILE


def test_the_page_loads_nothing(made):
    found = parse(made[2])
    assert not {"link", "img", "iframe", "base", "object", "embed"} & {tag for tag, _ in found.tags}
    sources = [
        a for _, attrs in found.tags for a in attrs.items() if a[0] in ("src", "href", "srcset")
    ]
    assert sources == [("href", "#quality")]
    code = re.sub(r'<script type="[^"]*" id=.*?</script>', "", made[2], flags=re.S)
    assert not re.search(r"https?://|//[a-z]|@import|url\(|fetch\(|XMLHttp|import\(", code)
    policy = next(a["content"] for t, a in found.tags if t == "meta" and "http-equiv" in a)
    assert policy.startswith("default-src 'none'")


def test_the_figures_are_those_of_the_lines(folder, made):
    task = task_of(made[0], "niah")
    lines = [json.loads(text) for text in (folder / "niah.jsonl").read_text().splitlines()]
    name = recipe_name("h2o", 1 / 8)
    row = next(row for row in task["rows"] if row["recipe"] == name)
    mine = [line["scores"]["correct"] for line in lines if line["recipe"] == name]
    assert row["values"] == mine
    assert row["scores"]["correct"][0] == pytest.approx(sum(mine) / 6, rel=1e-4)
    assert row["share"] == 0.125
    assert task["samples"] == [f"niah-{i}" for i in range(6)]
    assert len(task["fields"]["depth"]) == 6
    broken = next(row for row in task["rows"] if row["recipe"].startswith("skvq"))
    assert (broken["samples"], broken["problems"], broken["scores"]) == (0, 6, {})
    assert "groups of 128" in broken["problem"]
    front = {task["rows"][i]["recipe"] for i in task["fronts"]["correct"]}
    assert front
    assert not any(name.startswith("skvq") for name in front)


def test_a_curve_is_the_mean_over_samples(folder, made):
    lines = [json.loads(text) for text in (folder / "free.jsonl").read_text().splitlines()]
    name = recipe_name("kivi", 1 / 4)
    curves = [line["curves"]["kl"] for line in lines if line["recipe"] == name]
    row = next(r for r in task_of(made[0], "free")["rows"] if r["recipe"] == name)
    at, means = row["curves"]["kl"]
    assert at == list(range(20))
    assert means == pytest.approx([sum(c[i] for c in curves) / 6 for i in range(20)], rel=1e-4)


def test_curves_of_different_lengths_and_long_ones(copy):
    lines = [json.loads(text) for text in (copy / "free.jsonl").read_text().splitlines()]
    mine = [line for line in lines if line["recipe"] == recipe_name("h2o", 1 / 4)]
    for i, line in enumerate(mine):
        line["curves"]["kl"] = [float(at) for at in range(1000 if i == 0 else 400)]
    (copy / "free.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    task = task_of(page_data([read_run(copy)])[0], "free")
    at, means = next(r for r in task["rows"] if r["recipe"] == mine[0]["recipe"])["curves"]["kl"]
    assert len(at) <= 160
    assert means == pytest.approx(at, rel=1e-4)  # the mean of a step is the value at its middle
    assert at[-1] > 990


def test_every_text_is_there_once(folder, made):
    summary, chunks, _ = made
    for name in ("niah", "free", "perplexity"):
        task = task_of(summary, name)
        lines = [json.loads(x) for x in (folder / f"{name}.jsonl").read_text().splitlines()]
        prompts = [json.loads(x) for x in (folder / "prompts.jsonl").read_text().splitlines()]
        samples = samples_of(chunks, task)
        assert len(samples) == 6
        for sample, prompt in zip(samples, [p for p in prompts if p["task"] == name], strict=True):
            assert "".join(sample["context"]) in (
                prompt["context"],
                "".join(shorten(prompt["context"])[0]),
            )
            assert (sample["question"], sample["reference"]) == (
                prompt["question"],
                prompt["reference"],
            )
            for row, which in zip(task["rows"], sample["which"], strict=True):
                line = next(
                    x
                    for x in lines
                    if (x["sample"], x["recipe"]) == (prompt["sample"], row["recipe"])
                )
                if "problem" in line:
                    assert which == line["problem"]
                    continue
                answer, tokens = sample["texts"][which]
                assert tokens == line["tokens"]
                assert ("".join(tokens) if answer is None else answer) == line["answer"]
            assert len({json.dumps(text) for text in sample["texts"]}) == len(sample["texts"])


def test_a_long_context_is_shortened_and_says_so():
    text = "".join(str(i % 10) for i in range(4003))
    assert shorten(text) == ([text[:2000], text[-2000:]], 3)
    assert shorten(text[:4000]) == ([text[:4000]], 0)


def test_chunks_are_small_and_cover_all_samples(tmp_path):
    folder = write_results(
        tmp_path / "r", methods=("kivi",), shares=(0.2,), tasks=("niah",), samples=400
    )
    summary, chunks = page_data([read_run(folder)])
    task = task_of(summary, "niah")
    assert len(chunks) > 2
    starts = [first for first, _ in task["chunks"]]
    parts = [json.loads(gzip.decompress(base64.b64decode(chunk))) for chunk in chunks]
    assert starts == [sum(map(len, parts[:i])) for i in range(len(parts))]
    assert sum(map(len, parts)) == 400
    assert max(len(json.dumps(part)) for part in parts) < 600_000


def test_numbers_that_json_lacks_become_null(copy):
    with (copy / "niah.jsonl").open("a") as file:
        line = {
            "task": "niah", "sample": "niah-0", "recipe": "full", "scores": {"correct": 1.0},
            "kv_bytes": 10, "exact_bytes": 10, "tokens": [], "curves": {"kl": [math.inf, 1.0]},
        }  # fmt: skip
        file.write(json.dumps(line) + "\n")
    summary, chunks = page_data([read_run(copy)])
    row = task_of(summary, "niah")["rows"][0]
    assert row["curves"]["kl"] == [[1.0], [1.0]]
    assert "NaN" not in results_page(summary, chunks)


def test_folders_of_one_name_are_told_apart(folder, copy):
    other = copy.rename(copy.parent / folder.name)
    summary, _ = page_data([read_run(folder), read_run(other)])
    assert [run["name"] for run in summary["runs"]] == ["small (1)", "small (2)"]


# the command


def test_the_command_writes_a_page(folder, tmp_path):
    found = run(folder, "--out", tmp_path / "page.html")
    assert found.exit_code == 0, found.output
    assert "1 run, 7 recipes, 168 results of samples; wrote " in found.stdout
    assert (tmp_path / "page.html").read_text(encoding="utf-8").startswith("<!doctype html>")


def refused(folder):
    with pytest.raises(InputError) as caught:
        read_run(folder)
    return str(caught.value)


def test_a_folder_without_run_json(copy, tmp_path):
    (copy / "run.json").unlink()
    assert "has no run.json" in refused(copy)
    found = run(copy, "--out", tmp_path / "page.html")
    assert found.exit_code == 2
    assert found.stderr.startswith("kvloom: ")
    assert found.stderr.count("\n") == 1
    assert not (tmp_path / "page.html").exists()


def test_a_folder_that_is_not_there(tmp_path):
    found = run(tmp_path / "nothing", "--out", tmp_path / "page.html")
    assert found.exit_code == 2
    assert "there is no folder" in found.stderr


def test_an_output_that_cannot_be_written(folder, tmp_path):
    found = run(folder, "--out", tmp_path / "none" / "page.html")
    assert found.exit_code == 2
    assert "cannot write" in found.stderr


@pytest.mark.parametrize(
    ("head", "name"), [({"format": 2}, "format 2"), ({}, "format None"), ([], "format None")]
)
def test_another_format(copy, head, name):
    (copy / "run.json").write_text(json.dumps(head))
    assert re.search(rf"{name}, and this kvloom reads 1", refused(copy))


def test_a_damaged_run_json(copy):
    (copy / "run.json").write_text("{")
    assert "cannot be read" in refused(copy)


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ('"recipe"', '"recip"', "needs the field 'recipe' with text"),
        ('"sample": "niah-1"', '"sample": 7', "needs the field 'sample' with text"),
        ('"niah-1"', '"niah-99"', "'niah-99', not in prompts.jsonl"),
        ('"scores"', '"score"', "neither scores nor a problem"),
        ('"correct": ', '"correct": "x", "y": ', "needs a finite number as the score 'correct'"),
        ('"correct": ', '"correct": NaN, "y": ', "needs a finite number as the score 'correct'"),
        ('"correct": ', '"correct": true, "y": ', "needs a finite number as the score 'correct'"),
        ('"scores": ', '"scores": {}, "y": ', "neither scores nor a problem"),
        ('"scores": ', '"problem": [1], "y": ', "needs text in 'problem'"),
        ('"kv_bytes": ', '"kv_bytes": null, "y": ', "needs a number of at least 0 in 'kv_bytes'"),
        (
            '"kv_bytes": ',
            '"tokens_read": "9", "kv_bytes": ',
            "needs a number of at least 0 in 'tokens_read'",
        ),
        (
            '"kv_bytes": ',
            f'"kv_bytes": {"9" * 999}, "y": ',
            "needs a number of at least 0 in 'kv_bytes'",
        ),
        ('"exact_bytes": ', '"exact_bytes": 0, "y": ', "needs a number above 0 in 'exact_bytes'"),
        ('"exact_bytes": ', '"exact_bytes": -', "needs a number of at least 0 in 'exact_bytes'"),
        ('"seconds": ', '"seconds": {"prefill": "x"}, "y": ', "of at least 0 in 'seconds'"),
        ('"seconds": ', '"seconds": {"prefill": -1}, "y": ', "of at least 0 in 'seconds'"),
        ('"recipe": "', '"recipe": "x', "not in run.json"),
        ('"tokens": ', '"tokens": 7, "y": ', "needs a list in 'tokens'"),
        ('"curves": ', '"curves": {"kl": ["x"]}, "y": ', "needs lists of numbers in 'curves'"),
        ("}", "", "is not JSON"),
        ("{", "[{", "is not JSON"),
    ],
)
def test_a_damaged_line_is_named(folder, tmp_path, old, new, why):
    copy = shutil.copytree(folder, tmp_path / "copy")
    path = copy / "niah.jsonl"
    lines = path.read_text().splitlines()
    at = next(i for i, line in enumerate(lines) if '"niah-1"' in line and '"scores"' in line)
    lines[at] = lines[at].replace(old, new)
    path.write_text("\n".join(lines) + "\n")
    message = refused(copy)
    assert re.search(rf"line {at + 1} of '.*niah.jsonl' .*{re.escape(why)}", message)


def test_bytes_that_are_no_text_are_a_damaged_line(copy):
    with (copy / "prompts.jsonl").open("ab") as file:
        file.write(b"\xff\xfe{}\n")
    assert re.search(r"line \d+ of '.*prompts.jsonl' is not UTF-8 text", refused(copy))


def test_no_finished_sample(copy):
    for path in copy.glob("*.jsonl"):
        if path.name != "prompts.jsonl":
            lines = [x for x in path.read_text().splitlines() if '"problem"' in x]
            path.write_text("\n".join(lines) + "\n")
    message = refused(copy)
    assert "has no finished sample (the first problem: groups of 128 do not fit" in message
    for path in copy.glob("*.jsonl"):
        path.write_text("")
    assert "has no finished sample; run" in refused(copy)


def test_what_is_no_table_or_nested_too_deeply_is_refused(copy):
    whole = {name: (copy / name).read_text() for name in ("run.json", "prompts.jsonl")}
    for name, text, why in (
        ("run.json", "[" * 100_000, "nested too deeply"),
        ("run.json", json.dumps({**json.loads(whole["run.json"]), "model": "x"}), "is no table"),
        ("prompts.jsonl", "[" * 100_000, "nested too deeply"),
    ):
        (copy / name).write_text(text)
        with pytest.raises(InputError, match=why):
            read_run(copy)
        (copy / name).write_text(whole[name])


def test_a_line_with_a_problem_needs_no_scores(copy):
    path = copy / "niah.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines[0] |= {"problem": "too long", "scores": "none"}
    path.write_text("\n".join(map(json.dumps, lines)))
    page_data([read_run(copy)])


# kvpress


@pytest.mark.parametrize("config", [True, False], ids=["config", "name"])
def test_results_of_kvpress_count_tokens(tmp_path, config):
    folder = write_kvpress(tmp_path / "results", config=config)
    assert is_kvpress(folder)
    assert is_kvpress(next(folder.iterdir()))
    (found,) = read_kvpress(folder)
    assert (found.counts, found.model["name"]) == (
        "tokens",
        "meta-llama/Meta-Llama-3.1-8B-Instruct",
    )
    assert found.name == "kvpress · Meta-Llama-3.1-8B-Instruct · 4096"
    figures = {f.recipe: f for f in found.figures}
    assert len(figures) == 7
    half = figures["snapkv:compression_ratio=0.50"]
    assert (half.task, half.share, half.kv_bytes, half.samples) == ("ruler", 0.5, None, 2)
    assert half.scores["correct"].mean == pytest.approx((75.5 + 65.5) / 2 / 100)
    assert half.scores["correct"].low is None
    assert figures["full"].share == 1
    summary, chunks = page_data([found])
    task = task_of(summary, "ruler")
    assert task["fronts"] == {"correct": []}
    sample = samples_of(chunks, task)[1]
    at = [row["recipe"] for row in task["rows"]].index(half.recipe)
    assert sample["texts"][sample["which"][at]][0] == "the number is 1001, says snapkv"
    assert (sample["question"], sample["reference"]) == ("Which number?", "['1001']")


def test_results_written_for_kvpress_are_read_with_their_bytes(folder, tmp_path):
    before, places = read_run(folder), tmp_path / "places"
    found = run(folder, "--kvpress", places, "--out", tmp_path / "page.html")
    assert found.exit_code == 0, found.stderr
    (after,) = read_kvpress(places)
    assert (after.counts, after.name) == ("bytes", "kvpress · smollm2 · 2048")
    figures = {(f.task, f.recipe): f for f in after.figures}
    measured = [f for f in before.figures if f.samples]
    assert len(figures) == len(measured) > 10
    for one in measured:
        other = figures[one.task, one.recipe]
        assert other.share == pytest.approx(one.share)
        for name in ("kv_bytes", "exact_bytes", "samples"):
            assert getattr(other, name) == getattr(one, name)
        means = {name: score.mean for name, score in one.scores.items()}
        assert {name: x.mean for name, x in other.scores.items()} == pytest.approx(means)
        written = [x["answer"] for (_, y), x in after.lines[one.task].items() if y == one.recipe]
        answers = [x["answer"] for (_, y), x in before.lines[one.task].items() if y == one.recipe]
        assert written == answers
    (place,) = places.glob("ruler__2048__smollm2__no_press__0.00")
    mean = 100 * figures["ruler", "full"].scores["correct"].mean
    assert json.loads((place / "metrics.json").read_text()) == {"ruler": {"string_match": mean}}
    assert run(places, "--out", tmp_path / "page.html").exit_code == 0


def test_results_are_not_written_for_kvpress_over_others_or_without_bytes(folder, tmp_path):
    theirs = write_kvpress(tmp_path / "theirs")
    for results, why in ((theirs, "has no bytes"), (folder, "exists; give a folder without")):
        places = tmp_path / "places"
        (places / "niah__2048__smollm2__no_press__0.00").mkdir(parents=True, exist_ok=True)
        found = run(results, "--kvpress", places, "--out", tmp_path / "page.html")
        assert (found.exit_code, why in found.stderr) == (2, True)
        assert [*places.rglob("*.*")] == [*places.iterdir()]


def test_kvpress_metrics_of_other_data(tmp_path):
    folder = write_kvpress(tmp_path / "results", presses=())
    (place,) = folder.iterdir()
    config = (place / "config.yaml").read_text().replace("dataset: ruler", "dataset: loogle")
    (place / "config.yaml").write_text(config)
    metrics = {"longdep_qa": {"rouge-1": 0.25, "bert": 0.5}, "shortdep_qa": {"rouge-1": 0.75}}
    (place / "metrics.json").write_text(json.dumps(metrics))
    (figures,) = read_kvpress(folder)[0].figures
    assert {name: x.mean for name, x in figures.scores.items()} == {"rouge-1": 0.5, "bert": 0.5}
    (place / "metrics.json").write_text("17.5")
    (place / "config.yaml").write_text(config.replace("loogle", "longbench"))
    (figures,) = read_kvpress(folder)[0].figures
    assert figures.scores["correct"].mean == 0.175
    shutil.copytree(place, place / "1")  # kvpress' name of a repeated run
    assert [f.recipe for f in read_kvpress(folder)[0].figures] == ["full", "full (2)"]


def test_predictions_of_kvpress_without_some_columns_or_numbers(tmp_path):
    folder = write_kvpress(tmp_path / "results", presses=("snapkv",), ratios=(0.5,))
    for place in folder.iterdir():
        path = place / "predictions.csv"
        (head, first, second) = path.read_text().splitlines()
        path.write_text("\n".join([head, first.replace(",0.5,", ",\u00b2,"), second[:9]]))
    (found,) = read_kvpress(folder)
    assert {figures.recipe: figures.share for figures in found.figures} == {
        "full": 1, "snapkv:compression_ratio=0.50": 0.5,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("name", "text", "why"),
    [
        ("metrics.json", "{", "as JSON"),
        ("metrics.json", "{}", "contains no number"),
        ("config.yaml", "a: [", "as YAML"),
        ("config.yaml", "a: 1", "no config.yaml with dataset, model, press_name"),
        ("metrics.json", "[" * 100_000, "as JSON"),
        ("config.yaml", "[" * 5_000, "as YAML"),
        (
            "config.yaml", "{dataset: a, model: b, press_name: c, compression_ratio: [1]}",
            "[1], no number",
        ),
    ],
)  # fmt: skip
def test_damaged_results_of_kvpress(tmp_path, name, text, why):
    folder = write_kvpress(tmp_path / "results")
    place = next(folder.iterdir())
    (place / name).write_text(text)
    found = run(folder, "--out", tmp_path / "page.html")
    assert found.exit_code == 2
    assert why in found.stderr
    assert found.stderr.count("\n") == 1
