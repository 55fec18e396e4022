"""Undo a step: the attributes of a layer's parts when the step began.

Decides how a layer returns to that state after a failure. An `Undo` holds references, not copies:
during a step a part replaces its tensors, or writes where there is no live token; it never
overwrites live tokens. A `Buffer` that grows replaces the tensor in its `Allocation`, which the
`Undo` refers to as well, so its old storage is freed at once.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


class Mutable:
    """The objects that a step of a layer changes, while the layer has these `tokens`."""

    def __init__(self, parts: Iterable[Any], tokens: Any) -> None:
        self.parts = list(parts)
        self.tokens = tokens
        self.attributes = [vars(part) for part in self.parts]  # by reference

    def __reduce__(self) -> Any:
        """Copy as None: the objects of a copied layer are others."""
        return type(None), ()


class Undo:
    """The attributes of some objects at one moment."""

    def __init__(self, mutable: Mutable) -> None:
        self.attributes = mutable.attributes
        self.before = list(map(dict.copy, mutable.attributes))

    def __deepcopy__(self, memo: dict) -> None:
        """Return None: a copy of a cache has no step to undo."""

    def restore(self) -> None:
        """Give every object the attributes it had."""
        for now, before in zip(self.attributes, self.before, strict=False):  # none once forgotten
            now.clear()
            now.update(before)

    def forget(self) -> None:
        """Release the tensors that only this object references."""
        self.before = []
