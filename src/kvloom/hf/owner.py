"""The model that a cache was made for, without keeping it alive."""

from __future__ import annotations

import weakref

from transformers import PreTrainedModel

from ..errors import CacheMisuse


class Owner:
    """A weak reference to the model of a cache; a pickle loses it."""

    def __init__(self, model: PreTrainedModel | None = None) -> None:
        self._model = None if model is None else weakref.ref(model)

    def __deepcopy__(self, memo: dict) -> Owner:
        """Return itself: the copy is of the same model."""
        return self

    def __reduce__(self) -> tuple:
        """Leave the model out."""
        return Owner, ()

    def is_model(self, model: PreTrainedModel) -> bool:
        """Return whether the cache was made for this very object."""
        return self._model is not None and self._model() is model

    @property
    def model(self) -> PreTrainedModel:
        """The model; raises `CacheMisuse` if it no longer exists."""
        model = None if self._model is None else self._model()
        if model is None:
            raise CacheMisuse(
                "a saved cache identifies its model, and this one's model no longer exists, or was "
                "lost in a pickle; save a cache while its model exists"
            )
        return model
