"""Write a safetensors file whole or not at all. The caller decides what is in it.

`write` fills a temporary file beside the target, `.{name}.{32 hex digits}`, and renames it. The
writer locks the temporary file until the rename; the system releases the lock when the process
dies. So the next writer of the same target can remove the files of killed writers, and no others.
The temporary names of safetensors' own `save_file` cannot be recognized later.
"""

from __future__ import annotations

import json
import os
import re
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO
from uuid import uuid4

import torch
from torch import Tensor

try:
    import fcntl
except ImportError:  # Windows: temporary files are not locked, so none is removed later
    fcntl = None  # type: ignore[assignment]

CHECKSUM = "checksum"
"""The name of the tensor in which a file's checksum is stored: its last four bytes."""

_INTACT = 0x2144DF1C  # the CRC-32 of any bytes that are followed by their own CRC-32
_DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip


def write(
    path: Path,
    tensors: dict[str, Tensor],
    about: dict[str, str],
    error_type: type[Exception],
    *,
    publish: Callable[[str], None] | None = None,
) -> None:
    """Write contiguous CPU tensors and the metadata `about`, with the user's default permissions.

    The CRC-32 of all bytes before it comes last, for `intact`, as the tensor `CHECKSUM`.
    publish: called with the temporary file's name, instead of renaming it, once its bytes are on
    the disk. Raises `error_type` if the file cannot be written; `path` then has its old content.
    """
    try:
        remove_abandoned(path.parent, re.escape(path.name))
        file = _create(path)
        try:
            with file:
                crc = 0
                for part in _parts(tensors, about):
                    crc = zlib.crc32(part, crc)
                    file.write(part)
                file.write(crc.to_bytes(4, "little"))
                file.flush()
                if publish is not None:
                    os.fsync(file.fileno())
                if fcntl is None:
                    file.close()  # Windows cannot rename an open file
                if publish is None:
                    os.replace(file.name, path)
                else:
                    publish(file.name)
        finally:
            with suppress(OSError):
                os.unlink(file.name)
    except OSError as error:
        why = f"{error.strerror or error}"
        if isinstance(error, FileNotFoundError):
            why += "; give a file in a folder that exists"
        raise error_type(f"{str(path)!r} cannot be written: {why}") from error


def intact(path: Path) -> bool:
    """Return whether a file ends with the CRC-32 of all bytes before; raises `OSError`."""
    crc = 0
    with path.open("rb") as file:
        while part := file.read(1 << 16):
            crc = zlib.crc32(part, crc)
    return crc == _INTACT


def _parts(tensors: dict[str, Tensor], about: dict[str, str]) -> Iterator[Any]:
    """Yield the bytes of a safetensors file: the header's length, the header, every tensor.

    Wide dtypes come first and the header is a multiple of 8 bytes, so every tensor is aligned.
    """
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header: dict[str, Any] = {"__metadata__": about}
    end = 0
    for name in names:
        x, begin = tensors[name], end
        end += x.nbytes
        header[name] = {
            "dtype": _DTYPES[x.dtype], "shape": [*x.shape], "data_offsets": [begin, end],
        }  # fmt: skip
    header[CHECKSUM] = {"dtype": "U8", "shape": [4], "data_offsets": [end, end + 4]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little")
    yield text
    for name in names:
        yield tensors[name].reshape(-1).view(torch.uint8).numpy()


def _create(path: Path) -> BinaryIO:
    """Open a new temporary file of `path`, locked until it is closed or this process dies."""
    while True:
        file = (path.parent / f".{path.name}.{uuid4().hex}").open("xb")
        if fcntl is None:
            return file
        with suppress(OSError):  # a file system without locks: no writer removes the file either
            fcntl.flock(file, fcntl.LOCK_EX)
        if os.path.exists(file.name):
            return file
        file.close()  # another writer removed it before it was locked


def remove_abandoned(folder: Path, target: str) -> None:
    """Remove the temporary files in a folder that no living process has locked.

    target: a regular expression of the names of their targets.
    """
    if fcntl is None:
        return
    ours = re.compile(rf"\.{target}\.[0-9a-f]{{32}}")
    names: list[str] = []
    with suppress(OSError):  # a folder that cannot be listed may still be written to
        names = os.listdir(folder)
    for name in names:
        if ours.fullmatch(name):
            left_over = folder / name
            with suppress(OSError), left_over.open("r+b") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                left_over.unlink()


def sync_folder(folder: Path) -> None:
    """Put the names in a folder on the disk, where the system can do that."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
