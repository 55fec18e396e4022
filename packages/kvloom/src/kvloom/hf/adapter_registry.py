"""Adapters by model type: for models whose attention bypasses transformers' attention interface.

Decides which model types have an adapter; `adapters` installs them. A built-in adapter is in
`models/`, in a file named after its model type, and is imported when a model needs it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple

from ..registry import Registry


class Adapter(NamedTuple):
    """How to route one model type.

    Attributes:
        attention: The class of its attention modules.
        attend: Replaces their forward.
    """

    attention: type
    attend: Callable[..., tuple]


def _built_in(model_type: str) -> Adapter:
    module = import_module(f".models.{model_type}", __package__)
    return Adapter(module.ATTENTION, module.attend)


ADAPTERS: Registry[Callable[[], Adapter]] = Registry(
    "model adapter", {name: partial(_built_in, name) for name in ("bloom", "falcon", "gptj", "mpt")}
)


def register(model_type: str, attention: type) -> Callable[[Any], Any]:
    """Register a function as the attention of a model type; a decorator.

    The function is called with the module, its `RoutedLayer` and the arguments of the module's
    forward, whose result it returns. It attends through `adapters.attend`.

    Args:
        model_type: As in the model's config.
        attention: The class of the model's attention modules.

    Returns:
        The decorator, which returns the function.

    Raises:
        RecipeError: The model type has an adapter already.
    """

    def decorate(attend: Callable[..., tuple]) -> Callable[..., tuple]:
        adapter = Adapter(attention, attend)
        ADAPTERS.register(lambda: adapter, name=model_type)
        return attend

    return decorate
