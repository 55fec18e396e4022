"""Times measured on this machine: what is measured, how it is used, and how it is stored."""

import json
from dataclasses import replace

import pytest
import torch
from transformers import LlamaConfig

from kvloom.errors import InputError
from kvloom.recipe.resolve import resolve
from kvloom_lab.planner import measure, read_model
from kvloom_lab.planner.machine import (
    TOLERANCE,
    LayerRate,
    Machine,
    at_batch,
    layer_key,
    load_machine,
    machine_path,
    save_machine,
)
from kvloom_lab.planner.measure import measured_recipe
from kvloom_lab.planner.plan_recipes import plan
from kvloom_lab.planner.step import CacheBytes, step_work

RECIPES = ["full", "kivi:group=16,residual=16", "h2o", "quest:page=4,tokens=100"]


@pytest.fixture(scope="module")
def config():
    return LlamaConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, vocab_size=199, max_position_embeddings=1024,
        dtype=torch.float32,
    )  # fmt: skip


@pytest.fixture
def quick(monkeypatch, tmp_path):
    """Measurements of a few milliseconds, stored in a temporary folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for name, value in {
        "_BATCHES": (1, 4), "_POINTS": ((200, 1), (200, 2), (600, 1)),
        "_MATRICES": ((32, 32), (32, 16)), "_WEIGHTS": 1 << 14, "_CACHES": 1, "_SECONDS": 0.0,
        "_REPEATS": 2,
    }.items():  # fmt: skip
        monkeypatch.setattr(measure, name, value)
    monkeypatch.setattr(measure.clock, "read_bandwidth_gb_s", lambda: 10.0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def work(config, spec, context=500, batch=1):
    model = read_model(config)
    return step_work(model, CacheBytes(resolve(spec), model), context, batch), model.geometry


def test_a_plan_measures_the_machine_once_and_stores_it(quick, config, monkeypatch):
    units, reported = [], []

    def on_step(total):
        units.append(total)
        return lambda what, done: reported.append(done)

    found = plan(config, RECIPES, context=500, hardware="this", on_step=on_step)
    kinds = len(found.hardware.layers)
    assert kinds == 1 + len(RECIPES)  # quest's first two layers read all, with sinks apart
    assert units == [3 + kinds] == [sum(reported)]
    assert all(row.step_ms.low < row.step_ms.best < row.step_ms.high for row in found.rows)
    assert load_machine() == found.hardware
    monkeypatch.setattr(measure, "layer_rate", lambda *_: pytest.fail("measured again"))
    again = plan(config, RECIPES, context=900, batch=3, hardware="this", on_step=on_step)
    assert again.hardware == found.hardware
    assert len(units) == 1


def test_another_recipe_is_measured_alone(quick, config, monkeypatch):
    plan(config, ["full"], context=500, hardware="this")
    for name in ("linear_curve", "model_overhead", "total_memory"):
        monkeypatch.setattr(measure, name, lambda *_: pytest.fail("measured again"))
    monkeypatch.setattr("kvloom_lab.planner.measure.total_memory", lambda: 1 << 40)
    found = plan(config, ["full", "h2o:fraction=0.1", "h2o"], context=500, hardware="this")
    assert len(found.hardware.layers) == 2  # a budget changes bytes, not rates


def test_measurements_of_another_machine_or_version_do_not_count(quick, config, monkeypatch):
    plan(config, ["full"], context=500, hardware="this")
    assert load_machine() is not None
    about = measure.about()
    monkeypatch.setattr("kvloom_lab.planner.machine.about", lambda: {**about, "threads": 64})
    assert load_machine() is None
    monkeypatch.undo()


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format": 1}', '{"format": 0}'])
def test_a_damaged_file_counts_as_none(quick, text):
    machine_path().parent.mkdir(parents=True, exist_ok=True)
    machine_path().write_text(text)
    assert load_machine() is None


def test_a_folder_that_cannot_be_written_is_named(quick, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(InputError, match="set XDG_CACHE_HOME"):
        save_machine(Machine({}, 1, 1.0))


def test_a_machine_with_a_gpu_is_not_measured(quick, config, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(InputError, match="use a preset"):
        plan(config, ["full"], context=500, hardware="this")


def test_the_fit_returns_the_rates_that_made_the_times():
    points = [(1, 10**6), (4, 4 * 10**6), (1, 10**8), (4, 4 * 10**8)]
    found = measure.fit_rate([(b, n, 2e-4 + b * 3e-5 + n / 5e9) for b, n in points])
    assert found.fixed_s == pytest.approx(2e-4)
    assert found.row_s == pytest.approx(3e-5)
    assert found.bytes_s == pytest.approx(5e9)


def test_no_part_of_a_fit_is_negative():
    """Times that fall with the rows: the time per row is left out."""
    found = measure.fit_rate(
        [(1, 1000, 3e-4), (4, 4000, 2e-4), (1, 10**8, 2e-2), (4, 4 * 10**8, 8e-2)]
    )
    assert found.row_s == 0
    assert found.fixed_s > 0
    assert 4e9 < found.bytes_s < 6e9


def test_seconds_per_byte_lie_on_lines_through_measured_batches():
    curve = {1: 1.0, 2: 1.2, 8: 3.0}
    assert [at_batch(curve, b) for b in (1, 2, 5, 8)] == pytest.approx([1.0, 1.2, 2.1, 3.0])
    assert at_batch(curve, 14) == pytest.approx(4.8)
    assert at_batch({1: 2.0}, 9) == 2.0


def test_the_prediction_adds_up(config):
    """By hand: weights, the cache's bytes, and the overhead of steps, layers and rows."""
    step, geometry = work(config, "full", 500, 2)
    key = layer_key(step.layers[0], geometry)
    machine = Machine(
        {"threads": 1}, 1, 1.0, {"float32": {1: 1e-9, 2: 3e-9}}, {"float32": (0.5, 0.25)},
        {key: LayerRate(0.01, 0.001, 1e6)},
    )  # fmt: skip
    time = machine.step(step)
    kv = 3 * 2 * 500 * 2 * 2 * 16 * 4
    assert time.kv.best == pytest.approx(kv / 1e6)
    assert time.weights.best == pytest.approx(step.weights.best * 1e-9)
    assert time.arithmetic.best == pytest.approx(step.weights.best * 2e-9)
    assert time.overhead.best == pytest.approx(0.5 + 3 * 0.25 + 3 * (0.01 + 2 * 0.001))
    assert time.total.low == pytest.approx(time.total.best * (1 - TOLERANCE))
    assert time.total.high == pytest.approx(time.total.best * (1 + TOLERANCE))


