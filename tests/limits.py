"""Limit what this process may use, within a block."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def limited(name: str, more: int) -> Iterator[None]:
    """Let this process have at most `more` of a resource than it uses now: "AS" bytes, or "NOFILE".

    "FSIZE": bytes that a file may have.
    """
    import resource  # which Windows has not

    kind = getattr(resource, f"RLIMIT_{name}")
    soft, hard = resource.getrlimit(kind)
    used = 0
    if name == "AS":
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    if name == "NOFILE":
        used = 1 + max(int(path.name) for path in Path("/proc/self/fd").iterdir())
    resource.setrlimit(kind, (used + more, hard))
    try:
        yield
    finally:
        resource.setrlimit(kind, (soft, hard))
