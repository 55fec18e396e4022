"""Tiers of offloaded tokens: host memory or a file, as rows that grow at their end.

Host memory is pinned if the device is a GPU. A file is memory-mapped and removed with the cache.
Decides how rows are stored, and which errors follow if they cannot be. `offload.OffloadStore`
decides what is in them.
"""

from __future__ import annotations

import os
import tempfile
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import RecipeError, TierError
from ..registry.fields import check_fields, check_whole
from ..state import Stateful

TIERS = ("host", "file")


@dataclass(frozen=True)
class Tier:
    """A tier for offloaded tokens.

    Attributes:
        kind: "host" for host memory, or "file" for a memory-mapped file.
        folder: For the file; None: the system's for temporary files.
        steps: The tokens that this many last steps read stay on the device.
    """

    kind: str = "host"
    folder: str | None = None
    steps: int = 1

    def __post_init__(self) -> None:
        check_fields(self, "kind", "folder")
        if self.kind not in TIERS:
            raise RecipeError(
                f"tier kind={self.kind!r} is not one of {', '.join(TIERS)}; leave the tier out to "
                "keep every token on the device"
            )
        if self.folder is not None and self.kind != "file":
            raise RecipeError(f'folder={self.folder!r} needs kind="file", not {self.kind!r}')
        check_whole("steps", self.steps, 0)


class Traffic(NamedTuple):
    """What steps found of the tokens that they read.

    Attributes:
        hits: Tokens per row and head that were on the device.
        misses: Tokens per row and head that were not.
        nbytes: Bytes copied to the device.
    """

    hits: int = 0
    misses: int = 0
    nbytes: int = 0


class Rows(Stateful):
    """Rows [n, width] in host memory that grow at their end.

    pinned: a GPU copies the rows while the host continues; the host waits before it reads them.
    """

    def __init__(self, pinned: bool = False) -> None:
        self.pinned = pinned
        self.data: Tensor | None = None
        self.count = 0
        self.copied: Any = None  # a CUDA event after the last copy, until the host has waited

    def __deepcopy__(self, memo: dict) -> Rows:
        """Copy the rows; those of a file are copied into another file."""
        copied = self.fresh()
        if self.data is not None:
            copied.append(self.view())
        return copied

    def held(self) -> Iterator[Tensor]:
        """Yield the reserved rows."""
        if self.data is not None:
            yield self.data

    def fresh(self) -> Rows:
        """Return empty rows of the same kind."""
        return Rows(self.pinned)

    def view(self) -> Tensor:
        """Return the rows [n, width], a view; raises `TierError` if they cannot be read."""
        self.check()
        assert self.data is not None
        if self.copied is not None:
            self.copied.synchronize()
            self.copied = None
        return self.data[: self.count]

    def append(self, x: Tensor) -> None:
        """Add rows [n, width] from any device; raises `TierError` if they cannot be stored."""
        self.check()
        need = self.count + x.shape[0]
        if self.data is None or need > self.data.shape[0]:
            spare = 0 if self.data is None else max(16, need // 16)
            self.data = self._room(need + spare, x)
        self.data[self.count : need].copy_(x, non_blocking=self.pinned)
        if self.pinned and x.is_cuda:
            self.copied = torch.cuda.current_stream(x.device).record_event()
        self.count = need

    def check(self) -> None:
        """Raise `TierError` if the rows cannot be read any more."""

    def state(self) -> Tensor | None:
        """Return the rows [n, width], a view; None if there never were any."""
        return None if self.data is None else self.view()

    def load_state(self, state: Any, like: Tensor | None) -> None:
        """Load a state that `state` returned."""
        if state is not None:
            self.append(state)

    def _room(self, count: int, like: Tensor) -> Tensor:
        grown = torch.empty(count, like.shape[1], dtype=like.dtype, pin_memory=self.pinned)
        if self.data is not None:
            grown[: self.count] = self.view()
        return grown


class FileRows(Rows):
    """Rows in a memory-mapped file, made in `folder` and removed with this object."""

    def __init__(self, folder: str | None) -> None:
        super().__init__()
        self.folder = folder
        try:
            number, name = tempfile.mkstemp(".kv", "kvloom-", folder)
        except OSError as error:
            where = folder or tempfile.gettempdir()
            raise TierError(
                f"no file for the cache can be made in {where!r} ({error.strerror}); give a folder "
                "that exists and can be written to"
            ) from error
        os.close(number)
        self.path = Path(name)
        self._unlink = weakref.finalize(self, self.path.unlink, missing_ok=True)

    def fresh(self) -> FileRows:
        """Return empty rows in a file of their own."""
        return FileRows(self.folder)

    def check(self) -> None:
        """Raise `TierError` if the file is missing or cut off: reading it would end the process."""
        size = self.path.stat().st_size if self.path.exists() else -1
        if size < self.nbytes:
            raise TierError(
                f"{self.path} has {'vanished' if size < 0 else 'been cut off'}, so its tokens are "
                "lost; start with a new cache"
            )

    def _room(self, count: int, like: Tensor) -> Tensor:
        size = count * like.shape[1]
        nbytes = max(1, size * like.element_size())
        try:
            with self.path.open("r+b") as file:  # a hole on a full disk would end the process
                os.posix_fallocate(file.fileno(), 0, nbytes)
        except OSError as error:
            raise TierError(
                f"{self.path} cannot grow to {nbytes:,} bytes ({error.strerror}); make room, or "
                "give another folder, and start with a new cache"
            ) from error
        rows = torch.from_file(str(self.path), shared=True, size=size, dtype=like.dtype)
        return rows.view(count, like.shape[1])
