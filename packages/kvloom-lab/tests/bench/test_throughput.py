"""`kvloom bench throughput`: how many requests fit, what is measured, and runs that end early."""

import json
import os
import sys
import types
from contextlib import contextmanager
from dataclasses import fields, replace
from importlib.machinery import ModuleSpec

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import tiny
from kvloom.recipe import resolve
from kvloom_lab.bench import serving
from kvloom_lab.bench import throughput as throughput_module
from kvloom_lab.bench.serving import DYNAMIC, Job, RunFigures
from kvloom_lab.bench.throughput import ThroughputRow, make_rows
from kvloom_lab.cli.app import app
from kvloom_lab.show.plots import throughput_plot

PROMPT, NEW = 70, 6
TOKEN = 2 * 2 * 2 * 32 * 4  # bytes: two layers, keys and values, two heads, fp32
REQUEST = (PROMPT + NEW) * TOKEN
KIVI = "kivi:residual=32"


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    tiny.llama(num_hidden_layers=2, head_dim=32).save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def model(model_folder):
    return serving.load_model(str(model_folder), "float32")


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    """Measure in this process, on a short text."""
    threads = torch.get_num_threads()
    monkeypatch.setattr(serving, "in_process", serving.run)
    monkeypatch.setattr(throughput_module, "library_text", lambda: tiny.TEXT)
    yield
    torch.set_num_threads(threads)


def run(folder, *args, memory=3 * REQUEST):
    return CliRunner().invoke(
        app,
        ["bench", "throughput", "--model", str(folder), "--memory", f"{memory}B",
         "--prompt", str(PROMPT), "--max-new-tokens", str(NEW), "--threads", "1", *map(str, args)],
    )  # fmt: skip


def measured(folder, *args, status=0, **options):
    """The JSON of a run, and its rows by name."""
    found = run(folder, *args, "--json", "-", **options)
    assert found.exit_code == status, found.output
    data = json.loads(found.stdout)
    return data, {row["name"]: row for row in data["rows"]}


def job(cache=DYNAMIC, rows=3, part=1, **more):
    ids = torch.randint(3, 200, (rows, PROMPT + NEW), generator=torch.Generator().manual_seed(0))
    return Job("one", cache, 1 << 30, PROMPT, NEW, REQUEST, part, ids, **more)


def test_rows_of_static_batches(model_folder):
    data, found = measured(
        model_folder, "--recipes", f"full,{KIVI},snapkv:tokens=40", "--baselines", "dynamic,fp8",
        "--rounds", "2",
    )  # fmt: skip
    assert (data["environment"]["memory"], data["environment"]["rounds"]) == (3 * REQUEST, 2)
    assert set(found) == {
        DYNAMIC, "QuantizedCache fp8", "full", KIVI, "snapkv:tokens=40"
    }  # fmt: skip
    for row in data["rows"]:
        assert set(row) == {field.name for field in fields(ThroughputRow)}
        assert (row["problem"], row["rounds"], row["preemptions"]) == (None, 2, None)
        assert row["kv_bytes"] <= 3 * REQUEST
        assert row["tokens_s"]["low"] <= row["tokens_s"]["best"] <= row["tokens_s"]["high"]
        assert row["first_token_s"] > 0
    exact = found[DYNAMIC]
    assert (exact["batch"], exact["predicted_bytes"]) == (3, REQUEST)
    assert exact["kv_bytes"] == 3 * (PROMPT + NEW - 1) * TOKEN  # the last token is not stored
    assert exact["times_dynamic"] == 1
    assert exact["kl"] < 1e-6 < found[KIVI]["kl"]
    assert found["QuantizedCache fp8"]["batch"] > 3
    assert found["snapkv:tokens=40"]["batch"] > 3
    assert found[KIVI]["times_dynamic"] == pytest.approx(
        found[KIVI]["processor_tokens_s"]["best"] / exact["processor_tokens_s"]["best"]
    )


