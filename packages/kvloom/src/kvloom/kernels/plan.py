"""An operation as one layer calls it at every step: bound once, and again when its case changes.

An `OpPlan` belongs to one layer. It chooses the backend as `dispatch` does, and keeps what the
chosen kernel keeps between the layer's steps (`Backend.plan`): constant arguments and workspaces. A
case is what the operation declares in `ops`, with the device, the backend setting and the number of
backends, which `Op.register` changes. Decides nothing about what a kernel keeps.
"""

from __future__ import annotations

from typing import Any, Generic, ParamSpec, TypeVar

from . import ops
from .dispatch import BoundOp, Op, environment, forced

P = ParamSpec("P")
R = TypeVar("R")


class OpPlan(Generic[P, R]):
    """One operation of one layer.

    Use it in one thread at a time. A copy, or a plan from a pickle, is not bound yet.
    """

    def __init__(self, op: Op[P, R]) -> None:
        self.op = op
        self.bound: BoundOp | None = None
        """What `choose` returned last; None before the first time."""
        self._case: Any = None

    def __reduce__(self) -> Any:
        return _plan, (self.op.name,)

    def __call__(self, *args: P.args, **options: P.kwargs) -> R:
        """Run the bound kernel, else the reference; the arguments are those of the operation."""
        result: R = self.choose(*args, **options).run(*args, **options)
        return result

    def choose(self, *args: Any, **options: Any) -> BoundOp:
        """Return what runs a case, as `Op.choose` does: bound again if the case changed.

        If a kernel raises while it is bound, warns once and returns the reference and the reason.
        """
        like, rest = self.op.case(*args, **options)
        setting = forced.get() or environment()  # `setting()` without its call
        case = setting, len(self.op.backends), like.device, rest
        if self.bound is None or case != self._case or self.bound.expired:
            self.bound, self._case = self._bound(*args, **options), case
        return self.bound

    def _bound(self, *args: Any, **options: Any) -> BoundOp:
        bound = self.op.choose(*args, **options)
        if bound.plan is None:
            return bound
        try:
            return bound._replace(kernel=bound.plan(*args, **options))
        except Exception as error:
            return self.op.by_reference(self.op.failed(bound.backend, error))


def _plan(name: str) -> OpPlan[..., Any]:
    """Return a plan of the operation with a name."""
    return OpPlan(ops.OPS[name])
