"""`kvloom bench`: what is measured, what is written, and one sentence for every mistake."""

import importlib.util
import json
import time
from argparse import Namespace
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig
from typer.testing import CliRunner

from kvloom.cache import LayerCache, fill, read_nbytes
from kvloom.kernels import dispatch
from kvloom.recipe.resolve import resolve
from kvloom_lab.bench import LayerShape, TimedRow, transformers_caches
from kvloom_lab.bench import candidates as candidates_module
from kvloom_lab.bench import timing as timing_module
from kvloom_lab.bench.timing import WARM_UP, Candidate, make_rows, time_candidates
from kvloom_lab.cli.app import app
from kvloom_lab.workload import clock
from kvloom_lab.workload import layers as layers_module
from kvloom_lab.workload.layers import empty_layers, random_qkv

LAYER = ["--heads", "4/2", "--head-dim", "32", "--repeats", "2"]
MODEL = [
    *LAYER, "--layers", "2", "--hidden", "64", "--intermediate", "96", "--vocabulary", "50"
]  # fmt: skip
SMALL = LayerShape(4, 2, 32)


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    quick = clock.read_bandwidth_gb_s(0.0, 1 << 20)
    monkeypatch.setattr(clock, "read_bandwidth_gb_s", lambda: quick)


@pytest.fixture
def _threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def run(*args):
    return CliRunner().invoke(app, ["bench", *(str(a) for a in args)])


def measured(*args, status=0):
    """The JSON of a run, its rows by (name, context)."""
    found = run(*args, "--json", "-")
    assert found.exit_code == status, found.output
    data = json.loads(found.stdout)
    return data, {(row["name"], row["context"]): row for row in data["rows"]}


# what is written


def test_decode_prints_a_table_and_writes_files(tmp_path):
    found = run(
        "decode", *LAYER, "--context", "96,200", "--recipes", "full,kivi:group=64,clusterkv",
        "--json", tmp_path / "out.json", "--plot", tmp_path / "out.png",
    )  # fmt: skip
    assert found.exit_code == 1, found.output  # kivi:group=64 does not fit
    assert "200 tokens, clusterkv: " in found.stderr
    assert "200 tokens, kivi:group=64: recipe 'kivi:group=64' does not fit" in found.stderr
    assert found.stderr.endswith("kvloom: no figures for kivi:group=64; see above\n")
    said = ("4q/2kv x 32", "96 tokens", "200 tokens", "SDPA bf16 rows", "kivi:group=64", "MiB")
    for word in said:
        assert word in found.stdout
    data = json.loads((tmp_path / "out.json").read_text())
    assert set(data) == {"environment", "limits", "rows"}
    assert data["limits"]["read_gb_s"] > 0
    assert {row["context"] for row in data["rows"]} == {96, 200}
    for row in data["rows"]:
        assert set(row) == {field.name for field in fields(TimedRow)}
        if row["problem"] is None:
            assert row["ms"] >= row["least_ms"] > 0
            assert row["ratios"]["DynamicCache"] > 0
            assert row["gb_s"] == pytest.approx(row["read_bytes"] / row["ms"] / 1e6)
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.usefixtures("_threads")
def test_decode_counts_bytes():
    with dispatch.use("ref"):
        data, found = measured(
            "decode", *LAYER, "--context", "512", "--recipes", "full,kivi,quest:tokens=96",
            "--threads", "1",
        )  # fmt: skip
    token = 2 * 2 * 32 * 2  # keys and values of two heads in bf16
    assert data["environment"]["threads"] == 1
    assert found["SDPA bf16", 512]["kv_bytes"] == 512 * token
    assert found["SDPA fp32", 512]["kv_bytes"] == 2 * 512 * token
    steps = WARM_UP + 2
    assert found["DynamicCache", 512]["kv_bytes"] == (512 + steps) * token
    assert found["kivi", 512]["kv_bytes"] < 0.6 * 512 * token
    quest = found["quest:tokens=96", 512]
    assert quest["read_bytes"] < 0.6 * quest["kv_bytes"]
    assert "attend: the setting selects the reference" in found["kivi", 512]["fell"]


def test_a_cache_that_is_not_there_says_what_to_install(monkeypatch):
    def none(name, *rest):
        raise ImportError(name)

    monkeypatch.setattr(transformers_caches, "filled", none)
    _, found = measured("decode", *LAYER, "--context", "64", "--recipes", "kivi,full")
    row = found["QuantizedCache hqq-4", 64]
    assert (row["problem"], row["ms"]) == ("not installed: pip install hqq", None)
    table = run("decode", *LAYER, "--context", "64", "--recipes", "full").stdout
    assert "QuantizedCache quanto-4: not installed: pip install optimum-quanto" in table


