"""Which backend runs an operation, and why another does not.

`ref`, plain torch, runs everything. `cpu`, compiled by Numba on first use, runs what it covers on
CPU tensors; `gpu`, Triton, on CUDA's. Each is chosen wherever it covers the case: the operations
of a family (`append`, `attend`, `quant`, `score`, `select`) ask here, in their `run.py`.
KVLOOM_KERNELS=ref in the environment, or `use("ref")` around some calls, leaves everything to the
reference; `gpu` sends CPU tensors to Triton's kernels too, in its interpreter. Imports neither
Numba nor Triton.
"""

from __future__ import annotations

import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache

from torch import Tensor

from ..errors import NoKernel
from . import triton_runtime as cuda

CHOICES = ("auto", "ref")
"""What can be asked for on any machine; `gpu` asks for Triton's kernels or an error."""

ran: Counter[tuple[str, str, str]] = Counter()
"""How often this process ran (operation, backend, why no other)."""

_forced: ContextVar[str | None] = ContextVar("kvloom_kernels", default=None)


@contextmanager
def use(backend: str) -> Iterator[None]:
    """Within the block, let `auto` choose, leave everything to `ref` or ask for `gpu`."""
    token = _forced.set(_known(backend))
    try:
        yield
    finally:
        _forced.reset(token)


def setting() -> str:
    """What is asked for: `auto`, `ref` or `gpu`."""
    return _forced.get() or environment()


@cache
def environment() -> str:
    """What KVLOOM_KERNELS asked for when the first kernel could have run."""
    return _known(os.environ.get("KVLOOM_KERNELS", "auto"))


def candidate(x: Tensor) -> tuple[str, list[str]]:
    """The backend made for a tensor like this; `ref`, and why, where none is or it is asked for.

    Raises `NoKernel` where Triton's kernels are asked for and cannot run.
    """
    asked = setting()
    if asked == "ref":
        return "ref", ["the reference is asked for"]
    if asked == "gpu":
        why = cuda.misplaced(x.device)
        if why:
            remedy = "set TRITON_INTERPRET=1 before the first step to run them on the CPU"
            raise NoKernel(f"kernels 'gpu' are asked for, but {'; '.join(why)}; {remedy}")
        return "gpu", []
    if x.is_cpu:
        return "cpu", []
    if x.device.type == "cuda":
        return "gpu", cuda.misplaced(x.device)
    return "ref", [f"there are no kernels for {x.device.type}"]


def count(operation: str, backend: str, why: list[str]) -> None:
    """Note in `ran` that an operation ran, by `ref` if there is a reason why not by `backend`."""
    ran[operation, "ref" if why else backend, "; ".join(why)] += 1


@contextmanager
def loading() -> Iterator[None]:
    """Time the import of compiled kernels within the block, of which the first loads Numba."""
    begin = time.perf_counter()
    yield
    from . import cpu_runtime as team

    team.seconds.setdefault("loading Numba", time.perf_counter() - begin)


def compile_seconds() -> float:
    """What compiling kernels, or reading them from the disk, has taken this process so far."""
    team = sys.modules.get(f"{__package__}.cpu_runtime")
    return 0.0 if team is None else sum(team.seconds.values())


def _known(backend: str) -> str:
    if backend not in (*CHOICES, "gpu"):
        raise NoKernel(f"kernels {backend!r} are none of {', '.join(CHOICES)}, gpu")
    return backend
