"""The machine's memory read bandwidth, which limits a decode step."""

from __future__ import annotations

import time

import torch


def read_bandwidth_gb_s(seconds: float = 1.0, nbytes: int = 1 << 29) -> float:
    """Return the highest rate, in GB/s, at which torch's threads sum a tensor of `nbytes` bytes."""
    x = torch.ones(nbytes // 4)
    best, end = 0.0, time.perf_counter() + seconds
    while best == 0.0 or time.perf_counter() < end:
        begin = time.perf_counter()
        x.sum()
        best = max(best, x.nbytes / (time.perf_counter() - begin) / 1e9)
    return best
