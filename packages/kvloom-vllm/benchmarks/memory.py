"""The memory of a server's processes over time, and whether it still grows."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

Sample = tuple[float, float]
"""Seconds since the start, and MiB."""


def resident(group: int) -> float:
    """Return the MiB in memory of all processes of a process group, shared pages counted once."""
    total = 0
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = status.read_text().rsplit(")", 1)[1].split()
            if int(fields[2]) == group:
                total += _proportional(status.parent)
        except OSError:  # it has ended
            continue
    return total / 1024


def _proportional(process: Path) -> int:
    for line in (process / "smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1])
    return 0


async def watch(group: int, seconds: float, every: float) -> list[Sample]:
    """Return samples of a process group for so many seconds."""
    begin, found = time.monotonic(), []
    while (now := time.monotonic() - begin) < seconds:
        found.append((round(now, 1), round(resident(group), 1)))
        await asyncio.sleep(every)
    return found


def growth(samples: Sequence[Sample]) -> float:
    """Return the slope of the least-squares line through samples, in MiB per minute."""
    return 60 * statistics.linear_regression(*zip(*samples, strict=True)).slope
