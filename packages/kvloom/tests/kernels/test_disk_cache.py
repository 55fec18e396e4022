"""The kernels on disk: those of former versions of the source go."""

from __future__ import annotations

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
