"""Public names that a package imports on first use, so that importing the package stays light."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from typing import Any


def lazy_names(package: str, names: Mapping[str, Iterable[str]]) -> Callable[[str], Any]:
    """Return the `__getattr__` of a package.

    names: by module below the package, the public names that it defines; "own:public" where the
    module has another name for it.
    """
    places: dict[str, tuple[str, str]] = {}
    for module, defined in names.items():
        for own_name, _, public in (name.partition(":") for name in defined):
            places[public or own_name] = module, own_name

    def find(name: str) -> Any:
        if name not in places:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module, own_name = places[name]
        return getattr(import_module(f".{module}", package), own_name)

    return find
