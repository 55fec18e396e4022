"""Every stored result is in the folder of its machine, and a script or page names it."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
RESULTS = sorted(path for path in (BENCHMARKS / "results").rglob("*") if path.is_file())
SOURCES = [
    *BENCHMARKS.glob("*.py"), *BENCHMARKS.glob("peers/*.py"), *BENCHMARKS.glob("soak/*.py"),
    BENCHMARKS.parent / "README.md", *(BENCHMARKS.parent / "docs").rglob("*.md"),
]  # fmt: skip


@pytest.fixture(scope="module")
def record():
    spec = importlib.util.spec_from_file_location("record", BENCHMARKS / "record.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def environments(data):
    """Every dictionary in the data that describes a machine."""
    if isinstance(data, dict) and "cpu" in data:
        yield data
    if isinstance(data, dict | list):
        for value in data.values() if isinstance(data, dict) else data:
            yield from environments(value)


def test_a_result_is_named_by_a_script_or_page():
    stems, texts = {x.stem for x in SOURCES}, [x.read_text() for x in SOURCES]

    def named(path):
        variant_of = path.stem.partition("_")[0]
        names = f'"{path.stem}"', path.name, f'f"{variant_of}_'
        return path.stem in stems or any(name in text for name in names for text in texts)

    assert [path.name for path in RESULTS if not named(path)] == []


def test_a_result_is_in_the_folder_of_its_machine(record):
    for path in (path for path in RESULTS if path.suffix == ".json"):
        found = list(environments(json.loads(path.read_text())))
        assert found, path
        for environment in found:
            folder = record.machine(environment["cpu"], environment.get("gpu"))
            assert path.parent == BENCHMARKS / "results" / folder


def test_machines_have_short_names(record):
    assert record.machine("Intel(R) Xeon(R) CPU E5-2680 v4 @ 2.40GHz") == "intel-xeon-e5-2680-v4"
    assert record.machine("AMD EPYC", "NVIDIA H100 80GB HBM3") == "amd-epyc-nvidia-h100-80gb-hbm3"
