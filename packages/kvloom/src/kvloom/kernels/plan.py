"""An operation as one layer calls it at every step: bound once, and again when its case changes.

An `OpPlan` belongs to one layer. It chooses the backend as `dispatch` does, and keeps what the
chosen kernel keeps between the layer's steps (`Backend.keeps`): constant arguments and workspaces.
Decides nothing about what a kernel keeps.
"""

from __future__ import annotations

from typing import Any, Generic, ParamSpec, TypeVar

from . import ops
from .dispatch import BoundOp, Op, ran

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
        self._key: Any = None

    def __reduce__(self) -> Any:
        return _plan, (self.op.name,)

    def __call__(self, *args: P.args, **options: P.kwargs) -> R:
        """Run the bound kernel, else the reference; the arguments are those of the operation."""
        bound = self.choose(*args, **options)
        ran[bound.counted] += 1  # `bound.run` without its call
        result: R = (bound.kernel or bound.reference)(*args, **options)
        return result

    def choose(self, *args: Any, **options: Any) -> BoundOp:
        """Return what runs a case, as `Op.choose` does: bound again if the case changed.

        If a kernel raises while it is bound, warns once and returns the reference and the reason.
        """
        like, case = self.op.case(*args, **options)
        key = self.op.key(like, case)
        bound = self.bound
        if bound is None or key != self._key or (bound.until and bound.expired()):
            bound = self.bound = self._bound(*args, **options)
            self._key = key
        return bound

    def _bound(self, *args: Any, **options: Any) -> BoundOp:
        bound = self.op.choose(*args, **options)
        if bound.kernel is None or not self.op.backends[bound.backend].keeps:
            return bound
        try:
            kernel = self.op.backends[bound.backend].bind(*args, **options)
        except Exception as error:
            return self.op.bound("ref", self.op.failed(bound.backend, error))
        return bound._replace(kernel=kernel)


def _plan(name: str) -> OpPlan[..., Any]:
    """Return a plan of the operation with a name."""
    return OpPlan(ops.OPS[name])
