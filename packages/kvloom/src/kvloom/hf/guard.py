"""One step or change of a cache at a time, and none after a failure that could not be undone.

Decides which thread may use a cache now. The cache decides what a step is and how to undo it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from ..errors import CacheMisuse


class Guard:
    """Whether a step is running, in which thread, and why a cache cannot be used any more."""

    def __init__(self, unusable: str = "") -> None:
        self._lock = threading.Lock()
        self._thread: int | None = None
        self.unusable = unusable

    def __reduce__(self) -> tuple:
        """Copy and pickle without the lock: the copy runs no step."""
        return Guard, (self.unusable,)

    @property
    def running(self) -> bool:
        """Whether this thread is inside a step or a change."""
        return self._thread == threading.get_ident()

    def check(self) -> None:
        """Raise `CacheMisuse` if the cache cannot be used any more."""
        if self.unusable:
            raise CacheMisuse(
                f"this cache cannot be used any more: {self.unusable}; call cache.reset(), or make "
                "a new cache"
            )

    @contextmanager
    def step(self) -> Iterator[None]:
        """Run a step. Raises `CacheMisuse` while another thread runs one."""
        self.check()
        if not self._lock.acquire(blocking=False):
            raise CacheMisuse(
                "this cache is in the middle of a step, perhaps in another thread, and two at once "
                "would corrupt it; give each thread its own cache, or a copy.deepcopy of this one"
            )
        try:
            self._thread = threading.get_ident()
            yield
        finally:
            self._thread = None
            self._lock.release()

    @contextmanager
    def change(self, what: str) -> Iterator[None]:
        """Run a change of all layers; if it fails midway, the cache becomes unusable."""
        with self.step():
            self.unusable = f"{what} failed midway"
            yield
            self.unusable = ""
