"""What the machine can do at most: the rate at which it reads memory."""

from __future__ import annotations

import time

import torch


def read_gb_s(seconds: float = 1.0, nbytes: int = 1 << 29) -> float:
    """The best rate, in GB/s, at which a sum over `nbytes` reads memory with torch's threads."""
    x = torch.ones(nbytes // 4)
    best, end = 0.0, time.perf_counter() + seconds
    while best == 0.0 or time.perf_counter() < end:
        begin = time.perf_counter()
        x.sum()
        best = max(best, x.nbytes / (time.perf_counter() - begin) / 1e9)
    return best
