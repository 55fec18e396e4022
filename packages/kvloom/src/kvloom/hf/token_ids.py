"""Token ids of a call, for rules that choose outliers by them.

Decides which layers get them: those whose rule reads ids and has not run yet.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ..errors import CacheMisuse
from .routed import RoutedCache


@contextmanager
def of_call(cache: RoutedCache, args: tuple, kwargs: dict[str, Any]) -> Iterator[None]:
    """Give the layers that need them the token ids of a call, and take them away after it.

    Raises `CacheMisuse` for a call by embeddings, before anything is changed.
    """
    layers = [layer for layer in cache.routed if layer.cache.state.needs_ids]
    ids = kwargs.get("input_ids", args[0] if args else None)
    if layers and ids is None:
        raise CacheMisuse(
            "the rule for outliers reads token ids, not inputs_embeds; give input_ids, or use "
            "another rule"
        )
    for layer in layers:
        layer.ids = ids
    try:
        yield
    finally:
        for layer in layers:
            layer.ids = None
