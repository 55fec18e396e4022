"""Pages of packed tokens in an engine's memory: their bytes, attention to them, and one step."""

from .attention import PagedAttention
from .page import LayerPlan, PackedPages, PageLayout
from .rule import check_pages_hold, packed_by_page
from .step import PagedRow, PagedStep

__all__ = [
    "LayerPlan",
    "PackedPages",
    "PageLayout",
    "PagedAttention",
    "PagedRow",
    "PagedStep",
    "check_pages_hold",
    "packed_by_page",
]
