"""Other processors and large tensors.

The kernels are compiled for processors with fewer instructions, and all their tests run, the slow
ones included; tests of the GPU's kernels, which no processor changes, are left out. Tensors of more
than 2**31 numbers are read and written: see `large`.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from . import large
from .tally import Tally

ROOT = Path(__file__).parents[2]
TESTS = ROOT / "packages/kvloom/tests/kernels"
PROCESSORS = {
    "avx2": (
        "haswell",
        "+cx8,+fxsr,+mmx,+sse,+sse2,+sse3,+ssse3,+sse4.1,+sse4.2,+popcnt,+avx,+avx2,+fma,+f16c,"
        "+bmi,+bmi2,+lzcnt,+movbe",
    ),
    "scalar": ("x86-64", "+cx8,+fxsr,+mmx,+sse,+sse2"),
}
WHOLE = ["-m", "", f"--ignore-glob={TESTS}/*gpu*", f"--ignore-glob={TESTS}/*triton*", str(TESTS)]
LARGE_S = 1500  # seconds of a budget from which large tensors and all tests of kernels are tried


def run_all(tally: Tally) -> None:
    """Run all; a short campaign runs a few tests of kernels."""
    long = tally.seconds >= LARGE_S
    for processor in PROCESSORS:
        run_tests(tally, processor, WHOLE if long else [str(TESTS / "test_cpu_append.py")])
    for name, check in large.CASES.items() if long else ():
        with tally.case(f"more than 2**31 numbers: {name}"):
            check()


def run_tests(tally: Tally, processor: str, arguments: list[str]) -> None:
    """Run tests of kernels, those that pytest's arguments choose; each is a case."""
    name, features = PROCESSORS[processor]
    with tempfile.TemporaryDirectory() as folder:
        environment = {
            **os.environ, "NUMBA_CPU_NAME": name, "NUMBA_CPU_FEATURES": features,
            "NUMBA_CACHE_DIR": folder,
        }  # fmt: skip
        command = [sys.executable, "-m", "pytest", "-rf", *arguments]
        tally.state.write_text(f"the kernels' tests for {processor}")
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    summary = done.stdout.strip().splitlines()[-1] if done.stdout.strip() else done.stderr[-300:]
    counts = {kind: int(n) for n, kind in re.findall(r"(\d+) (passed|failed|error)", summary)}
    tally.cases += sum(counts.values())
    tally.figures[f"{processor} tests"] = counts.get("passed", 0)
    for line in re.findall(r"^(?:FAILED|ERROR) .*", done.stdout, re.MULTILINE):
        tally.fail(f"{processor}: {line}")
    if done.returncode and not sum(counts.get(x, 0) for x in ("failed", "error")):
        tally.fail(f"{processor}: pytest ended with {done.returncode}: {summary}")
