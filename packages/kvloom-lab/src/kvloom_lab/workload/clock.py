"""The clock of every speed figure: wall time without the compilation of kernels; memory's speed."""

from __future__ import annotations

import time

import torch

from kvloom.kernels import compile_seconds


def seconds(device: torch.device | None = None) -> float:
    """Return a time in seconds that does not advance while kernels are compiled.

    device: wait until this device has finished all its queued work first; None does not wait.
    """
    if device is not None and device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter() - compile_seconds()


def read_bandwidth_gb_s(seconds: float = 1.0, nbytes: int = 1 << 29) -> float:
    """Return the highest rate, in GB/s, at which torch's threads sum a tensor of `nbytes` bytes."""
    x = torch.ones(nbytes // 4)
    best, end = 0.0, time.perf_counter() + seconds
    while best == 0.0 or time.perf_counter() < end:
        begin = time.perf_counter()
        x.sum()
        best = max(best, x.nbytes / (time.perf_counter() - begin) / 1e9)
    return best
