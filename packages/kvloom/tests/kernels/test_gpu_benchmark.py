"""benchmarks/gpu.py on a machine without a GPU: its checks in the interpreter, and what it says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parents[4] / "benchmarks" / "gpu.py"


def started(*words):
    env = {k: v for k, v in os.environ.items() if k not in ("TRITON_INTERPRET", "KVLOOM_KERNELS")}
    return subprocess.run(
        [sys.executable, SCRIPT, *words], env=env, capture_output=True, text=True, check=False
    )


@pytest.mark.slow  # the tests of the kernels run them in the interpreter, too
def test_every_kernel_is_checked_in_a_dry_run(tmp_path):
    pytest.importorskip("triton")
    out = tmp_path / "gpu.json"
    done = started("--dry-run", "--fast", "--sections", "check", "--out", str(out))
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    found = json.loads(out.read_text())
    rows = {row["name"]: row["figures"] for row in found["rows"]}
    assert rows.pop("check") == {"ok": True, "failed": 0}
    assert {"pack, unpack", "column_mass", "attend", "attend_prompt", "step of a model"} == {*rows}
    selected = "the setting selects the reference"
    left = {name for name in found["left to the reference"] if not name.endswith(selected)}
    assert {name.partition(":")[0] for name in left} <= {"append", "pack", "unpack"}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_cuda_one_sentence_says_so():
    done = started()
    assert done.returncode == 1
    assert "no CUDA device" in done.stdout
    assert len(done.stdout.splitlines()) == 1


def test_an_unknown_section_is_named():
    done = started("--sections", "check,kivy")
    assert done.returncode == 2
    assert "no section kivy" in done.stderr