def test_the_key_of_a_layer_has_no_budget_but_all_else(config):
    def key(spec):
        step, geometry = work(config, spec)
        return layer_key(step.layers[-1], geometry)

    assert key("h2o:fraction=0.2") == key("h2o:fraction=0.7")
    assert key("kivi:compress_after=400,group=16") == key("kivi:group=16")
    assert (
        len({key(spec) for spec in ("full", "h2o", "snapkv", "kivi:group=16", "rtn:group=16")}) == 5
    )
    assert key("quest:page=4,tokens=100") != key("quest:page=8,tokens=100")


def test_half_of_the_tokens_are_kept_where_a_layer_is_measured():
    assert measured_recipe(resolve("h2o"), 512).keep.budget.tokens == 256
    wide = replace(resolve("snapkv:tokens=2000"), name="x")
    assert measured_recipe(wide, 8).keep == replace(wide.keep, shared=False)
    assert measured_recipe(resolve("kivi:compress_after=99"), 512).compress_after == 0


def test_quantized_weights_have_no_measured_times(config):
    settings = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    quantized = LlamaConfig(**{**config.to_dict(), "quantization_config": settings})
    step, _ = work(quantized, "full")
    assert "bitsandbytes-8bit" in Machine({}, 1, 1.0).problem(step)


def test_a_machine_is_plain_data(config):
    machine = Machine(
        {"threads": 2, "cpu": "x"}, 10, 2.0, {"float32": {1: 1e-9}}, {"float32": (0.5, 0.25)},
        {"key": LayerRate(0.01, 0.001, 1e6)},
    )  # fmt: skip
    assert Machine.from_dict(json.loads(json.dumps(machine.to_dict()))) == machine
    assert "2 threads" in machine.describe()
