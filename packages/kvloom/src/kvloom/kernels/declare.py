"""How operations of one kind are declared: on scores, or on keys and centroids.

An operation has one signature; the functions of a backend need some of its arguments. Decides
nothing about a single operation: see `ops`. Imports neither Numba nor Triton.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from inspect import signature
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from .dispatch import Backend, Op
from .select.cpu import select as select_cpu

P = ParamSpec("P")
R = TypeVar("R")


def only(fn: Callable[..., R]) -> Callable[..., R]:
    """Wrap fn so that it can be called with all arguments of an operation.

    Drops positional arguments and options that fn has no parameter for.
    """
    parameters = signature(fn).parameters
    positional = sum(x.kind is not x.KEYWORD_ONLY for x in parameters.values())

    def call(*args: Any, **options: Any) -> R:
        taken = {name: x for name, x in options.items() if name in parameters}
        return fn(*args[:positional], **taken)

    return call


def _scores_case(scores: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Hashable]:
    return scores, scores.dtype


def _scores_problems(scores: Tensor) -> list[str]:
    return [] if scores.dtype == torch.float32 else [f"scores are {scores.dtype}, not fp32"]


def scores_op(
    reference: Callable[P, R],
    run: Callable[..., R],
    load: Callable[[], object],
    coverage: str = "scores in fp32",
) -> Op[P, R]:
    """Declare an operation on scores that has a CPU kernel only."""
    backend = Backend(run, only(_scores_problems), only(load), coverage)
    return Op(reference.__name__, reference, _scores_case, cpu=backend)


def rows_op(
    reference: Callable[P, R], run: Callable[..., R], load: Callable[[], object], rows: int = 0
) -> Op[P, R]:
    """Declare an operation on keys, bounds or centroids, its argument number `rows`; CPU only."""

    def case(*args: Any, **_: Any) -> tuple[Tensor, Hashable]:
        x = args[rows]
        return x, (x.shape[3], x.dtype)

    backend = Backend(
        run,
        lambda *args, **_: select_cpu.problems(args[rows]),
        only(load),
        "head_dim a multiple of 16 up to 512; keys and centroids in fp32, fp16, bf16",
    )
    return Op(reference.__name__, reference, case, cpu=backend)
