"""Attention mass per key by whichever kernel covers the case."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .. import dispatch
from . import reference as ref
from .cpu import mass as cpu
from .noise import Noise
from .triton import mass as gpu

COVERAGE = {
    "cpu": (
        "queries and keys both in fp32, fp16 or bf16, any head_dim; noise gumbel, gaussian, "
        "constant; tau, window, padding, softcap, bias"
    ),
    "gpu": (
        "queries and keys in one of fp32, fp16, bf16, head_dim up to 256; noise gumbel, constant; "
        "tau, window, padding, softcap, bias; not from a step's products; not the slot given up"
    ),
}
"""What a backend covers; `ref` runs the rest."""

_KERNELS: dict[str, Any] = {"cpu": cpu, "gpu": gpu}


def column_mass(
    q: Tensor, k: Tensor, scale: float, *, noise: Noise | None = None, **options: Any
) -> Tensor:
    """Add up as `ref.column_mass` does, by the kernel that covers the case."""
    backend, why = dispatch.candidate(k)
    why = why or _KERNELS[backend].problems(q, k, noise)
    dispatch.count("column_mass", backend, why)
    kernel = ref if why else _KERNELS[backend]
    return kernel.column_mass(q, k, scale, noise=noise, **options)


def step_mass(products: Tensor, n: int, hk: int, **options: Any) -> Tensor:
    """Add up as `ref.step_mass` does, by the kernel that covers the case."""
    return _on_cpu("step_mass", products).step_mass(products, n, hk, **options)


def lowest(scores: Tensor, index: Tensor, before: int, see: Tensor | None = None) -> Tensor:
    """Find the slot that `ref.lowest` finds, by the kernel that covers the case."""
    return _on_cpu("lowest", scores).lowest(scores, index, before, see)


def _on_cpu(operation: str, x: Tensor) -> Any:
    """Whose operation takes x, of those that Triton has no kernel of; counts the answer."""
    backend, why = dispatch.candidate(x)
    if backend == "gpu":
        why = why or ["it is not known to it"]
    dispatch.count(operation, backend, why)
    return ref if why else cpu
