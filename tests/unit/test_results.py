"""Every stored result is in the folder of its machine, and a script or page names it."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
RESULTS = sorted(path for path in (BENCHMARKS / "results").rglob("*") if path.is_file())
SOURCES = [
    *BENCHMARKS.glob("*.py"), *BENCHMARKS.glob("peers/*.py"), BENCHMARKS.parent / "README.md",
    *(BENCHMARKS.parent / "docs").rglob("*.md"),
]  # fmt: skip


@pytest.fixture(scope="module")
def record():
    spec = importlib.util.spec_from_file_location("record", BENCHMARKS / "record.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def environments(data):
    """Every dictionary in the data that describes a machine."""
    if isinstance(data, dict):
        if "cpu" in data:
            yield data
        for value in data.values():
            yield from environments(value)


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.name)
def test_a_result_is_named_by_a_script_or_page(path):
    script = next((s for s in SOURCES if s.stem == path.stem), None)
    quoted = any(f'"{path.stem}"' in s.read_text() or path.name in s.read_text() for s in SOURCES)
    variant_of = path.stem.partition("_")[0]
    by_variant = any(f'f"{variant_of}_' in s.read_text() for s in SOURCES)
    assert script or quoted or by_variant


@pytest.mark.parametrize(
    "path", [path for path in RESULTS if path.suffix == ".json"], ids=lambda path: path.name
)
def test_a_result_is_in_the_folder_of_its_machine(record, path):
    found = list(environments(json.loads(path.read_text())))
    assert found
    for environment in found:
        folder = record.machine(environment["cpu"], environment.get("gpu"))
        assert path.parent == BENCHMARKS / "results" / folder


def test_machines_have_short_names(record):
    assert record.machine("Intel(R) Xeon(R) CPU E5-2680 v4 @ 2.40GHz") == "intel-xeon-e5-2680-v4"
    assert record.machine("AMD EPYC", "NVIDIA H100 80GB HBM3") == "amd-epyc-nvidia-h100-80gb-hbm3"
