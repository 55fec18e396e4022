"""Which stored tokens a step reads."""

from .base import GROUPS, Finder, Index, Recall
from .clusters import Clusters
from .pages import Pages, TopK
from .tiers import Far, Tier, Traffic

INDEXES: dict[str, type[Index]] = {kind.kind: kind for kind in (Clusters, Pages, TopK)}

__all__ = [
    "GROUPS",
    "INDEXES",
    "Clusters",
    "Far",
    "Finder",
    "Index",
    "Pages",
    "Recall",
    "Tier",
    "TopK",
    "Traffic",
]
