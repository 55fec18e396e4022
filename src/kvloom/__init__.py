"""kvloom: smaller KV caches for any Hugging Face model, with memory really freed.

import kvloom
kvloom.attach(model, "kivi-4")      # every later model.generate() uses a 4-bit cache
cache = kvloom.Cache(model, "kivi-4")      # or one cache of your own
model.generate(**inputs, past_key_values=cache)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0.dev0"

if TYPE_CHECKING:
    from .hf.attach import attach, detach
    from .hf.cache import Cache
    from .hf.report import Report
    from .keep import Budget, Keep, Spare
    from .recall import Clusters, Pages, Recall, TopK
    from .recipe.spec import Protect, Recipe
    from .reference import reference_model, reference_tokenizer
    from .store import Packed, Store, Transform

_WHERE = {
    "attach": "hf.attach",
    "detach": "hf.attach",
    "Report": "hf.report",
    "Cache": "hf.cache",
    "Recipe": "recipe",
    "Protect": "recipe",
    "Clusters": "recall",
    "Pages": "recall",
    "Recall": "recall",
    "TopK": "recall",
    "Budget": "keep",
    "Keep": "keep",
    "Spare": "keep",
    "Packed": "store",
    "Store": "store",
    "Transform": "store",
    "reference_model": "reference",
    "reference_tokenizer": "reference",
}
__all__ = [
    "Budget",
    "Cache",
    "Clusters",
    "Keep",
    "Packed",
    "Pages",
    "Protect",
    "Recall",
    "Recipe",
    "Report",
    "Spare",
    "Store",
    "TopK",
    "Transform",
    "attach",
    "detach",
    "reference_model",
    "reference_tokenizer",
]


def __getattr__(name: str) -> Any:
    """Import public names when they are first used: `import kvloom` itself stays light."""
    if name not in _WHERE:
        raise AttributeError(f"module 'kvloom' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f".{_WHERE[name]}", __name__), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
