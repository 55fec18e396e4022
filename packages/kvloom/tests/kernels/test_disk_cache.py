"""The kernels on disk: those of former versions of the source go."""

from __future__ import annotations

from numba import config

from kvloom.kernels import cpu_runtime


def test_kernels_of_other_versions_are_removed_and_no_other_files(tmp_path):
    ours = "pack_kernel.kernel.locals.pack-55.py311-0000abcd-11112222"
    theirs = "pack_kernel.kernel.locals.pack-54.py311-0000abce-11112222"
    former = "pack_kernel.kernel.locals.pack-53.py311-0000abcd"  # named without a version
    others = ["pack.cpython-311.pyc", "mine.nbi", "fn-3.py311.nbi", f"{theirs}.txt"]
    ends = ".nbi", ".1.nbc", ".nbi.lock"
    kept = sorted([*others, *(ours + end for end in ends)])
    for name in [*kept, *(x + end for x in (theirs, former[:-1] + "f") for end in ends)]:
        (tmp_path / name).touch()
    cpu_runtime.remove_former(str(tmp_path), 0xABCD)
    assert sorted(path.name for path in tmp_path.iterdir()) == kept
    cpu_runtime.remove_former(str(tmp_path / "none"), 0xABCD)


def nothing(address):
    """A kernel."""


def test_compiling_a_kernel_removes_those_of_former_versions(tmp_path, monkeypatch):
    monkeypatch.setattr(config, "CACHE_DIR", str(tmp_path))
    cpu_runtime.Kernel(nothing, "one")
    (own,) = tmp_path.rglob("*.nbi")
    (former := own.parent / "pack-53.py311-00000000-11112222.nbi").touch()
    cpu_runtime.remove_former.cache_clear()  # as in the next process
    cpu_runtime.Kernel(nothing, "two")
    assert own.exists()
    assert not former.exists()
