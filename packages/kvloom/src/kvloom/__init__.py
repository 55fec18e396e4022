"""Smaller KV caches for Hugging Face transformers models.

import kvloom
kvloom.attach(model, "kivi-4")      # every later model.generate() uses a 4-bit cache
cache = kvloom.Cache(model, "kivi-4")      # or a single cache
model.generate(**inputs, past_key_values=cache)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .errors import (
    CacheMisuse,
    CalibrationError,
    IncompatibleRecipe,
    InputError,
    KvloomError,
    NoKernel,
    NotFinite,
    RecipeError,
    SavedCacheError,
    TierError,
    UnsupportedModel,
)
from .lazy import lazy_names

__version__ = "0.1.0.dev0"

if TYPE_CHECKING:
    from .hf.adapters import register as register_adapter
    from .hf.attach import attach, detach
    from .hf.cache import Cache
    from .hf.report import Report
    from .keep import Budget, Keep, Outliers, register_score
    from .recall import Clusters, Pages, PartialKeys, Recall, TopK, register_index
    from .recipe import LayerOverride, Protect, Recipe, register_recipe
    from .store import Encoding, Packed, Store, register_format

_WHERE = {
    "attach": "hf.attach",
    "detach": "hf.attach",
    "register_adapter": "hf.adapters:register",
    "Report": "hf.report",
    "Cache": "hf.cache",
    "LayerOverride": "recipe",
    "Recipe": "recipe",
    "register_recipe": "recipe",
    "Protect": "recipe",
    "Clusters": "recall",
    "Pages": "recall",
    "PartialKeys": "recall",
    "Recall": "recall",
    "TopK": "recall",
    "register_index": "recall",
    "Budget": "keep",
    "Keep": "keep",
    "Outliers": "keep",
    "register_score": "keep",
    "Encoding": "store",
    "Packed": "store",
    "Store": "store",
    "register_format": "store",
}
__all__ = [
    "Budget",
    "Cache",
    "CacheMisuse",
    "CalibrationError",
    "Clusters",
    "Encoding",
    "IncompatibleRecipe",
    "InputError",
    "Keep",
    "KvloomError",
    "LayerOverride",
    "NoKernel",
    "NotFinite",
    "Outliers",
    "Packed",
    "Pages",
    "PartialKeys",
    "Protect",
    "Recall",
    "Recipe",
    "RecipeError",
    "Report",
    "SavedCacheError",
    "Store",
    "TierError",
    "TopK",
    "UnsupportedModel",
    "attach",
    "detach",
    "register_adapter",
    "register_format",
    "register_index",
    "register_recipe",
    "register_score",
]

__getattr__ = lazy_names(__name__, _WHERE)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
