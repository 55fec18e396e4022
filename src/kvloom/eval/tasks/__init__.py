"""The tasks of `kvloom eval`, one file each."""

from __future__ import annotations

from collections.abc import Callable

from ...errors import InputError
from ..sample import Task
from .free import Free
from .multiturn import Multiturn
from .niah import Niah
from .perplexity import Perplexity

TASKS: dict[str, Callable[[], Task]] = {
    "perplexity": Perplexity,
    "free": Free,
    "niah": Niah,
    "multiturn": Multiturn,
}


def task_named(name: str) -> Task:
    """Return a task, such as "niah" or "niah:single+passkey"; raises `InputError`."""
    bare, _, parts = name.partition(":")
    if bare not in TASKS:
        raise InputError(f"there is no task {bare!r}; there are {', '.join(TASKS)}")
    if not parts:
        return TASKS[bare]()
    try:
        return TASKS[bare](parts.split("+"))  # type: ignore[call-arg]
    except TypeError:
        raise InputError(f"the task {bare!r} has no variants; give {bare!r} alone") from None