def test_requests_that_do_not_fit_after_all_are_left_out(model_folder, monkeypatch):
    monkeypatch.setattr(throughput_module.CacheBytes, "nbytes", lambda *_: REQUEST // 2)
    _, found = measured(model_folder, "--recipes", "full", "--baselines", "dynamic")
    assert found[DYNAMIC]["predicted_bytes"] == REQUEST // 2
    assert found[DYNAMIC]["batch"] == 3
    assert found["full"]["kv_bytes"] <= 3 * REQUEST


def test_a_table_and_a_plot_of_several_sizes(model_folder, tmp_path):
    found = run(
        model_folder, "--recipes", "kivi", "--baselines", "dynamic,quanto,kvpress",
        "--prompt", "40,40+9", "--rounds", "1", "--plot", tmp_path / "out.svg",
    )  # fmt: skip
    assert found.exit_code == 0, found.output
    said = ("40 tokens and 6 new", "40 tokens and 9 new", DYNAMIC, "kivi", "KL")
    for word in said:
        assert word in found.stdout
    assert "kivi at 40+9 tokens: " in found.stderr
    assert b"<svg" in (tmp_path / "out.svg").read_bytes()


def test_a_package_that_is_missing_has_a_row(model_folder, monkeypatch):
    monkeypatch.setattr(throughput_module, "find_spec", lambda name: None)
    _, found = measured(
        model_folder, "--recipes", "full", "--baselines", "kvpress", "--rounds", "1"
    )
    row = found["kvpress snapkv, half"]
    assert (row["problem"], row["batch"]) == ("not installed: pip install kvpress", None)


def test_a_press_halves_the_prompts(model_folder, monkeypatch):
    class SnapKVPress:
        """Keeps the later tokens of a prompt in transformers' cache, as kvpress would some."""

        def __init__(self, compression_ratio):
            self.keeps = 1 - compression_ratio

        @contextmanager
        def __call__(self, model):
            def evict(module, args, kwargs, out):
                assert kwargs["cache_position"][-1] == PROMPT - 1  # which presses read
                for layer in out.past_key_values.layers:
                    kept = round(self.keeps * layer.keys.shape[2])
                    layer.keys, layer.values = layer.keys[:, :, -kept:], layer.values[:, :, -kept:]

            hook = model.register_forward_hook(evict, with_kwargs=True)
            yield
            hook.remove()

    press = types.ModuleType("kvpress")
    press.__spec__, press.SnapKVPress = ModuleSpec("kvpress", None), SnapKVPress
    monkeypatch.setitem(sys.modules, "kvpress", press)
    _, found = measured(
        model_folder, "--recipes", "full", "--baselines", "kvpress", "--rounds", "1"
    )
    row, kept = found["kvpress snapkv, half"], PROMPT // 2 + NEW
    assert (row["batch"], row["predicted_bytes"]) == (3 * REQUEST // (kept * TOKEN), kept * TOKEN)
    assert row["kv_bytes"] == row["batch"] * (kept - 1) * TOKEN
    assert row["kl"] > 1e-6


@pytest.mark.parametrize("part", [1, 2])
@pytest.mark.parametrize("cache", [DYNAMIC, resolve(KIVI), resolve("snapkv:tokens=40")])
def test_prompts_in_parts_decode_as_a_batch(model, cache, part):
    requests = job(cache, rows=5, part=part)
    whole = serving._new_cache(model, requests)
    with torch.inference_mode():
        model(requests.ids[:, :PROMPT], past_key_values=whole)
        caches = whole, serving._read_prompts(model, requests, requests.ids)[0]
        steps = [
            torch.stack(list(serving._decode(model, requests, one, requests.ids))) for one in caches
        ]
    torch.testing.assert_close(*steps)
    first, second = map(serving._nbytes, caches)
    assert first == second


def test_continuous_batching_in_equal_bytes(model_folder):
    pages = 6 * 128 * TOKEN  # as many blocks as transformers has
    _, found = measured(
        model_folder, "--recipes", "h2o,kivi,snapkv:tokens=40", "--baselines", "continuous",
        "--rounds", "1", memory=pages,
    )  # fmt: skip
    evicts = "snapkv:tokens=40"
    paged = ("kivi", evicts)
    assert set(found) == {"h2o", *paged, "continuous", *(f"continuous {name}" for name in paged)}
    exact, packed, evicted = (found[f"continuous{x}"] for x in ("", " kivi", f" {evicts}"))
    assert exact["kv_bytes"] == pages
    assert exact["batch"] == max(packed["batch"], evicted["batch"])
    for row in (exact, packed, evicted):
        assert row["problem"] is None
        assert row["preemptions"] >= 0
        assert row["tokens_s"]["best"] > 0
    assert exact["kl"] < 1e-6


def test_steps_of_continuous_batching_are_counted(model):
    figures = serving._continuous(model, job(blocks=6))
    assert NEW <= figures.decoded <= 3 * (NEW - 1)  # without those beside a prompt
    assert figures.preemptions == 0
    crowded = serving._continuous(model, replace(job(rows=2), blocks=2, prompt=PROMPT - 2, new=70))
    assert crowded.preemptions > 0


# runs that end early


def test_a_bound_that_not_even_one_request_fits(model_folder):
    found = run(
        model_folder, "--recipes", "full,kivi", "--baselines", "dynamic", memory=20_000
    )  # fmt: skip
    assert (found.exit_code, found.stdout) == (2, "")
    said = "kvloom: 0.0 MiB hold not even one request of 70 and 6 new tokens; give --memory 1MiB"
    assert said in found.stderr


def test_tokens_that_are_protected_are_planned(model, tmp_path):
    recipe = resolve("snapkv:tokens=40")
    protect = replace(recipe.protect, ids=(3, 4))
    requests = throughput_module.Requests(
        model.config, throughput_module.read_model(model.config), 1 << 30, PROMPT, NEW,
        np.zeros(1), [],
    )  # fmt: skip
    plain, protected = (requests.recipe_nbytes(replace(recipe, protect=x))
                        for x in (recipe.protect, protect))  # fmt: skip
    assert plain == protected
    figure = throughput_plot(
        [ThroughputRow("full", 8, 8, problem="it broke")],
        {"model": "m", "dtype": "d", "memory": 1 << 20},
    )
    figure.savefig(tmp_path / "x.svg")


def test_a_cache_without_room_has_a_row(model_folder):
    _, found = measured(
        model_folder, "--recipes", "full,snapkv:tokens=40", "--baselines", "none", "--rounds", "1",
        memory=REQUEST - 1, status=1,
    )  # fmt: skip
    assert (found["full"]["batch"], found["full"]["problem"]) == (0, "one needs 0.1 MiB")
    assert found["snapkv:tokens=40"]["batch"] == 1


def test_finished_runs_stay_after_an_interrupt(model_folder, monkeypatch):
    ran = []

    def interrupted(work, one, *settings):
        if len(ran) == 4:
            raise KeyboardInterrupt
        ran.append(one.name)
        return serving.run(work, one, *settings)

    monkeypatch.setattr(serving, "in_process", interrupted)
    data, found = measured(
        model_folder, "--recipes", "full,kivi", "--baselines", "dynamic", status=130
    )
    assert set(found) == {DYNAMIC, "full"}
    assert found["full"]["rounds"] == 1
    assert data["environment"]["missing"] == [
        "DynamicCache at 70+6 tokens after round 1", "full at 70+6 tokens after round 1",
        "kivi at 70+6 tokens",
    ]  # fmt: skip


@pytest.mark.parametrize("at", ["trial", "figures"])
def test_a_cache_that_fails_is_left_out(model_folder, monkeypatch, at):
    ran = []

    def fails(work, one, *settings):
        ran.append((work.__name__, one.name))
        return "it broke" if ran[-1] == (at, "kivi") else serving.run(work, one, *settings)

    monkeypatch.setattr(serving, "in_process", fails)
    _, found = measured(
        model_folder, "--recipes", "kivi", "--baselines", "dynamic", "--rounds", "2", status=1
    )
    assert [name for work, name in ran if work == "figures" and name != "kivi"] == [DYNAMIC] * 2
    assert ran.count(("figures", "kivi")) == (at == "figures")
    assert (found["kivi"]["problem"], found["kivi"]["tokens_s"]) == ("it broke", None)
    assert found[DYNAMIC]["rounds"] == 2


def test_rates_are_medians_of_rounds():
    one = replace(job(), name=DYNAMIC)
    runs = [(one, RunFigures(3, 1.0, (2.0, 1.0), (s, s / 2), 60, 10)) for s in (1.0, 4.0, 2.0)]
    (row,) = make_rows([one], runs)
    assert (row.tokens_s.low, row.tokens_s.best, row.tokens_s.high) == (15, 30, 60)
    assert row.processor_tokens_s.best == 60
    assert row.whole_tokens_s.best == 3 * NEW / 4


# a process of its own


class Dies:
    """Ends the process that unpickles it."""

    def __reduce__(self):
        return os._exit, (3,)


def test_a_process_measures_and_may_die(model_folder, monkeypatch):
    monkeypatch.undo()
    figures = serving.in_process(serving.figures, job(), str(model_folder), "float32", 1)
    assert figures.kv_bytes == 3 * (PROMPT + NEW - 1) * TOKEN
    assert figures.peak_bytes is None or figures.peak_bytes >= 0
    assert figures.batch == 3
    said = serving.in_process(serving.figures, Dies())
    assert said.startswith("its process ended with status 3; the system may have")
