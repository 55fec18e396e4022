"""Tensors that are made once and kept, whatever torch's default device is at that moment."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
T = TypeVar("T")


def on_cpu(make: Callable[P, T]) -> Callable[P, T]:
    """Make a function's new tensors on the CPU, also after `torch.set_default_device`."""

    @wraps(make)
    def making(*args: P.args, **kwargs: P.kwargs) -> T:
        with torch.device("cpu"):
            return make(*args, **kwargs)

    return making
