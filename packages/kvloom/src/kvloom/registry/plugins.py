"""Plugins: other distributions that register parts when kvloom needs them.

A distribution names its plugins in the entry-point group `kvloom.plugins`. An entry point is a
module, or a class in it, that registers its parts on import; or a function without arguments that
registers them when called.
"""

from __future__ import annotations

import threading
import warnings
from importlib import metadata

GROUP = "kvloom.plugins"
_lock = threading.RLock()
_state = "new"  # then "loading", then "loaded"


def load_plugins() -> None:
    """Load every entry point of the group `kvloom.plugins`, once in a process.

    A plugin that fails to load is named in one `RuntimeWarning`; the others load all the same.
    """
    global _state
    if _state == "loaded":
        return
    with _lock:  # other threads wait until all plugins are loaded
        if _state != "new":  # a plugin looks up a name while it is loaded
            return
        _state = "loading"
        try:
            for point in sorted(metadata.entry_points(group=GROUP), key=lambda one: one.name):
                _load(point)
        finally:
            _state = "loaded"


def _load(point: metadata.EntryPoint) -> None:
    try:
        loaded = point.load()
        if callable(loaded) and not isinstance(loaded, type):
            loaded()
    except Exception as error:
        warnings.warn(
            f"kvloom plugin {point.name!r} ({point.value}) failed to load: "
            f"{type(error).__name__}: {error}; update or uninstall its distribution",
            RuntimeWarning,
            stacklevel=3,
        )
