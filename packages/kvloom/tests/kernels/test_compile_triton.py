"""Triton's kernels compile for GPUs that are not here, within their bounds and without a spill.

A few variants of every family, in a process without the interpreter; `python benchmarks/aot.py`
compiles all of them.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import triton_signature

SCRIPT = Path(__file__).parents[4] / "tools" / "compile_triton.py"
FAMILIES = ("attend", "quantize", "score")


@pytest.fixture
def compile_triton(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    return importlib.import_module("compile_triton")


@pytest.mark.slow
def test_kernels_of_every_family_fit_an_ampere_and_a_hopper_gpu(compile_triton):
    pytest.importorskip("triton")
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, SCRIPT, "--brief"],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert {one["family"] for one in found} == set(FAMILIES)
    assert {one["arch"] for one in found} == set(compile_triton.ARCHES)
    assert [said for one in found for said in compile_triton.problems(one)] == []
    assert all(8 <= one["registers"] <= 255 for one in found)


def test_nothing_is_compiled_in_the_interpreter():
    done = subprocess.run(
        [sys.executable, SCRIPT],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert "unset it" in done.stderr


def test_what_takes_too_much_is_said(compile_triton):
    bounds = {"registers": 100, "shared": 1000}
    fits = {"name": "a", "arch": 90, "registers": 100, "shared": 1000, "spills": 0}
    assert compile_triton.problems(fits | {"bounds": bounds}) == []
    spills = {"name": "a", "arch": 90, "registers": 101, "shared": 2000, "spills": 8}
    assert compile_triton.problems(spills | {"bounds": bounds}) == [
        "a for sm_90: 101 registers are more than 100",
        "a for sm_90: 2000 shared are more than 1000",
        "a for sm_90: 8 bytes are spilled",
    ]


def test_the_types_of_a_call():
    x = torch.empty(2, dtype=torch.float16, device="meta")
    given = {"x": x, "mask": x.bool(), "n": 5, "scale": 0.5, "none": None}
    assert triton_signature.signature(given) == {
        "x": "*fp16:16",
        "mask": "*i1:16",
        "n": "i32",
        "scale": "fp32",
    }
