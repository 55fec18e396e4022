"""Selects the backend of an operation, and records why others were skipped.

`ref`, plain torch, runs everything. `cpu`, compiled by Numba on first use, runs the cases it covers
on CPU tensors; `gpu`, Triton, those on CUDA tensors. `ops` lists the operations. An `Op` chooses a
backend once per case (shapes, dtypes, device, format, setting) and keeps the choice.

KVLOOM_KERNELS=ref in the environment, or `use("ref")` around some calls, selects the reference for
everything; `gpu` sends CPU tensors to the Triton kernels too, in Triton's interpreter. The name of
a backend that another distribution registered (`Op.register`) selects that one alone: the reference
runs the operations and cases that it lacks. `auto` tries it before kvloom's own. `operations_run`
counts what ran, with the reason. Imports neither Numba nor Triton.
"""

from __future__ import annotations

import os
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from typing import Any, Generic, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor

from ..errors import NoKernel
from ..registry import load_plugins
from . import companion, triton_runtime
from .limits import Coverage

CHOICES = ("auto", "ref")
"""Settings for any machine; `gpu` selects the Triton kernels and raises if they cannot run."""

_RETRY_S = 0.5  # after which the reference asks again whether its kernel is compiled

ran: Counter[tuple[str, str, str]] = Counter()
"""How often this process ran (operation, backend, why no kernel)."""

_registered: dict[str, str] = {}
"""The device type of each backend that another distribution registered, by name."""

forced: ContextVar[str | None] = ContextVar("kvloom_kernels", default=None)
P = ParamSpec("P")
R = TypeVar("R")


class Backend(NamedTuple):
    """One implementation of an operation.

    Attributes:
        bind: Takes the operation's arguments, compiles or imports what their case needs, and
            returns the function that runs the case. If it raises, the reference runs the case.
        coverage: The cases that it covers; its checks take the operation's arguments.
        keeps: Whether a function that `bind` returned keeps arguments and memory between calls.
            Then each layer binds its own (`OpPlan`), and other callers bind each call.
        bit_exact: Whether results equal the reference's bit for bit. Then the reference may run
            until the kernel is compiled.
    """

    bind: Callable[..., Callable[..., Any]]
    coverage: Coverage
    keeps: bool = False
    bit_exact: bool = False

    def run(self, *args: Any, **options: Any) -> Any:
        """Bind one call, and run it."""
        return self.bind(*args, **options)(*args, **options)


@dataclass(frozen=True)
class Binding:
    """`Backend.bind` of a function that keeps nothing; load: compiles or imports what it calls."""

    run: Callable[..., Any]
    load: Callable[[], object]

    def __call__(self, *_: Any, **__: Any) -> Callable[..., Any]:
        """Load, and return the function."""
        self.load()
        return self.run


class BoundOp(NamedTuple):
    """An operation bound to a case: what runs it, which backend that is, and why others do not."""

    kernel: Callable[..., Any] | None  # None: the reference runs it
    backend: str
    why: str  # the reasons of all backends that were tried before
    counted: tuple[str, str, str]  # its key in `ran`
    reference: Callable[..., Any]
    until: float | None = None  # by `time.monotonic`, if a kernel is being compiled

    def expired(self) -> bool:
        """Whether to choose again, if `until` is set."""
        assert self.until is not None
        return time.monotonic() > self.until or not companion.running()

    def run(self, *args: Any, **options: Any) -> Any:
        """Run the kernel, else the reference, and count that."""
        ran[self.counted] += 1
        return (self.kernel or self.reference)(*args, **options)


