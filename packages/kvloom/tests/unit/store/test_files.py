"""Files written whole or not at all: their bytes, their checksum, and what a failure leaves."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import threading
from contextlib import contextmanager

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from kvloom.store import files
from limits import limited
from mutations import flipped

TENSORS = {
    "b": torch.arange(5, dtype=torch.uint8),
    "a": torch.randn(3, 5),
    "half": torch.randn(2, 3, 1).bfloat16(),
    "mask": torch.tensor([True, False, True]),
    "none": torch.empty(0, 4, dtype=torch.float16),
    "one": torch.tensor(3),
    "fp8": torch.ones(3).to(torch.float8_e4m3fn),
}
WRITER = """
import os, sys
from pathlib import Path
import torch
from kvloom.store import files

rename = os.replace
def wait(*paths):
    print("written", flush=True)
    sys.stdin.readline()
    rename(*paths)

os.replace = wait
files.write(Path(sys.argv[1]), {"x": torch.full((3,), 7.0)}, {}, ValueError)
"""
locks = pytest.mark.skipif(files.fcntl is None, reason="this system has no file locks")


def write(path, tensors=TENSORS, **more) -> None:
    files.write(path, tensors, {"about": 'a\n"text" ü'}, ValueError, **more)


def names(folder) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@contextmanager
def writer(path):
    """Another process that has filled its temporary file and waits before the rename."""
    process = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout.readline() == "written\n"
        yield process
    finally:
        process.kill()
        process.communicate()


def test_safetensors_reads_what_was_written(tmp_path):
    path = tmp_path / "x"
    write(path)
    found = load_file(path)
    assert found.keys() == {*TENSORS, "checksum"}
    for name, x in TENSORS.items():
        assert (found[name].dtype, found[name].shape) == (x.dtype, x.shape)
        assert torch.equal(found[name].float(), x.float())
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"about": 'a\n"text" ü'}
    whole = path.read_bytes()
    begin = 8 + int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8:begin])
    for name, x in TENSORS.items():
        assert (begin + header[name]["data_offsets"][0]) % x.element_size() == 0
    assert files.intact(path)
    assert names(tmp_path) == ["x"]


def test_a_file_without_tensors_can_be_written(tmp_path):
    write(tmp_path / "x", {})
    assert load_file(tmp_path / "x").keys() == {"checksum"}


def test_every_flipped_bit_every_cut_and_every_appended_byte_changes_the_checksum(tmp_path):
    path = tmp_path / "x"
    write(path, {"x": torch.arange(4)})
    whole = path.read_bytes()
    for bit in range(8 * len(whole)):
        path.write_bytes(flipped(whole, bit))
        assert not files.intact(path), bit
    for changed in [whole[:n] for n in range(len(whole))] + [
        whole + bytes([n]) for n in range(256)
    ]:
        path.write_bytes(changed)
        assert not files.intact(path)


@locks
def test_what_a_killed_writer_left_is_removed_by_the_next_one(tmp_path):
    path = tmp_path / "x.kv"
    write(path)
    before = path.read_bytes()
    with writer(path) as process:
        process.kill()
        process.wait()
    assert len(names(tmp_path)) == 2
    assert path.read_bytes() == before
    write(path)
    assert names(tmp_path) == ["x.kv"]


@locks
def test_what_a_living_writer_is_writing_stays(tmp_path):
    path = tmp_path / "x.kv"
    with writer(path) as process:
        partial = names(tmp_path)
        write(path)
        assert names(tmp_path) == sorted([*partial, "x.kv"])
        assert load_file(path).keys() == {*TENSORS, "checksum"}
        process.communicate("\n")
        assert process.returncode == 0
    assert names(tmp_path) == ["x.kv"]
    assert load_file(path)["x"].tolist() == [7.0, 7.0, 7.0]


@locks
def test_a_file_removed_before_it_was_locked_is_made_again(tmp_path, monkeypatch):
    flock, removed = files.fcntl.flock, []

    def late(file, operation):
        if not removed:
            removed.append(file.name)
            os.unlink(file.name)
        flock(file, operation)

    monkeypatch.setattr(files.fcntl, "flock", late)
    write(tmp_path / "x.kv")
    assert len(removed) == 1
    assert names(tmp_path) == ["x.kv"]


def test_many_writers_of_one_file_do_not_disturb_each_other(tmp_path):
    path, failed = tmp_path / "x.kv", []

    def work() -> None:
        try:
            for _ in range(100):
                write(path)
                assert files.intact(path)
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    assert names(tmp_path) == ["x.kv"]


def test_files_of_other_names_stay(tmp_path):
    digits = "0123456789abcdef" * 2
    others = [
        f".y.kv.{digits}", f".x.kv.{digits}0", f".x.kv.{digits[1:]}", f".x.kv.{digits.upper()}",
        f"x.kv.{digits}", f".xykv.{digits}", f".x.kv.{digits}.bak", ".x.kv.tmp",
    ]  # fmt: skip
    for name in others:
        (tmp_path / name).touch()
    (tmp_path / f".x.kv.{digits[::-1]}").mkdir()
    write(tmp_path / "x.kv")
    assert names(tmp_path) == sorted([*others, f".x.kv.{digits[::-1]}", "x.kv"])


@pytest.mark.parametrize("at", ["rename", "tensor"])
def test_a_full_disk_leaves_the_file_before_and_no_other(tmp_path, monkeypatch, at):
    path = tmp_path / "x.kv"
    write(path)
    before = path.read_bytes()

    def full(*args):
        yield b"some"
        raise OSError(errno.ENOSPC, "No space left on device")

    if at == "tensor":
        monkeypatch.setattr(files, "_parts", full)
    else:
        monkeypatch.setattr(os, "replace", lambda *paths: list(full()))
    with pytest.raises(ValueError, match=r"x\.kv' cannot be written: No space left on device$"):
        write(path)
    assert path.read_bytes() == before
    assert names(tmp_path) == ["x.kv"]


def test_a_folder_that_does_not_exist_is_named_with_a_remedy(tmp_path):
    with pytest.raises(ValueError, match=r"x\.kv' cannot be written: .*; give a file in a folder"):
        write(tmp_path / "none" / "x.kv")


def test_a_file_larger_than_the_system_allows_leaves_the_file_before(tmp_path):
    pytest.importorskip("resource")
    path = tmp_path / "x.kv"
    write(path)
    before = path.read_bytes()
    with limited("FSIZE", 10_000):
        for count in (2_500, 250_000):  # fails when the file is closed, and before
            with pytest.raises(ValueError, match="cannot be written: File too large"):
                write(path, {"x": torch.zeros(count)})
    assert path.read_bytes() == before
    assert names(tmp_path) == ["x.kv"]


def test_an_interrupt_leaves_the_file_before_and_no_other(tmp_path, monkeypatch):
    path = tmp_path / "x.kv"

    def interrupt(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(files, "_parts", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write(path)
    assert names(tmp_path) == []


@locks
def test_where_files_cannot_be_locked_nothing_is_removed(tmp_path, monkeypatch):
    left = f".x.kv.{'0123456789abcdef' * 2}"
    (tmp_path / left).touch()

    def none(*args):
        raise OSError(errno.ENOLCK, "No locks available")

    with monkeypatch.context() as patch:
        patch.setattr(files.fcntl, "flock", none)
        write(tmp_path / "x.kv")
    with monkeypatch.context() as patch:
        patch.setattr(files, "fcntl", None)
        write(tmp_path / "x.kv")
    assert names(tmp_path) == [left, "x.kv"]
    write(tmp_path / "x.kv")
    assert names(tmp_path) == ["x.kv"]
