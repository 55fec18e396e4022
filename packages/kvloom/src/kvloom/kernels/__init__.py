"""The operations that have compiled kernels, listed in `ops`; each family has a torch reference."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..lazy import lazy_names

if TYPE_CHECKING:
    from .dispatch import compile_seconds, operations_run
    from .dispatch import use as use_backend

__all__ = ["compile_seconds", "operations_run", "use_backend"]
__getattr__ = lazy_names(
    __name__,
    {
        "compile_seconds": "dispatch",
        "operations_run": "dispatch",
        "use_backend": "dispatch:use",
    },
)
