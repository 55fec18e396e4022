"""Which attention implementation the config of a model names: kvloom's within a step, else its own.

transformers reads it from the config, in the modules that attend and where masks are made.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..errors import CacheMisuse

NAME = "kvloom"
PAGES = "kvloom_flash"
"""kvloom's while a manager of `continuous` runs. transformers makes no masks for a name with
"flash", and reads no block tables of its own for a name without 2 or 3."""
FIELD = "_attn_implementation_internal"
"""The attribute of a config that names its attention implementation."""
_OF_TRANSFORMERS = (
    "eager", "sdpa", "flex_attention", "flash_attention_2", "flash_attention_3",
    "flash_attention_4",
)  # fmt: skip
_LOCK = threading.Lock()
_STOCK: dict[int, tuple[str, int, Any]] = {}
"""By the id of each config within `use_kvloom`: the model's own implementation, how many steps run,
and the config, whose id stays its own for as long."""
_THREAD = threading.local()


def runs_step() -> bool:
    """Return whether this thread is within `use_kvloom`; others may run the model meanwhile."""
    return getattr(_THREAD, "steps", 0) > 0


@contextmanager
def use_kvloom(configs: Sequence[Any]) -> Iterator[None]:
    """Make the modules of these configs call kvloom's functions, within one step.

    An interrupt between two statements may leave an entry in `_STOCK`; with it, calls of the model
    find its own implementation, whatever its config names. `restore_stock` removes it.
    """
    with _LOCK:
        for config in configs:
            attributes = vars(config)  # setting one by its name takes transformers 4 us
            implementation, steps, _ = _STOCK.get(id(config), (attributes[FIELD], 0, config))
            _STOCK[id(config)] = implementation, steps + 1, config
            attributes[FIELD] = NAME
    before = getattr(_THREAD, "steps", 0)
    try:
        _THREAD.steps = before + 1
        yield
    finally:
        _THREAD.steps = before
        with _LOCK:
            for config in configs:
                implementation, steps, _ = _STOCK.get(id(config), ("", 0, config))
                if steps > 1:
                    _STOCK[id(config)] = implementation, steps - 1, config
                elif steps:
                    _restore(config)


def restore_stock(configs: Sequence[Any]) -> None:
    """Name the model's own implementation in configs that no step will use again."""
    with _LOCK:
        for config in configs:
            _restore(config)


def _restore(config: Any) -> None:
    if id(config) in _STOCK:
        vars(config)[FIELD] = _STOCK[id(config)][0]
        del _STOCK[id(config)]


def stock_implementation(config: Any) -> str:
    """Return the attention implementation of a config without kvloom."""
    running = _STOCK.get(id(config))
    name = config._attn_implementation if running is None else running[0]
    if name == NAME:
        raise CacheMisuse(
            "attention implementation 'kvloom' works during a step with a kvloom cache only; load "
            'the model with another one, such as "sdpa", and call kvloom.attach(model)'
        )
    if name == PAGES:
        raise manager_runs()
    return name


def manager_runs() -> CacheMisuse:
    """Return the error of a call on a model that a manager of `continuous` uses."""
    return CacheMisuse(
        "a manager of kvloom.continuous runs on this model, and other calls have to wait; call "
        "manager.stop() first"
    )


def other_attention(config: Any) -> tuple[str, Any] | None:
    """Return the name and function of a config's attention; None if transformers defines it.

    Other code may register a function under any name, and kvloom does not know what it computes.
    """
    name = stock_implementation(config)
    function = ALL_ATTENTION_FUNCTIONS.get(name)
    defined_in = str(getattr(function, "__module__", "transformers"))
    is_own = name in _OF_TRANSFORMERS and defined_in.partition(".")[0] == "transformers"
    return None if is_own else (name, function)
