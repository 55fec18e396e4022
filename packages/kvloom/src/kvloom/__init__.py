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
    StoreError,
    TierError,
    UnsupportedModel,
)
from .lazy import lazy_names

__version__ = "0.1.0.dev0"

if TYPE_CHECKING:
    from .hf.attach import Report, attach, detach
    from .hf.batching.continuous import continuous
    from .hf.cache import Cache
    from .hf.cuda_graphs import cuda_graphs
    from .hf.models import register_adapter
    from .hf.prompts.store import PromptStore, StoreReport
    from .keep import Budget, Keep, Outliers, register_score
    from .recall import Clusters, Pages, PartialKeys, Recall, TopK, register_index
    from .recipe import LayerOverride, Protect, Recipe, Role, register_recipe
    from .store import Encoding, Packed, Store, register_format

_NAMES = {
    "hf.attach": ("Report", "attach", "detach"),
    "hf.cache": ("Cache",),
    "hf.cuda_graphs": ("cuda_graphs",),
    "hf.batching.continuous": ("continuous",),
    "hf.models": ("register_adapter",),
    "hf.prompts.store": ("PromptStore", "StoreReport"),
    "keep": ("Budget", "Keep", "Outliers", "register_score"),
    "recall": ("Clusters", "Pages", "PartialKeys", "Recall", "TopK", "register_index"),
    "recipe": ("LayerOverride", "Protect", "Recipe", "Role", "register_recipe"),
    "store": ("Encoding", "Packed", "Store", "register_format"),
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
    "PromptStore",
    "Protect",
    "Recall",
    "Recipe",
    "RecipeError",
    "Report",
    "Role",
    "SavedCacheError",
    "Store",
    "StoreError",
    "StoreReport",
    "TierError",
    "TopK",
    "UnsupportedModel",
    "attach",
    "continuous",
    "cuda_graphs",
    "detach",
    "register_adapter",
    "register_format",
    "register_index",
    "register_recipe",
    "register_score",
]

__getattr__ = lazy_names(__name__, _NAMES)


def __dir__() -> list[str]:
    """Return the public names."""
    return [*__all__, "__version__"]
