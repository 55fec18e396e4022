"""kernels.arguments: what a caller packs by name is what a compiled kernel reads by name."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from kvloom.kernels.arguments import MATRIX, Arguments, Block, strides
from kvloom.kernels.cpu_runtime import CompileNotice

INNER = Block(first=int, second=int)
OUTER = Arguments(a=int, inner=INNER, b=float, tensor=MATRIX)


def test_fields_are_packed_in_the_order_of_the_declaration():
    inner = INNER.pack(second=-3, first=2)
    assert inner == (2, -3)
    packed = OUTER.pack(tensor=(5, 6, 7), b=0.5, inner=inner, a=1)
    numbers, half = np.frombuffer(packed, dtype=np.int64), np.array(0.5).view(np.int64)
    assert numbers.tolist() == [0, 1, 2, -3, half, 5, 6, 7], "a task counter first"
    record = numbers[1:].view(OUTER.dtype)[0]
    assert (record["a"], record["inner"]["second"], record["b"]) == (1, -3, 0.5)
    assert record["tensor"]["head"] == 7
    assert len(packed) == 8 + 8 * OUTER.numbers


def test_a_missing_or_an_unknown_field_is_an_error():
    with pytest.raises(TypeError, match="second"):
        INNER.pack(first=1)
    with pytest.raises(TypeError, match="third"):
        INNER.pack(first=1, second=1, third=1)


def test_kernels_read_and_write_named_fields():
    from kvloom.kernels.cpu_runtime import Kernel, head_address, read_arguments

    layout = OUTER.dtype

    def kernel(args):
        a = read_arguments(args, layout)
        a.a = head_address(a.tensor, 2, 3) + int(a.inner.second * a.b)

    numbers = OUTER.pack(a=0, inner=INNER.pack(first=1, second=8), b=0.5, tensor=(100, 10, 1))
    assert Kernel(kernel, "test").run(numbers, 0, 1)[1] == 100 + 20 + 3 + 4


def multiply(factor):
    """A kernel that multiplies `a` by a factor, which a step closes over."""
    from kvloom.kernels.cpu_runtime import Kernel, kernel_step, read_arguments

    layout = OUTER.dtype

    @kernel_step
    def step(x):
        return factor * x

    def kernel(args):
        a = read_arguments(args, layout)
        a.a = step(a.a)

    return Kernel(kernel, f"by {factor}")


def test_a_kernel_is_found_on_disk_by_its_name(tmp_path, monkeypatch):
    """Steps that it closes over are new objects each time."""
    from numba import config

    monkeypatch.setattr(config, "CACHE_DIR", str(tmp_path))
    found = [multiply(factor) for factor in (2, 2, 3)]
    assert [one.code.cache_hits for one in found] == [0, 1, 0]
    numbers = OUTER.pack(a=5, inner=INNER.pack(first=1, second=8), b=0.5, tensor=(0, 0, 0))
    assert [one.run(numbers, 0, 1)[1] for one in found] == [10, 10, 15]


def test_compiling_is_announced_once(tmp_path, monkeypatch, capsys):
    """Before a kernel is ready, and not where it is read from disk."""
    from numba import config

    from kvloom.kernels import cpu_runtime

    monkeypatch.setattr(config, "CACHE_DIR", str(tmp_path))
    multiply(2)
    monkeypatch.setattr(cpu_runtime, "_NOTICE", CompileNotice(after_s=0.0))
    multiply(2)
    assert capsys.readouterr() == ("", "")
    multiply(3)
    multiply(4)
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("kvloom: compiling kernels for this processor; later runs load")
    assert str(tmp_path) in printed.err
    assert printed.err.count("\n") == 1


def test_short_compilations_are_announced_when_they_add_up(capsys):
    notice = CompileNotice(after_s=60.0)
    with notice.compiling(None):
        time.sleep(0.02)
    assert notice.left_s < 60.0 - 0.02
    assert capsys.readouterr().err == ""
    notice.left_s = 0.0
    with notice.compiling(None):
        end = time.monotonic() + 10.0
        while not notice.printed and time.monotonic() < end:
            time.sleep(0.005)
    assert "set NUMBA_CACHE_DIR to a writable folder" in capsys.readouterr().err


def test_processes_that_compile_at_once_do_not_take_each_others_kernels(tmp_path, monkeypatch):
    """Both find an empty folder, and the first to begin is the last to write."""
    from numba import config
    from numba.core.caching import IndexDataCacheFile

    monkeypatch.setattr(config, "CACHE_DIR", str(tmp_path))
    written = []
    with monkeypatch.context() as patch:
        patch.setattr(IndexDataCacheFile, "_load_index", lambda self: {})
        patch.setattr(IndexDataCacheFile, "_save_data", lambda *args: written.append(args))
        for factor in (2, 3):
            multiply(factor)
    for file, name, data in reversed(written):
        file._save_data(name, data)
    found = [multiply(factor) for factor in (2, 3)]
    assert any(one.code.cache_hits for one in found)
    numbers = OUTER.pack(a=5, inner=INNER.pack(first=1, second=8), b=0.5, tensor=(0, 0, 0))
    assert [one.run(numbers, 0, 1)[1] for one in found] == [10, 15]


@pytest.mark.slow
def test_kernels_that_two_processes_compiled_do_not_share_a_step(tmp_path):
    """Numba gives the steps of both the same numbers; a third process loads both."""
    code = "import sys; from test_arguments import attends; print(*map(attends, sys.argv[1:]))"

    def run(*dtypes: str) -> str:
        return subprocess.run(
            [sys.executable, "-c", code, *dtypes],
            cwd=Path(__file__).parent,
            env={**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()

    alone = run("float32"), run("bfloat16")
    assert (*alone, run("float32", "bfloat16")) == ("True", "True", "True True")


def attends(dtype: str) -> bool:
    """Whether compiled attention to exact tokens of a dtype is that of the reference."""
    from kvloom.kernels import ops
    from kvloom.kernels.attend import reference
    from kvloom.kernels.attend.regions import Region

    q, k, v = (torch.randn(1, 2, n, 32).to(getattr(torch, dtype)) for n in (1, 300, 300))
    got = ops.attend.backends["cpu"].run(q, [Region.exact(k, v)], 0.1)
    want = reference.attend_exact(q.float(), k.float(), v.float(), 0.1)
    return torch.allclose(got.out, want.out, rtol=0, atol=1e-5)


def test_strides_are_bytes_and_a_single_row_or_head_is_shared():
    x = torch.zeros(2, 3, 5, 4)
    assert strides(x, 3) == (x.data_ptr(), 240, 80, 16)
    assert strides(x[:1], 2) == (x.data_ptr(), 0, 80)
    assert strides(x[:, :1], 2) == (x.data_ptr(), 240, 0)
    assert strides(None, 2) == (0, 0, 0)
