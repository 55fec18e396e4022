"""The model that a cache or an attachment belongs to, without keeping it alive."""

from __future__ import annotations

import weakref

from transformers import PreTrainedModel

from ..errors import CacheMisuse


class Owner:
    """A weak reference to a model; a pickle loses it."""

    def __init__(self, model: PreTrainedModel | None = None) -> None:
        self._model = None if model is None else weakref.ref(model)

    def __deepcopy__(self, memo: dict) -> Owner:
        """Return itself: the copy is of the same model."""
        return self

    def __reduce__(self) -> tuple:
        """Leave the model out."""
        return Owner, ()

    def get(self) -> PreTrainedModel | None:
        """Return the model; None if it no longer exists, or was lost in a pickle."""
        return None if self._model is None else self._model()

    def is_model(self, model: PreTrainedModel) -> bool:
        """Return whether the cache was made for this very object."""
        return self.get() is model

    @property
    def model(self) -> PreTrainedModel:
        """The model; raises `CacheMisuse` if it no longer exists."""
        model = self.get()
        if model is None:
            raise CacheMisuse(
                "a saved cache identifies its model, and this one's model no longer exists, or was "
                "lost in a pickle; save a cache while its model exists"
            )
        return model
