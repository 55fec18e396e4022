"""How a cache may be used: by one thread at a time, with its own model, outside inference mode.

The cache decides what a step is and how to undo it.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, TypeVar

import torch
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from ..errors import CacheMisuse

_F = TypeVar("_F", bound=Callable[..., Any])


def outside_inference_mode(method: _F) -> _F:
    """Run a method outside inference mode, so that its tensors can be changed later."""

    @wraps(method)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_inference_mode_enabled():
            return method(*args, **kwargs)
        with torch.inference_mode(False):
            return method(*args, **kwargs)

    return wrapper  # type: ignore[return-value]


def used_by_threads(what: str) -> CacheMisuse:
    """Return the error of a cache that two threads use; what: what happened."""
    return CacheMisuse(f"{what}; give each thread its own cache, or a copy.deepcopy of this one")


def note_inputs(
    module: torch.nn.Module, note: Callable[[tuple, dict[str, Any]], None]
) -> RemovableHandle:
    """Call `note` with the arguments of each call of a module in this thread, before the call.

    Other threads run the module with caches of their own. torch leaves out `kwargs` if one of them
    removes the hook meanwhile. Returns what removes the hook.
    """
    thread = threading.get_ident()

    def hook(module: Any, args: tuple, kwargs: dict[str, Any] | None = None) -> None:
        if threading.get_ident() == thread:
            note(args, kwargs or {})

    return module.register_forward_pre_hook(hook, with_kwargs=True)


class Guard:
    """One step or change at a time, and none after a failure that could not be undone.

    unusable: why the cache cannot be used any more; "" if it can.
    """

    def __init__(self, unusable: str = "") -> None:
        self._lock = threading.Lock()
        self._thread: int | None = None
        self.unusable = unusable

    def __reduce__(self) -> tuple:
        """Copy and pickle without the lock: the copy runs no step."""
        return Guard, (self.unusable,)

    @property
    def running(self) -> bool:
        """Whether this thread is inside a step or a change."""
        return self._thread == threading.get_ident()

    def check(self) -> None:
        """Raise `CacheMisuse` if the cache cannot be used any more."""
        if self.unusable:
            raise CacheMisuse(
                f"this cache cannot be used any more: {self.unusable}; call cache.reset(), or make "
                "a new cache"
            )

    @contextmanager
    def step(self, mends: bool = False) -> Iterator[None]:
        """Run a step. Raises `CacheMisuse` while another thread runs one.

        mends: whether the step makes an unusable cache usable again.
        """
        if not self._lock.acquire(blocking=False):
            raise used_by_threads(
                "this cache is in the middle of a step, perhaps in another thread, and two at once "
                "would corrupt it"
            )
        try:
            self._thread = threading.get_ident()
            if not mends:
                self.check()
            yield
        finally:
            self._thread = None
            self._lock.release()

    @contextmanager
    def change(self, what: str, mends: bool = False) -> Iterator[None]:
        """Run a change of all layers; if it fails midway, the cache becomes unusable.

        mends: as for `step`.
        """
        with self.step(mends):
            self.unusable = f"{what} failed midway"
            yield
            self.unusable = ""


class CallRef:
    """A call of `generate()`, while it runs; a copy or a pickle belongs to no call.

    After a call that fails, it seems to run as long as something holds the traceback.

    Args:
        local: An object that the call alone holds.
    """

    def __init__(self, local: object = None) -> None:
        self._local = None if local is None else weakref.ref(local)

    def __reduce__(self) -> tuple:
        """Leave the call out."""
        return CallRef, ()

    @property
    def running(self) -> bool:
        """Whether the call has not ended."""
        return self._local is not None and self._local() is not None


class ModelRef:
    """A weak reference to a model; a pickle loses it."""

    def __init__(self, model: PreTrainedModel | None = None) -> None:
        self._model = None if model is None else weakref.ref(model)

    def __deepcopy__(self, memo: dict) -> ModelRef:
        """Return itself: the copy is of the same model."""
        return self

    def __reduce__(self) -> tuple:
        """Leave the model out."""
        return ModelRef, ()

    def get(self) -> PreTrainedModel | None:
        """Return the model; None if it no longer exists, or was lost in a pickle."""
        return None if self._model is None else self._model()

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
