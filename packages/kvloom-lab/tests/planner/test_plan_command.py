"""`kvloom plan`: the table, JSON, the plot, and exit codes."""

import json
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig
from typer.testing import CliRunner

import kvloom_lab
from kvloom_lab.cli.app import app

ROW = {
    "recipe", "kv_bytes", "peak_bytes", "fits", "longest_context", "largest_batch",
    "fits_in_chunks", "longest_in_chunks", "step_ms", "tokens_s", "parts_ms", "limit", "reaches",
    "longest_at_target", "problem", "no_times", "curve",
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a config and nothing else."""
    path = tmp_path_factory.mktemp("plan") / "tiny"
    LlamaConfig(
        hidden_size=1024, intermediate_size=4096, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=2, head_dim=128, vocab_size=1000, max_position_embeddings=8192,
        dtype=torch.bfloat16,
    ).save_pretrained(path)  # fmt: skip
    return path


@pytest.fixture(autouse=True)
def _offline(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("COLUMNS", "110")


def run(*args):
    return CliRunner().invoke(app, ["plan", *map(str, args)])


def test_the_table_explains_itself(folder):
    found = run(folder, "--memory", "2GiB", "--hardware", "rtx4090")
    assert found.exit_code == 0, found.output
    text = " ".join(found.stdout.split())
    for part in (
        "tiny (LlamaForCausalLM, 4 layers,", "8,192 tokens of context, batch 1; rtx4090",
        "2.00 GiB of memory", "longest longest, largest", "limited", "near-lossless",
        "clusterkv", "yes",
        "rates on one H100", "KV: the cache with all its metadata, exact",
    ):  # fmt: skip
        assert part in text
    assert found.stdout.count("full") == 1  # the table is one block


def test_without_hardware_there_are_no_times(folder):
    found = run(folder, "--recipes", "full,kivi")
    assert "Times need --hardware" in " ".join(found.stdout.split())
    assert "tok/s" not in found.stdout
    assert "longest" not in found.stdout


def test_json_has_the_documented_fields(folder):
    asked = ["--context", "4k", "--batch", "2", "--memory", "3GB", "--target", "5tok/s"]
    found = run(folder, "--recipes", "full,kivi", "--hardware", "h100", "--json", "-", *asked)
    data = json.loads(found.stdout)
    assert set(data) == {
        "model", "context", "batch", "memory", "target", "hardware", "rows", "warnings",
    }  # fmt: skip
    assert (data["context"], data["batch"], data["memory"], data["target"]) == (4096, 2, 3e9, 5.0)
    assert data["hardware"]["sources"]["rates"].startswith("NVIDIA H100")
    assert data["model"]["weights_bytes"] > 0
    for row in data["rows"]:
        assert set(row) == ROW
        assert set(row["tokens_s"]) == {"low", "best", "high"}
        assert set(row["parts_ms"]) == {"weights", "kv", "arithmetic", "overhead"}
        assert row["reaches"] is True
        assert set(row["curve"][0]) == {"context", "kv_bytes", "tokens_s"}
    assert data["rows"][0]["kv_bytes"] == 2 * 4096 * 4 * 2 * 2 * 128 * 2


def test_files_and_a_picture_are_written(folder, tmp_path):
    pytest.importorskip("matplotlib")
    out, picture, plain = (tmp_path / name for name in ("plan.json", "plan.png", "bytes.svg"))
    asked = ["--recipes", "full,kivi", "--memory", "4GiB"]
    found = run(folder, *asked, "--hardware", "a100", "--target", "9", "--json", out,
                "--plot", picture)  # fmt: skip
    assert found.exit_code == 0, found.output
    assert len(json.loads(out.read_text())["rows"]) == 2
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert run(folder, *asked, "--plot", plain).exit_code == 0
    assert "weights and KV cache" in plain.read_text()


def test_a_target_divides_the_table(folder):
    found = run(folder, "--recipes", "full,kivi", "--hardware", "h100", "--target", "10tok/s")
    assert found.exit_code == 0
    assert "reach 10 tok/s" in found.stdout
    found = run(folder, "--recipes", "full,kivi", "--hardware", "h100", "--target", "1e9")
    assert found.exit_code == 2  # no number that it reads
    found = run(folder, "--recipes", "full,kivi", "--hardware", "h100", "--target", "1000000000")
    assert found.exit_code == 1
    text = " ".join(found.stdout.split())
    assert "do not reach" in text
    assert "No recipe reaches" in text
    assert "the nearest is" in text


def test_what_does_not_fit_is_marked(folder):
    asked = ["--recipes", "full", "--memory", "200MB", "--context", "8k"]
    assert " no " in run(folder, *asked, "--batch", "64").stdout
    assert " chunked " in run(folder, *asked).stdout


def test_a_named_recipe_that_does_not_fit_the_model(folder):
    found = run(folder, "--recipes", "full,kivi:group=32@9=full")
    assert found.exit_code == 1
    assert "kivi:group=32@9=full: " in " ".join(found.stdout.split())
    assert "no figures for" in found.stderr


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--memory", "8 apples"], "memory '8 apples' is not a size"),
        (["--context", "long"], "context 'long' is not a number of tokens"),
        (["--target", "20tok/s"], "a target speed needs hardware"),
        (["--hardware", "abacus"], "hardware 'abacus' is unknown"),
        (["--memory", "1MB"], "the weights of tiny take"),
        (["--recipes", "kivy"], "kivy"),
        (["--plot", "plan.txt"], "must end in one of"),
    ],
)
def test_mistakes_are_one_sentence(folder, args, says):
    found = run(folder, *args)
    assert found.exit_code == 2
    assert says in found.stderr
    assert found.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [("num_hidden_layers", -1, "has -1 layers"), ("num_hidden_layers", "3", "num_hidden_layers")],
)
def test_a_config_that_no_model_has(folder, tmp_path, field, value, says):
    config = json.loads((Path(folder) / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, field: value}))
    found = run(tmp_path)
    assert found.exit_code == 2
    assert says in found.stderr
    assert found.stderr.count("\n") == 1


def test_a_model_that_does_not_exist(tmp_path):
    found = run(tmp_path / "nothing")
    assert found.exit_code == 2
    assert "there is no model" in found.stderr


def test_the_function_is_public(folder):
    found = kvloom_lab.plan(folder, ["full"], context=1024)
    assert "full: KV cache" in str(found)
    assert kvloom_lab.plan.__module__ == "kvloom_lab.planner.plan_recipes"