def test_a_peer_that_takes_minutes_is_skipped(monkeypatch):
    filled, steps = transformers_caches.filled, []

    def slow(name, *rest):
        if "fp8" in name:
            time.sleep(30)
        cache = filled(name, *rest)
        if name == "DynamicCache":
            update = cache.update
            cache.update = lambda *args: steps.append(time.sleep(30)) or update(*args)
        return cache

    monkeypatch.setattr(transformers_caches, "filled", slow)
    monkeypatch.setattr(transformers_caches, "LIMIT_S", 0.2)
    _, found = measured("decode", *LAYER, "--context", "64", "--recipes", "full")
    said = "skipped, because {} takes more than 0.2 s; name it in --baselines to wait"
    assert found["QuantizedCache fp8", 64]["problem"] == said.format("filling it")
    assert found["DynamicCache", 64]["problem"] == said.format("a step")
    assert (steps, found["full", 64]["problem"]) == ([], None)


def test_baselines_are_chosen(tmp_path, monkeypatch):
    args = [*LAYER, "--context", "64", "--recipes", "full", "--baselines"]
    monkeypatch.setattr(transformers_caches, "LIMIT_S", 1e-6)  # of baselines that are not named
    _, found = measured("decode", *args, "dynamic,sdpa")
    assert found["DynamicCache", 64]["ms"] > 0
    assert {name for name, _ in found} == {
        "SDPA fp32", "SDPA bf16", "SDPA bf16 rows", "DynamicCache", "full"
    }  # fmt: skip
    args = [*MODEL, "--context", "64", "--recipes", "full", "--plot", tmp_path / "out.png"]
    _, found = measured("generate", *args, "--baselines", "none")
    assert set(found) == {("full", 64)}
    refused = run("generate", "--baselines", "sdpa")
    assert refused.exit_code == 2
    assert "--baselines 'sdpa' is not all, none or some of dynamic, quanto" in refused.stderr


def test_prefill_times_storing_alone():
    _, found = measured("prefill", *LAYER, "--context", "160", "--recipes", "h2o,kivi,minikv")
    for name in ("h2o", "kivi", "minikv"):
        whole, storing = found[name, 160], found[f"{name}, storing", 160]
        assert whole["kv_bytes"] == storing["kv_bytes"] > 0
        assert set(whole["ratios"]) == {"SDPA bf16"}
    assert found["h2o", 160]["kv_bytes"] < 0.7 * found["SDPA bf16", 160]["kv_bytes"]


def test_pack_counts_what_goes_in():
    _, found = measured(
        "pack", *LAYER, "--context", "256", "--recipes", "kivi,full,skvq:group=32,turbo", status=1
    )
    assert found["full", 256]["problem"] == "it packs nothing"
    for name in ("kivi", "skvq:group=32", "turbo"):
        assert found[name, 256]["read_bytes"] == 256 * 2 * 2 * 32 * 2
        assert set(found[name, 256]["ratios"]) == {"the prompt's attention"}


def test_generate_runs_whole_steps(tmp_path):
    data, found = measured(
        "generate", *MODEL, "--context", "128", "--plot", tmp_path / "out.svg",
        "--recipes", "full,kivi:group=64,h2o,skvq:group=32,snapkv:tokens=48", status=1,
    )  # fmt: skip
    assert data["environment"]["shape"] == "2 layers, hidden 64, 4q/2kv x 32"
    exact = found["DynamicCache", 128]
    steps, token = WARM_UP + 2, 2 * 2 * 2 * 32 * 2
    assert exact["kv_bytes"] == (128 + steps) * token
    assert found["h2o", 128]["kv_bytes"] < 0.8 * exact["kv_bytes"]
    assert found["full", 128]["read_bytes"] > found["full", 128]["kv_bytes"]  # weights
    assert all(row["ms"] for row in data["rows"] if row["problem"] is None)
    assert "not fit" in found["kivi:group=64", 128]["problem"]
    assert b"<svg" in (tmp_path / "out.svg").read_bytes()


def test_peers_write_the_same_rows():
    path = Path(__file__).parents[4] / "benchmarks" / "peers" / "common.py"
    spec = importlib.util.spec_from_file_location("peers_common", path)
    common = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(common)
    made = common.row(Namespace(shape="x"), "one", 8, [2.0, 4.0, 3.0], 10, 5, {"other": [6.0]})
    assert set(made) == {field.name for field in fields(TimedRow)}
    assert (made["ms"], made["least_ms"], made["ratios"]) == (3.0, 2.0, {"other": 2.0})


# runs that end early


def test_finished_contexts_stay_after_an_interrupt(monkeypatch, tmp_path):
    whole, out = time_candidates, tmp_path / "out.json"

    def interrupted(candidates, *rest):
        if len(timed) == 1:
            raise KeyboardInterrupt
        timed.append(candidates)
        return whole(candidates, *rest)

    timed = []
    monkeypatch.setattr(timing_module, "time_candidates", interrupted)
    found = run("decode", *LAYER, "--context", "64,96,128", "--recipes", "rtn", "--json", out,
                "--plot", tmp_path / "out.png")  # fmt: skip
    assert found.exit_code == 130
    assert "64 tokens" in found.stdout
    assert "not measured: 96 tokens, 128 tokens" in found.stdout
    assert "kvloom: interrupted; not measured: 96 tokens, 128 tokens" in found.stderr
    data = json.loads(out.read_text())
    assert {row["context"] for row in data["rows"]} == {64}
    assert data["environment"]["missing"] == ["96 tokens", "128 tokens"]
    assert (tmp_path / "out.png").exists()


