"""Tests of Triton's kernels run in its interpreter, which a process must ask for from the start."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Whether this process asked for it."""


def run(path: str, cases: str = "not slow") -> None:
    """Run the `cases` of a file in a process that has the interpreter; skip if Triton is absent."""
    pytest.importorskip("triton")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", cases, path],
        env=os.environ | {"TRITON_INTERPRET": "1", "KVLOOM_KERNELS": "auto"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
