"""Other processors and large tensors.

The kernels are compiled for processors with fewer instructions, and their tests run. Tokens beyond
2**31 numbers of one tensor are read. Kernels of a former version of the source are removed.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from kvloom.cache.layer import LayerCache
from kvloom.cache.step import Queries, StepInputs
from kvloom.kernels import cpu_runtime, dispatch
from kvloom.recipe.resolve import resolve

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
LARGE_S = 300  # seconds of a budget from which large tensors and all tests of kernels are tried


def run_all(tally: Tally) -> None:
    """Run all; a short campaign runs a few tests of kernels."""
    long = tally.seconds >= LARGE_S
    for processor in PROCESSORS:
        run_tests(tally, processor, [TESTS] if long else [TESTS / "test_cpu_append.py"])
    with tally.case("kernels of a former version"), tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "k.py311-00000000-00000000.nbi").touch()
        cpu_runtime.remove_former(folder, 1)
        assert not os.listdir(folder), "a kernel of a former version is left"
    if long:
        for dtype, tokens in ((torch.float16, (1 << 31) // 64 + 5_000),):
            with tally.case(f"tensors of more than 2**31 numbers in {dtype}", limit_s=1800):
                attend_far(tokens, dtype)


def run_tests(tally: Tally, processor: str, paths: list[Path]) -> None:
    """Run tests of kernels for a processor; each is a case."""
    name, features = PROCESSORS[processor]
    with tempfile.TemporaryDirectory() as folder:
        environment = {
            **os.environ, "NUMBA_CPU_NAME": name, "NUMBA_CPU_FEATURES": features,
            "NUMBA_CACHE_DIR": folder,
        }  # fmt: skip
        command = [sys.executable, "-m", "pytest", "-rf", *map(str, paths)]
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


def attend_far(tokens: int, dtype: torch.dtype) -> None:
    """Attend to so many exact tokens of 64 channels: keys and values beyond 2**31 numbers each."""
    dim = 64
    layer = LayerCache(resolve("full"))
    keys, values = (torch.zeros(1, 1, tokens, dim, dtype=dtype) for _ in range(2))
    generator = torch.Generator().manual_seed(0)
    far = slice(tokens - 100, tokens)
    keys[:, :, far] = torch.randn(1, 1, 100, dim, generator=generator).to(dtype)
    values[:, :, far] = torch.randn(1, 1, 100, dim, generator=generator).to(dtype)
    layer.prefill(StepInputs(Queries(keys[:, :, -1:], 1.0), keys, values))
    del keys, values
    q, k, v = (torch.randn(1, 1, 1, dim, generator=generator).to(dtype) for _ in range(3))
    outs = []
    for backend in ("ref", "auto"):
        with dispatch.use(backend), torch.no_grad():
            outs.append(layer.run(StepInputs(Queries(20 * q, 1.0), k, v)).float())
            layer.crop(1)
    torch.testing.assert_close(*outs, rtol=2e-3, atol=2e-3)
    assert float(outs[0].abs().max()) > 0.1, "the far tokens are not read"
