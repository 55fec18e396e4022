"""Which backend runs an operation, and why another does not.

`ref`, plain torch, runs everything. `cpu`, compiled by Numba on first use, runs the cases it covers
on CPU tensors; `gpu`, Triton, those on CUDA tensors. `ops` lists the operations. An `Op` chooses a
backend once per case (shapes, dtypes, device, format, setting) and keeps the choice.

KVLOOM_KERNELS=ref in the environment, or `use("ref")` around some calls, selects the reference for
everything; `gpu` sends CPU tensors to the Triton kernels too, in Triton's interpreter. Imports
neither Numba nor Triton.
"""

from __future__ import annotations

import os
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any, Generic, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor

from ..errors import NoKernel
from . import triton_runtime

CHOICES = ("auto", "ref")
"""Settings for any machine; `gpu` requires Triton kernels and raises if they cannot run."""

ran: Counter[tuple[str, str, str]] = Counter()
"""How often this process ran (operation, backend, why no kernel)."""

_forced: ContextVar[str | None] = ContextVar("kvloom_kernels", default=None)
P = ParamSpec("P")
R = TypeVar("R")


class Backend(NamedTuple):
    """One implementation of an operation. Each function takes the operation's arguments.

    run: computes it. problems: returns why it does not cover a case; empty if it does. load:
    compiles or imports what `run` needs; whatever it raises makes the reference run. coverage: the
    cases that are covered, in words.
    """

    run: Callable[..., Any]
    problems: Callable[..., Sequence[str]]
    load: Callable[..., object]
    coverage: str = ""


class Bound(NamedTuple):
    """An operation bound to a case: what runs it, which backend that is, and why no kernel does."""

    run: Callable[..., Any] | None  # None: the reference
    backend: str
    why: str
    counted: tuple[str, str, str]  # its key in `ran`


class Op(Generic[P, R]):
    """An operation: a function with a reference and with backends for some cases.

    Its signature is the reference's. case: takes the arguments and returns the tensor whose device
    decides the backend, and a hashable value of everything that `problems` and `load` read.
    """

    def __init__(
        self,
        name: str,
        reference: Callable[P, R],
        case: Callable[..., tuple[Tensor, Hashable]],
        **backends: Backend,
    ) -> None:
        self.name, self.reference, self.case = name, reference, case
        self.backends: Mapping[str, Backend] = backends
        self.bindings: dict[Hashable, Bound] = {}

    def __call__(self, *args: P.args, **options: P.kwargs) -> R:
        """Run the kernel that covers the case, else the reference."""
        run = self.bind(*args, **options).run
        found: R = (run or self.reference)(*args, **options)
        return found

    def bind(self, *args: Any, **options: Any) -> Bound:
        """Return what runs a case, chosen on its first use, and count this use in `ran`.

        Pass as many arguments as `case` reads. A caller that has a better fallback than the
        reference calls `run` itself, or falls back if that is None.
        """
        like, rest = self.case(*args, **options)
        key = _forced.get() or environment(), like.device, rest
        bound = self.bindings.get(key)
        if bound is None:
            bound = self.bindings[key] = self._choose(like, *args, **options)
        ran[bound.counted] += 1
        return bound

    def _choose(self, like: Tensor, *args: Any, **options: Any) -> Bound:
        name, why = candidate(like)
        backend = self.backends.get(name)
        if not why and backend is None:
            why = [f"there is no {name} kernel for it"]
        if not why and backend is not None:
            why = list(backend.problems(*args, **options))
        if not why and backend is not None:
            try:
                backend.load(*args, **options)
                return Bound(backend.run, name, "", (self.name, name, ""))
            except Exception as error:
                why = [f"its {name} kernel failed to load: {type(error).__name__}: {error}"]
                warnings.warn(f"{self.name}: {why[0]}; the reference runs it", stacklevel=4)
        reason = "; ".join(why)
        return Bound(None, "ref", reason, (self.name, "ref", reason))


@contextmanager
def use(backend: str) -> Iterator[None]:
    """Within the block, let `auto` choose, select `ref` for everything, or require `gpu`."""
    token = _forced.set(_valid(backend))
    try:
        yield
    finally:
        _forced.reset(token)


def setting() -> str:
    """Return the backend setting: `auto`, `ref` or `gpu`."""
    return _forced.get() or environment()


@cache
def environment() -> str:
    """Return what KVLOOM_KERNELS was when the first kernel could have run."""
    return _valid(os.environ.get("KVLOOM_KERNELS", "auto"))


def candidate(x: Tensor) -> tuple[str, list[str]]:
    """Return the backend for a tensor's device; or `ref` and why.

    Raises `NoKernel` if Triton kernels are required and cannot run.
    """
    backend = setting()
    if backend == "ref":
        return "ref", ["the reference is asked for"]
    if backend == "gpu":
        why = triton_runtime.misplaced(x.device)
        if why:
            remedy = "set TRITON_INTERPRET=1 before the first step to run them on the CPU"
            raise NoKernel(f"kernels 'gpu' are asked for, but {'; '.join(why)}; {remedy}")
        return "gpu", []
    if x.is_cpu:
        return "cpu", []
    if x.device.type == "cuda":
        return "gpu", triton_runtime.misplaced(x.device)
    return "ref", [f"there are no kernels for {x.device.type}"]


def differentiated(q: Tensor) -> bool:
    """Return whether a gradient of q is wanted, which kernels do not compute."""
    return q.requires_grad and torch.is_grad_enabled()


@contextmanager
def loading() -> Iterator[None]:
    """Time the import of compiled kernels within the block; the first imports Numba."""
    begin = time.perf_counter()
    yield
    from . import cpu_runtime

    cpu_runtime.seconds.setdefault("loading Numba", time.perf_counter() - begin)


def compile_seconds() -> float:
    """Return the seconds this process has spent to compile kernels or to read them from disk."""
    runtime = sys.modules.get(f"{__package__}.cpu_runtime")
    return 0.0 if runtime is None else sum(runtime.seconds.values())


def _valid(backend: str) -> str:
    if backend not in (*CHOICES, "gpu"):
        raise NoKernel(f"kernels {backend!r} are none of {', '.join(CHOICES)}, gpu")
    return backend
