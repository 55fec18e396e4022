"""Recall: indexes that find the stored tokens a step reads, and tiers for offloaded ones."""

from typing import TypeVar

from ..kernels.select.reference import dots, reduce_query_heads, select_pages
from ..registry import Registry
from .clusters import Clusters
from .index import HEAD_CHOICES, Finder, Index, Recall, SideStream, grown
from .offload import OffloadStore
from .pages import Pages
from .partial_keys import PartialKeys, TopK
from .tiers import TIERS, Tier, Traffic

INDEXES: Registry[type[Index]] = Registry(
    "index",
    {kind.kind: kind for kind in (Clusters, Pages, TopK, PartialKeys)},
    Index,
    ("finder", "nbytes"),
)
AnIndex = TypeVar("AnIndex", bound=Index)


def register_index(cls: type[AnIndex]) -> type[AnIndex]:
    """Make an index available to recipes by its `kind`; usable as a decorator.

    Args:
        cls: A frozen dataclass derived from `Index`.

    Raises:
        RecipeError: It is another class, or its name is taken.
    """
    INDEXES.register(cls)
    return cls


__all__ = [
    "HEAD_CHOICES",
    "INDEXES",
    "TIERS",
    "Clusters",
    "Finder",
    "Index",
    "OffloadStore",
    "Pages",
    "PartialKeys",
    "Recall",
    "SideStream",
    "Tier",
    "TopK",
    "Traffic",
    "dots",
    "grown",
    "reduce_query_heads",
    "register_index",
    "select_pages",
]
