"""Measure recipes of kvloom, choose one, and show what it does.

import kvloom_lab
model = kvloom_lab.reference_model()
print(kvloom_lab.plan("meta-llama/Llama-3.1-8B", context=131072, memory=24 << 30))
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .models import reference_model, reference_tokenizer
    from .planner import auto, plan
    from .tuner import tune

_MODULES = {
    "auto": "planner",
    "plan": "planner",
    "reference_model": "models",
    "reference_tokenizer": "models",
    "tune": "tuner",
}
__all__ = ["auto", "plan", "reference_model", "reference_tokenizer", "tune"]


def __getattr__(name: str) -> Any:
    """Import public names on first use, so that `import kvloom_lab` stays light."""
    if name not in _MODULES:
        raise AttributeError(f"module 'kvloom_lab' has no attribute {name!r}")
    return getattr(import_module(f".{_MODULES[name]}", __name__), name)


def __dir__() -> list[str]:
    """Return the public names."""
    return list(__all__)
