"""An operation as one layer calls it at every step: bound once, and again when its case changes.

An `OpPlan` belongs to one layer. It chooses the backend as `dispatch` does, and keeps what the
chosen kernel keeps between the layer's steps (`Backend.plan`): constant arguments and workspaces. A
case is what the operation declares in `ops`, with the device and the backend setting. Decides
nothing about what a kernel keeps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, ParamSpec, TypeVar

from . import ops
from .dispatch import BoundOp, Op, environment, forced, ran

P = ParamSpec("P")
R = TypeVar("R")


class OpPlan(Generic[P, R]):
    """One operation of one layer.

    Use it in one thread at a time. A copy, or a plan from a pickle, is not bound yet.
    """

    def __init__(self, op: Op[P, R]) -> None:
        self.op = op
        self.bound: BoundOp | None = None
        """What the last step ran, and why no kernel did; None before the first."""
        self._case: Any = None
        self._run: Callable[..., R] | None = None
        self._counted = ("", "", "")

    def __reduce__(self) -> Any:
        return _plan, (self.op.name,)

    def __call__(self, *args: P.args, **options: P.kwargs) -> R:
        """Run the bound kernel, else the reference; the arguments are those of the operation."""
        run = self.bind(*args, **options)
        if run is None:
            self.count_reference()
        return (run or self.op.reference)(*args, **options)

    def bind(self, *args: Any, **options: Any) -> Callable[..., R] | None:
        """Return and count the kernel for a case; None if only the reference covers it.

        Pass as many arguments as the operation's `case` reads. Binds again if the case changed. If
        a kernel raises meanwhile, warns once, keeps the reason in `bound` and returns None.
        """
        like, rest = self.op.case(*args, **options)
        case = forced.get() or environment(), like.device, rest  # `setting()` without its call
        if case != self._case:
            self._bind(case, *args, **options)
        if self._run is not None:
            ran[self._counted] += 1
        return self._run

    def count_reference(self) -> None:
        """Count a use of the reference, after `bind` has returned None."""
        ran[self._counted] += 1

    def _bind(self, case: Any, *args: Any, **options: Any) -> None:
        bound = self.op.choose(*args, **options)
        run = bound.run
        if bound.plan is not None:
            try:
                run = bound.plan(*args, **options)
            except Exception as error:
                bound = self.op.by_reference(self.op.failed(bound.backend, error))
                run = None
        self._case, self._run, self._counted, self.bound = case, run, bound.counted, bound


def _plan(name: str) -> OpPlan[..., Any]:
    """Return a plan of the operation with a name."""
    return OpPlan(ops.OPS[name])
