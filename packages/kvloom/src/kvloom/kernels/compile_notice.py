"""A line on stderr while kernels are being compiled, once per process.

Decides when it is worth a line: after two seconds. Kernels that are read from disk need none.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Timer


class CompileNotice:
    """Prints that kernels are being compiled, once this has taken `after_s` seconds in all."""

    def __init__(self, after_s: float = 2.0) -> None:
        self.left_s = after_s
        self.printed = False

    @contextmanager
    def compiling(self, folder: str | None) -> Iterator[None]:
        """Compile a kernel within the block; a thread prints the notice while it runs.

        folder: where the compiled kernel is stored; None: nowhere.
        """
        timer = Timer(self.left_s, self._print, [folder])
        timer.daemon = True
        begin = time.perf_counter()
        if not self.printed:
            timer.start()
        try:
            yield
        finally:
            timer.cancel()
            self.left_s = max(0.0, self.left_s - (time.perf_counter() - begin))

    def _print(self, folder: str | None) -> None:
        self.printed = True
        later = f"later runs load them from {folder}"
        if folder is None:
            later = "set NUMBA_CACHE_DIR to a writable folder, so that later runs load them"
        print(f"kvloom: compiling kernels for this processor; {later}", file=sys.stderr, flush=True)
