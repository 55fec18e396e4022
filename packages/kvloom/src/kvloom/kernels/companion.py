"""A second process that compiles the kernels of a cache's steps, while this one goes on.

The first kernel that is not on disk starts it, once: it rehearses steps of the cache that was made
last. A lock beside a kernel's file (`cpu_runtime`) lets one process compile it; others wait. Where
a kernel's results equal the reference's bit for bit (`Backend.bit_exact`), the reference runs until
the kernel is ready. So results do not depend on who compiles, or when. If the process cannot start
or fails, this process compiles every kernel. Decides nothing about what is rehearsed: see
`cache.rehearsal`.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from ..errors import KvloomError

_NICE = 5  # it gives way to the threads of this process, but not for long to a busy machine
_CODE = (
    f"import os, pickle, sys; os.nice({_NICE}); sys.path[:] = pickle.load(sys.stdin.buffer); "
    "from kvloom.cache.rehearsal import main; main()"
)

may_defer: ContextVar[bool] = ContextVar("kvloom_may_defer", default=False)
"""Whether the reference gives the same results as the kernel that is being loaded."""

_enabled = True
_expected: Callable[[], Callable[[], Any] | None] | None = None
_process: subprocess.Popen[bytes] | None = None
_rehearsing = False  # this process is the second one


class Compiling(KvloomError):
    """Another process compiles the kernel."""


def expect(steps: Callable[[], Callable[[], Any] | None]) -> None:
    """Let `start` rehearse the steps of a cache.

    steps: a weak reference to a function that returns what `cache.rehearsal.main` reads.
    """
    global _expected
    _expected = steps if _enabled else None


def disable() -> None:
    """Let this process compile all its kernels itself, as measurements and tests need it."""
    global _enabled, _expected
    _enabled, _expected = False, None


def start() -> None:
    """Start the second process if steps are expected; return at once."""
    global _expected, _process
    expected, _expected = _expected, None
    steps = None if expected is None or running() else expected()
    is_python = Path(sys.executable or "").name.startswith("python")
    if steps is None or not is_python or os.name != "posix":  # others have no such locks
        return
    try:
        with tempfile.TemporaryFile() as job:
            pickle.dump(sys.path, job)
            pickle.dump(steps(), job)
            job.seek(0)
            _process = subprocess.Popen(
                [sys.executable, "-I", "-c", _CODE],
                stdin=job,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
    except Exception:  # parts of a recipe may have no pickle, and a system no more processes
        return


def running() -> bool:
    """Return whether the second process runs."""
    return _process is not None and _process.poll() is None


def wait() -> None:
    """Return when the second process has ended, if there is one."""
    if _process is not None:
        _process.wait()


def defers() -> bool:
    """Return whether the reference runs in place of a kernel that is not on disk."""
    return may_defer.get() and running()


def rehearsing() -> bool:
    """Return whether this process is the second one, which waits for no kernel."""
    return _rehearsing


def begin_rehearsing() -> None:
    """Make this process the second one."""
    global _rehearsing
    _rehearsing = True
