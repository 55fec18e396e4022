"""Which stored tokens a step reads."""

from .clusters import Clusters
from .index import GROUPS, Finder, Index, Recall
from .offload import OffloadFormat, OffloadStore
from .pages import Pages, TopK
from .side_stream import SideStream
from .tiers import TIERS, Tier, Traffic

INDEXES: dict[str, type[Index]] = {kind.kind: kind for kind in (Clusters, Pages, TopK)}

__all__ = [
    "GROUPS",
    "INDEXES",
    "TIERS",
    "Clusters",
    "Finder",
    "Index",
    "OffloadFormat",
    "OffloadStore",
    "Pages",
    "Recall",
    "SideStream",
    "Tier",
    "TopK",
    "Traffic",
]