def test_a_context_without_memory_leaves_those_before_it(monkeypatch):
    whole = layers_module.random_qkv

    def random_qkv(shape, tokens):
        if tokens == 96:
            raise MemoryError
        return whole(shape, tokens)

    monkeypatch.setattr(candidates_module, "random_qkv", random_qkv)
    found = run("decode", *LAYER, "--context", "64,96", "--recipes", "rtn")
    assert found.exit_code == 2
    assert "64 tokens" in found.stdout
    assert found.stderr.splitlines()[-1].startswith(
        "kvloom: there is not enough memory for the tensors"
    )


@pytest.mark.parametrize(
    ("error", "said"),
    [(MemoryError(), "there is not enough memory for"), (KeyError("a bug"), "KeyError: 'a bug'")],
)
def test_a_recipe_that_fails_leaves_the_others(monkeypatch, error, said):
    attend = LayerCache.attend

    def fails(self, *args, **kwargs):
        if self.recipe.name == "kivi" and self.seen > 66:
            raise error
        return attend(self, *args, **kwargs)

    monkeypatch.setattr(LayerCache, "attend", fails)
    args = ["decode", *LAYER, "--context", "64", "--recipes", "kivi,rtn"]
    _, found = measured(*args, status=1)
    assert found["kivi", 64]["problem"].startswith(said)
    assert found["kivi", 64]["ms"] is None
    assert found["rtn", 64]["ms"] > 0


# the clock


def test_candidates_alternate_and_compiling_is_not_timed(monkeypatch):
    happened, compiled = [], [0.0]
    monkeypatch.setattr(clock, "compile_seconds", lambda: compiled[0])

    def slow():
        happened.append("slow")
        compiled[0] += 100.0

    candidates = [
        Candidate("slow", slow, lambda: happened.append("before")),
        Candidate("other", lambda: happened.append("other")),
        Candidate("absent", problem="not here"),
    ]
    times = time_candidates(candidates, repeats=2, warm_up=1)
    assert happened == ["before", "slow", "other"] * 3
    assert len(times["slow"].ms) == 2
    assert max(times["slow"].ms) < 0  # a call took less than was compiled in it
    candidates[0].ms, candidates[1].ms = [4.0, 1.0, 2.0], [1.0]
    found = make_rows(candidates, ["other", "absent"], shape="x", context=1, batch=1)
    assert (found[0].ms, found[0].least_ms, found[0].ratios) == (2.0, 1.0, {"other": 0.5})
    assert (found[2].ms, found[2].problem) == (None, "not here")


# caches filled without a prompt


@pytest.mark.parametrize("name", ["kivi", "streaming:tokens=64", "skvq:group=32", "clusterkv"])
def test_filled_is_as_after_a_prompt(name):
    torch.manual_seed(0)
    k, v = torch.randn(2, 1, 2, 300, 32).bfloat16()
    q = torch.randn(1, 4, 300, 32).bfloat16()
    recipe = resolve(name)
    filled, prompted = (
        empty_layers(recipe, SMALL)[0],
        empty_layers(recipe, SMALL)[0],
    )
    fill(filled, q[:, :, -8:], k, v)
    prompted.attend(q, k, v, scale=32**-0.5)
    assert (filled.seen, filled.nbytes) == (prompted.seen, prompted.nbytes)
    new = [x[:, :, :1] for x in (q, k, v)]
    one, other = (cache.attend(*new, scale=32**-0.5) for cache in (filled, prompted))
    assert torch.equal(one, other)


@pytest.mark.parametrize("name", ["h2o", "snapkv:tokens=100", "minikv"])
def test_filled_by_score_holds_the_budget(name):
    recipe = resolve(name)
    (cache,) = empty_layers(recipe, SMALL)
    fill(cache, *random_qkv(SMALL, 400))
    assert cache.nbytes == recipe.nbytes(400, SMALL.geometry)


def test_bytes_of_the_caches_of_transformers():
    config = LlamaConfig(num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2)
    _, k, v = random_qkv(SMALL, 50)
    exact = transformers_caches.filled("DynamicCache", config, k, v)
    assert transformers_caches.nbytes(exact) == 3 * 2 * k.nbytes
    small = transformers_caches.filled("QuantizedCache fp8", config, k, v)
    assert transformers_caches.nbytes(small) == 3 * (k.nbytes + 8)  # a byte each, and two scales


def test_an_older_transformers_says_what_to_install():
    said = transformers_caches.missing("QuantizedCache fp8", ValueError("unknown backend"))
    assert (
        said == "not in this version of transformers (unknown backend): pip install -U transformers"
    )


def test_a_step_of_an_exact_cache_reads_all_of_it():
    cache = LayerCache(resolve("kivi"))
    fill(cache, *random_qkv(SMALL, 200))
    assert read_nbytes(cache) == cache.nbytes
