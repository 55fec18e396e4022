"""The clock of every speed figure: wall time without the compilation of kernels."""

from __future__ import annotations

import time

import torch

from kvloom.kernels import compile_seconds


def seconds(device: torch.device | None = None) -> float:
    """Return a time in seconds that stands still while kernels are compiled.

    device: wait until this device has finished all its queued work first; None does not wait.
    """
    if device is not None and device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter() - compile_seconds()
