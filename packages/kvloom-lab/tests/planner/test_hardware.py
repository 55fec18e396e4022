"""Times of a plan: hardware, its files and presets, and units."""

from dataclasses import replace

import pytest

from kvloom.errors import InputError
from kvloom.recipe.resolve import resolve
from kvloom.units import parse_bytes
from kvloom_lab.planner import read_model
from kvloom_lab.planner.hardware import PRESETS, Hardware, read_hardware
from kvloom_lab.planner.plan_recipes import plan
from kvloom_lab.planner.step import CacheBytes, step_work
from kvloom_lab.planner.units import Range, parse_rate, parse_tokens


def test_the_parts_of_a_step_add_up_and_bounds_are_ordered(llama):
    found = plan(llama, ["full", "kivi", "quest"], context=65536, batch=8, hardware="h100")
    for row in found.rows:
        assert sum(row.parts_ms.values()) == pytest.approx(row.step_ms.best)
        assert row.step_ms.low < row.step_ms.best < row.step_ms.high
        assert row.tokens_s.best == pytest.approx(8e3 / row.step_ms.best)
        assert row.tokens_s.low == pytest.approx(8e3 / row.step_ms.high)
        assert [point.context for point in row.curve] == [1024 << i for i in range(7)]
    assert found.rows[0].limit == "KV reads"
    assert found.rows[0].step_ms.best > found.rows[1].step_ms.best > 0


def test_the_roofline_is_bytes_over_rates(llama):
    """With shares of 1, weights and cache are read at the bandwidth, and a layer takes its time."""
    one = Range.exactly(1.0)
    machine = Hardware("x", 10**12, 1e12, 1e15, {}, one, one, one, Range.exactly(0.0))
    model = read_model(llama)
    cache = CacheBytes(resolve("full"), model)
    time = machine.step(step_work(model, cache, 10000, 1))
    nbytes = model.weights.read + 10000 * model.geometry.token_nbytes()
    assert time.total.best == pytest.approx(nbytes / 1e12)
    slow = replace(machine, flops=1e9)
    work = step_work(model, cache, 10000, 1)
    flops = 2 * model.weights.parameters + 4 * 4 * 32 * 128 * 10000
    assert slow.step(work).total.best == pytest.approx(flops / 1e9)
    assert slow.step(work).limit == "arithmetic"
    idle = replace(machine, overhead=Range.exactly(1.0))
    assert idle.step(work).total.best == pytest.approx(4.0)


def test_presets_state_their_sources():
    for preset in PRESETS.values():
        data = preset.to_dict()
        assert set(data["sources"]) == {"rates", "weights", "kv", "arithmetic", "overhead"}
        assert data["sources"]["rates"].startswith(("NVIDIA", "AMD", "Apple"))
        assert all(data["sources"].values())
        assert preset.notes()


def test_a_tier_has_no_times_on_a_preset(llama):
    (row,) = plan(llama, ["clusterkv-2bit:tier=host"], context=8192, hardware="h100").rows
    assert row.step_ms is None
    assert "moves" in row.no_times or "move" in row.no_times


def test_hardware_from_a_file(tmp_path, llama):
    path = tmp_path / "mine.toml"
    path.write_text(
        'name = "mine"\nmemory_gb = 48\nbandwidth_gb_s = 900\ntflops = 150\n'
        'source = "a sheet"\nkv = [0.5, 0.6, 0.7]\noverhead_us = [0, 10, 20]\n'
    )
    found = plan(llama, ["full"], context=1024, hardware=str(path))
    assert found.memory == 48 * 10**9
    assert found.hardware.kv == Range(0.5, 0.6, 0.7)
    assert found.hardware.overhead.high == pytest.approx(20e-6)
    assert found.hardware.sources["kv"] == "a sheet"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("memory_gb = 48", "has no number above 0 for bandwidth_gb_s, tflops"),
        ("memory_gb = inf\nbandwidth_gb_s = 1\ntflops = 1", "has no number above 0 for memory_gb"),
        (
            "memory_gb = 1e300\nbandwidth_gb_s = 1\ntflops = 1",
            "has no number above 0 for memory_gb",
        ),
        ("memory_gb = 1\nbandwidth_gb_s = 1\ntflops = 1\nname = [1]", "has no text for name"),
        ("memory_gb = 1\nbandwidth_gb_s = 1\ntflops = 1\nspeed = 2", "has unknown fields speed"),
        ("memory_gb = 1\nbandwidth_gb_s = 1\ntflops = 1\nkv = [0.5, 0.4, 0.9]", "ascending"),
        ("memory_gb = 1\nbandwidth_gb_s = 1\ntflops = 1\nkv = [0.3, 0.6, 1.8]", "1 at most"),
        ("memory_gb = ", "cannot be read"),
    ],
)
def test_a_wrong_hardware_file_is_refused(tmp_path, text, says):
    path = tmp_path / "wrong.toml"
    path.write_text(text)
    with pytest.raises(InputError, match=says):
        read_hardware(path)


@pytest.mark.parametrize(
    ("parse", "option", "value"),
    [
        (parse_bytes, "24GiB", 24 << 30),
        (parse_bytes, "1.5 gb", 1_500_000_000),
        (parse_bytes, 1000, 1000),
        (parse_bytes, "1,500.5KB", 1_500_500),
        (parse_tokens, "131,072", 131072),
        (parse_tokens, "128k", 131072),
        (parse_tokens, "1M", 1 << 20),
        (parse_tokens, "8192", 8192),
        (parse_rate, "20tok/s", 20.0),
        (parse_rate, "2.5", 2.5),
    ],
)
def test_units(parse, option, value):
    assert parse(option) == value


@pytest.mark.parametrize(
    ("parse", "option"),
    [
        (parse_bytes, "24 bananas"), (parse_bytes, "24"), (parse_bytes, "0GB"),
        (parse_bytes, "-1GB"), (parse_bytes, 0), (parse_bytes, "1,5GB"), (parse_bytes, "12,34GB"),
        (parse_bytes, "1234,567GB"), (parse_tokens, "1.5"),
        (parse_tokens, "many"), (parse_tokens, "0"), (parse_rate, "0"), (parse_rate, "fast"),
        (parse_tokens, "9" * 400), (parse_bytes, "9" * 400),
    ],
)  # fmt: skip
def test_what_is_no_size_is_refused(parse, option):
    with pytest.raises(InputError, match="give"):
        parse(option)
