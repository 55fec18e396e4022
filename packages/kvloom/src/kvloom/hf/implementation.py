"""Which attention implementation the config of a model names: kvloom's within a step, else its own.

transformers reads it from the config, in the modules that attend and where masks are made.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from ..errors import CacheMisuse

NAME = "kvloom"
FIELD = "_attn_implementation_internal"
"""The attribute of a config that names its attention implementation."""
_LOCK = threading.Lock()
_STOCK: dict[int, tuple[str, int]] = {}
"""By the id of each config within `use_kvloom`: the model's own implementation, and how many steps
of threads run."""


@contextmanager
def use_kvloom(configs: Sequence[Any]) -> Iterator[None]:
    """Make the modules of these configs call kvloom's functions, within one step."""
    with _LOCK:
        for config in configs:
            attributes = vars(config)  # setting one by its name takes transformers 4 us
            implementation, steps = _STOCK.get(id(config), (attributes[FIELD], 0))
            _STOCK[id(config)] = implementation, steps + 1
            attributes[FIELD] = NAME
    try:
        yield
    finally:
        with _LOCK:
            for config in configs:
                implementation, steps = _STOCK.pop(id(config))
                if steps > 1:
                    _STOCK[id(config)] = implementation, steps - 1
                else:
                    vars(config)[FIELD] = implementation


def stock_implementation(config: Any) -> str:
    """Return the attention implementation of a config without kvloom."""
    name = _STOCK.get(id(config), (config._attn_implementation, 0))[0]
    if name == NAME:
        raise CacheMisuse(
            "attention implementation 'kvloom' works during a step with a kvloom cache only; load "
            'the model with another one, such as "sdpa", and call kvloom.attach(model)'
        )
    return name
