"""Which stored tokens a step reads."""

from .clusters import Clusters
from .index import GROUPS, Finder, Index, Recall
from .offload import Far, Form
from .pages import Pages, TopK
from .side_stream import Aside
from .tiers import TIERS, Tier, Traffic

INDEXES: dict[str, type[Index]] = {kind.kind: kind for kind in (Clusters, Pages, TopK)}

__all__ = [
    "GROUPS",
    "INDEXES",
    "TIERS",
    "Aside",
    "Clusters",
    "Far",
    "Finder",
    "Form",
    "Index",
    "Pages",
    "Recall",
    "Tier",
    "TopK",
    "Traffic",
]
