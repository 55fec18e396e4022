"""kernels.companion: a second process compiles, and results are those of one process."""

from __future__ import annotations

import os
import pickle
import tempfile
import time

import pytest
import torch
from test_arguments import INNER, OUTER, multiply

from kvloom.cache.rehearsal import Rehearsal
from kvloom.kernels import companion, dispatch
from kvloom.kernels.attend.cpu import coverage
from kvloom.kernels.dispatch import Backend, Binding, Op
from kvloom.kernels.limits import Coverage
from kvloom.kernels.plan import OpPlan
from kvloom.recipe import resolve
from kvloom.store import LayerFacts

NUMBERS = OUTER.pack(a=5, inner=INNER.pack(first=1, second=8), b=0.5, tensor=(0, 0, 0))


@pytest.fixture
def kernels(tmp_path, monkeypatch):
    """An empty folder of compiled kernels."""
    from numba import config

    monkeypatch.setattr(config, "CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(companion, "_process", None)
    monkeypatch.setattr(dispatch, "_RETRY_S", 0.0)
    return tmp_path


def index_file(folder):
    (path,) = folder.rglob("*.nbi")
    return str(path)


def doubling(bit_exact: bool) -> Op:
    """An operation that adds a number to itself, with a kernel."""

    def run(x):
        return x + (multiply(2).run(NUMBERS, 0, 1)[1] - 9)

    def reference(x):
        return x + 1

    cpu = Backend(Binding(run, lambda: multiply(2)), Coverage(), bit_exact=bit_exact)
    return Op("doubling", reference, lambda x: (x, None), cpu=cpu)


@pytest.fixture
def busy(kernels, monkeypatch):
    """The second process runs, as long as the list has an item."""
    process = [True]
    monkeypatch.setattr(companion, "running", lambda: bool(process))
    return process


def test_the_reference_runs_until_an_exact_kernel_is_compiled(busy, monkeypatch):
    op, x = doubling(bit_exact=True), torch.ones(1)
    plan = OpPlan(op)
    with dispatch.use("auto"):
        assert op(x) == plan(x) == 2
        first = op.choose(x)
        assert (first.backend, first.why) == (
            "ref",
            "its kernel is being compiled by another process",
        )
        busy.clear()
        time.sleep(0.01)
        assert op(x) == plan(x) == 2
        assert op.choose(x).backend == plan.bound.backend == "cpu"
        assert op.choose(x).until is None


def test_another_kernel_is_compiled_here(busy):
    op = doubling(bit_exact=False)
    with dispatch.use("auto"):
        assert op.choose(torch.ones(1)).backend == "cpu"


def test_a_kernel_on_disk_is_read_while_the_second_process_runs(busy):
    multiply(2)
    op = doubling(bit_exact=True)
    with dispatch.use("auto"):
        assert op.choose(torch.ones(1)).backend == "cpu"


def test_one_process_compiles_a_kernel_and_the_second_waits_for_none(kernels, monkeypatch):
    from kvloom.kernels.cpu_runtime import _locked

    multiply(2)
    path = index_file(kernels)
    with _locked(path, 0.0) as mine, _locked(path, 0.02) as other:
        assert (mine, other) == (True, False)
    with _locked(path, 0.0) as mine:
        assert mine
    with _locked(str(kernels / "absent" / "file"), 60.0) as mine:
        assert not mine
    monkeypatch.setattr(companion, "_rehearsing", True)
    os.remove(path)
    with _locked(path, 0.0), pytest.raises(companion.Compiling):
        multiply(2)
    assert not multiply(2).code.cache_hits
    assert multiply(2).code.cache_hits


def test_the_second_process_compiles_the_kernels_of_a_step(kernels, monkeypatch):
    from kvloom.kernels.append.cpu_kernel import kernel as append_kernel
    from kvloom.kernels.attend.cpu import decode_kernel

    layer = Rehearsal(resolve("full"), 0, 1, None, LayerFacts(), 2, 2, 32, torch.float32)
    monkeypatch.setenv("KVLOOM_KERNELS", "auto")
    monkeypatch.setattr(companion, "_expected", lambda: lambda: [layer])
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(kernels))
    companion.start()
    companion.wait()
    assert companion._process.returncode == 0
    assert not companion.running()
    for cached in (append_kernel, decode_kernel.kernel, coverage.kernel):
        cached.cache_clear()
    attend, _tile = coverage.kernel(32, 2, 1, torch.float32, (0, False), False, None, None)
    assert attend.code.cache_hits
    assert append_kernel(4).code.cache_hits


def test_a_process_that_cannot_start_is_not_missed(kernels, monkeypatch):
    monkeypatch.setattr(companion, "_expected", lambda: lambda: [lambda: None])  # has no pickle
    with pytest.raises((pickle.PicklingError, AttributeError)):
        pickle.dumps(lambda: None)
    companion.start()
    assert not companion.running()
    monkeypatch.setattr(companion, "_expected", lambda: None)  # the cache was deleted
    companion.start()
    assert not companion.running()
    monkeypatch.setattr(companion, "_expected", lambda: lambda: [])
    monkeypatch.setattr("sys.executable", "/bin/false")  # a program that embeds Python
    companion.start()
    assert companion._process is None


def test_kernels_go_to_a_private_folder_of_temporary_files_last(tmp_path, monkeypatch):
    """Where neither the source's folder nor the home is writable."""
    from numba import config

    from kvloom.kernels import cpu_runtime

    monkeypatch.setattr(config, "CACHE_DIR", "")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    last = cpu_runtime._CacheFiles._locator_classes[-1:]
    monkeypatch.setattr(cpu_runtime._CacheFiles, "_locator_classes", last)
    assert not multiply(2).code.cache_hits
    assert multiply(2).code.cache_hits
    (folder,) = tmp_path.iterdir()
    assert list(folder.glob("*.nbc"))
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o777)  # others could have written the files
    assert not multiply(2).code.cache_hits
    folder.chmod(0o700)
    folder.rename(tmp_path / "other")
    folder.symlink_to(tmp_path / "other")
    assert not multiply(2).code.cache_hits
