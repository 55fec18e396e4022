"""A registry: names, and the class or function that each name stands for; and plugins.

Decides which names and entries are accepted; what an entry does is the business of its user.

A plugin is another distribution that registers parts when kvloom needs them. A distribution names
its plugins in the entry-point group `kvloom.plugins`. An entry point is a module, or a class in it,
that registers its parts on import; or a function without arguments that registers them when called.
"""

from __future__ import annotations

import re
import threading
import warnings
from collections.abc import Iterator, Mapping
from importlib import metadata
from typing import Any, TypeVar

from ..errors import RecipeError

GROUP = "kvloom.plugins"
_lock = threading.RLock()
_state = "new"  # then "loading", then "loaded"

Entry = TypeVar("Entry")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")  # without : , = @, which the spelling needs


class Registry(Mapping[str, Entry]):
    """An ordered mapping of names: the built-in ones, then those registered from outside.

    Plugins are loaded when a name is looked up that is not there, and when all names are listed.

    Args:
        what: What errors call an entry, such as "score".
        builtin: Names and entries.
        base: The class that every entry is derived from; None where entries are functions or
            modules.
        methods: Those that a class from outside must define.
    """

    def __init__(
        self,
        what: str,
        builtin: Mapping[str, Entry],
        base: type | None = None,
        methods: tuple[str, ...] = (),
    ) -> None:
        self.what, self.base, self.methods = what, base, methods
        self._a = f"an {what}" if what[0] in "aeiou" else f"a {what}"
        self._entries: dict[str, Entry] = dict(builtin)
        self._builtin = frozenset(self._entries)

    def register(self, entry: Any, name: str | None = None) -> Any:
        """Add an entry and return it, so that this is usable as a decorator.

        name: the entry's; None: its `kind`. Raises `RecipeError`, and changes nothing, for a class
        that is not derived from `base` or lacks its `kind` or a method, and for a name that is
        taken or that recipes cannot spell.
        """
        entry_name = getattr(entry, "__name__", repr(entry))
        if self.base is not None:
            self._check_class(entry, self.base, entry_name)
        name = getattr(entry, "kind", "") if name is None else name
        if not name:
            raise RecipeError(f'{entry_name} has no name: give it kind: ClassVar[str] = "..."')
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise RecipeError(
                f"{name!r} is not a name for {self._a}: use letters, digits, '-', '_' and '.'"
            )
        if name in self._entries:
            origin = "built-in" if self.is_builtin(name) else "registered"
            raise RecipeError(
                f"{entry_name} cannot be registered: {name!r} is the name of a {origin} "
                f"{self.what}; choose another name"
            )
        self._entries[name] = entry
        return entry

    def _check_class(self, entry: Any, base: type, entry_name: str) -> None:
        if not (isinstance(entry, type) and issubclass(entry, base)) or entry is base:
            raise RecipeError(f"{entry_name} is not {self._a}: derive a class from {base.__name__}")
        missing = [
            method for method in self.methods if getattr(entry, method) is getattr(base, method)
        ]
        if missing:
            raise RecipeError(
                f"{entry_name} lacks {missing[0]}: {self._a} defines {', '.join(self.methods)}"
            )

    def is_builtin(self, name: str) -> bool:
        """Return whether a name is kvloom's own."""
        return name in self._builtin

    def __getitem__(self, name: str) -> Entry:
        if name not in self._entries:
            load_plugins()
        return self._entries[name]

    def __iter__(self) -> Iterator[str]:
        load_plugins()
        return iter(list(self._entries))

    def __len__(self) -> int:
        load_plugins()
        return len(self._entries)

    def __repr__(self) -> str:
        return f"Registry({self.what!r}: {', '.join(self._entries)})"


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
            for point in sorted(metadata.entry_points(group=GROUP), key=lambda entry: entry.name):
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
