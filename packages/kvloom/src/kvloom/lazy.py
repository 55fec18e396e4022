"""Public names that a package imports on first use, so that importing the package stays light."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def lazy_names(package: str, modules: Mapping[str, str]) -> Callable[[str], Any]:
    """Return the `__getattr__` of a package.

    modules: by public name, the module below the package that defines it; "module:name" where the
    module has another name for it.
    """

    def find(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module, _, own_name = modules[name].partition(":")
        return getattr(import_module(f".{module}", package), own_name or name)

    return find
