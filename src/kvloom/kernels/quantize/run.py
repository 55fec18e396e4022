"""Packing and unpacking by whichever kernel covers the case."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .. import dispatch
from .cpu import pack as cpu
from .spec import Scheme
from .triton import pack as gpu

_ALL = (
    "tokens in fp32, fp16, bf16, however they lie; 1, 1.5, 2, 3, 4, 8 bit per channel or per "
    "token, any group of one head or of all, clipped, smoothed or static, metadata fp32, fp16, "
    "bf16, fp8; padding"
)
COVERAGE = {"cpu": f"{_ALL}; rotated groups", "gpu": _ALL}
"""What a backend covers; `ref` runs the rest."""

_KERNELS: dict[str, Any] = {"cpu": cpu, "gpu": gpu}


def packer(scheme: Scheme, like: Tensor) -> Callable[..., None] | None:
    """The kernel that packs tokens like these, called as `cpu.pack` is; None if none does."""
    backend, why = dispatch.candidate(like)
    why = why or _KERNELS[backend].problems(scheme, like.device, like.dtype)
    dispatch.count("pack", backend, why)
    return None if why else _KERNELS[backend].pack


def unpacker(scheme: Scheme, like: Tensor, dtype: torch.dtype) -> Callable[..., Tensor] | None:
    """The kernel that unpacks codes like these to a dtype, called as `cpu.unpack` is, or None."""
    backend, why = dispatch.candidate(like)
    why = why or _KERNELS[backend].problems(scheme, like.device, dtype)
    dispatch.count("unpack", backend, why)
    return None if why else _KERNELS[backend].unpack
