"""The operations that have compiled kernels, listed in `ops`; each family has a torch reference."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..lazy import lazy_names

if TYPE_CHECKING:
    from ..encoding import rows_for
    from . import companion, ops
    from .attend.reference import AttentionState, merge
    from .attend.regions import KVView, Paged, PageTable, Region
    from .dispatch import Backend, compile_seconds, operations_run
    from .dispatch import use as use_backend
    from .limits import Coverage
    from .plan import OpPlan
    from .quantize.hadamard import rotate, unrotate
    from .quantize.reference import PackedTensors, RopeAngles, pack_codes, unpack_codes

__all__ = [
    "AttentionState",
    "Backend",
    "Coverage",
    "KVView",
    "OpPlan",
    "PackedTensors",
    "PageTable",
    "Paged",
    "Region",
    "RopeAngles",
    "companion",
    "compile_seconds",
    "merge",
    "operations_run",
    "ops",
    "pack_codes",
    "rotate",
    "rows_for",
    "unpack_codes",
    "unrotate",
    "use_backend",
]
__getattr__ = lazy_names(
    __name__,
    {
        ".encoding": ("rows_for",),
        "attend.reference": ("AttentionState", "merge"),
        "attend.regions": ("KVView", "PageTable", "Paged", "Region"),
        "dispatch": ("Backend", "compile_seconds", "operations_run", "use:use_backend"),
        "limits": ("Coverage",),
        "plan": ("OpPlan",),
        "quantize.hadamard": ("rotate", "unrotate"),
        "quantize.reference": ("PackedTensors", "RopeAngles", "pack_codes", "unpack_codes"),
    },
)