class Op(Generic[P, R]):
    """An operation: a function with a reference and with backends for some cases.

    Its signature is the reference's. case: takes the arguments and returns the tensor whose device
    decides the backend, and a hashable value of everything that `Backend.coverage` and `bind` read.
    """

    def __init__(
        self,
        name: str,
        reference: Callable[P, R],
        case: Callable[..., tuple[Tensor, Hashable]],
        **backends: Backend,
    ) -> None:
        self.name, self.reference, self.case = name, reference, case
        self.backends: dict[str, Backend] = backends
        self.bindings: dict[Hashable, BoundOp] = {}

    def __call__(self, *args: P.args, **options: P.kwargs) -> R:
        """Run the kernel that covers the case, else the reference."""
        bound = self.choose(*args, **options)
        ran[bound.counted] += 1  # `bound.run` without its call
        result: R = (bound.kernel or bound.reference)(*args, **options)
        return result

    def choose(self, *args: Any, **options: Any) -> BoundOp:
        """Return what runs a case, chosen on its first use; pass what `case` reads.

        Counts nothing: `BoundOp.run` does.
        """
        like, case = self.case(*args, **options)
        key = self.key(like, case)
        bound = self.bindings.get(key)
        if bound is None or (bound.until and bound.expired()):
            bound = self.bindings[key] = self._choose(like, *args, **options)
        return bound

    def key(self, like: Tensor, case: Hashable) -> tuple[str, int, torch.device, Hashable]:
        """Return what decides the choice for a case: with it the setting, backends and device."""
        return forced.get() or environment(), len(self.backends), like.device, case

    def register(self, name: str, backend: Backend, device: str = "cpu") -> None:
        """Add a backend from another distribution, for tensors on a type of device.

        `auto` tries it before kvloom's own on that device; KVLOOM_KERNELS=name selects it. It must
        refuse (`Backend.coverage`) every case that it does not know. Raises `NoKernel` if the name
        is taken.
        """
        if name in (*CHOICES, "cpu", "gpu") or name in self.backends:
            raise NoKernel(f"kernel backend {name!r} exists for {self.name!r}; use another name")
        if _registered.setdefault(name, device) != device:
            raise NoKernel(
                f"kernel backend {name!r} runs on {_registered[name]}, not {device}; use another "
                "name for another device"
            )
        self.backends[name] = backend

    def failed(self, name: str, error: Exception, instead: str = "the reference") -> str:
        """Warn that a backend raised while it was bound, and return the reason."""
        why = f"its {name} kernel failed to load: {type(error).__name__}: {error}"
        warnings.warn(f"{self.name}: {why}; {instead} runs it", stacklevel=5)
        return why

    def bound(
        self,
        backend: str,
        why: str,
        kernel: Callable[..., Any] | None = None,
        until: float | None = None,
    ) -> BoundOp:
        """Return the operation bound to a kernel, or to the reference; arguments: of `BoundOp`."""
        return BoundOp(kernel, backend, why, (self.name, backend, why), self.reference, until)

    def _choose(self, like: Tensor, *args: Any, **options: Any) -> BoundOp:
        load_plugins()  # which may register backends
        selected, why = candidate(like)
        others = [
            name
            for name, device in _registered.items()
            if name in self.backends and device == like.device.type and setting() == "auto"
        ]
        refused: list[str] = []
        for name in others:
            kernel, problems = self._kernel(name, args, options, "another backend")
            if kernel is not None:
                return self.bound(name, "; ".join(refused), kernel)
            refused += [f"{name}: {problem}" for problem in problems]
        kernel = until = None
        try:
            if not why:
                kernel, why = self._kernel(selected, args, options)
        except companion.Compiling as error:
            why, until = [str(error)], time.monotonic() + _RETRY_S
        backend = "ref" if kernel is None else selected
        return self.bound(backend, "; ".join([*refused, *why]), kernel, until)

    def _kernel(
        self, name: str, args: Any, options: Any, instead: str = "the reference"
    ) -> tuple[Callable[..., Any] | None, list[str]]:
        """Return what a backend runs a case with, or None and why it does not."""
        backend = self.backends.get(name)
        if backend is None:
            return None, [f"there is no {name} kernel for it"]
        deferring = companion.may_defer.set(backend.bit_exact)
        try:
            problems = backend.coverage.problems(*args, **options)
            if problems:
                return None, problems
            kernel = backend.bind(*args, **options)
            return backend.run if backend.keeps else kernel, []
        except companion.Compiling:
            raise
        except Exception as error:
            return None, [self.failed(name, error, instead)]
        finally:
            companion.may_defer.reset(deferring)


@contextmanager
def use(backend: str) -> Iterator[None]:
    """Select a backend within a block of code.

    Args:
        backend: "auto" chooses, "ref" is the reference for everything, others are backends' names.
    """
    token = forced.set(_valid(backend))
    try:
        yield
    finally:
        forced.reset(token)


def setting() -> str:
    """Return the backend setting: `auto`, `ref`, `gpu` or the name of a registered backend.

    `Op.key` runs at every step, with this expression in place.
    """
    return forced.get() or environment()


@cache
def environment() -> str:
    """Return what KVLOOM_KERNELS was when the first kernel could have run."""
    return _valid(os.environ.get("KVLOOM_KERNELS", "auto"))


def candidate(x: Tensor) -> tuple[str, list[str]]:
    """Return the backend for a tensor's device; or `ref` and why.

    Raises `NoKernel` if Triton kernels are selected and cannot run.
    """
    backend = setting()
    if backend == "ref":
        return "ref", ["the setting selects the reference"]
    if backend == "gpu":
        why = triton_runtime.misplaced(x.device)
        if why:
            remedy = "set TRITON_INTERPRET=1 before the first step to run them on the CPU"
            raise NoKernel(f"kernel backend 'gpu' cannot run: {'; '.join(why)}; {remedy}")
        return "gpu", []
    if backend in _registered:
        device = _registered[backend]
        fits = x.device.type == device
        return backend, [] if fits else [f"{backend} runs on {device}, not {x.device.type}"]
    if x.is_cpu:
        return "cpu", []
    if x.device.type == "cuda":
        return "gpu", triton_runtime.misplaced(x.device)
    return "ref", [f"there are no kernels for {x.device.type}"]


GRADIENT = "q requires a gradient; call under torch.no_grad()"


def differentiated(q: Tensor) -> bool:
    """Return whether q requires a gradient, which kernels do not compute."""
    return q.requires_grad and torch.is_grad_enabled()


def gradient_problem(*args: Any, **_: Any) -> str | None:
    """Return why kernels do not compute with these queries, keys and values."""
    tensors = (x for x in args if isinstance(x, Tensor))
    return GRADIENT if any(map(differentiated, tensors)) else None


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


def operations_run() -> Counter[tuple[str, str, str]]:
    """Return how often this process ran (operation, backend, why no kernel), up to now.

    The backend of the reference in torch is "ref", whichever setting is selected. The reason says
    what a selected backend lacks. Subtract two results to see one step.
    """
    return ran.copy()


def _valid(backend: str) -> str:
    if backend not in (*CHOICES, "gpu"):
        load_plugins()
    names = (*CHOICES, "gpu", *_registered)
    if backend not in names:
        raise NoKernel(f"unknown kernel backend {backend!r}; choose one of {', '.join(names)}")
    return backend
