"""The tasks of `kvloom eval`, one file each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvloom.errors import InputError

from ..sample import Task
from .longbench import LongBench
from .needles import Multiturn, Niah
from .ruler import Ruler
from .summarize import Summarize
from .text import Free, Perplexity

TASKS: dict[str, Callable[[], Task[Any]]] = {
    "perplexity": Perplexity,
    "free": Free,
    "niah": Niah,
    "ruler": Ruler,
    "longbench": LongBench,
    "summarize": Summarize,
    "multiturn": Multiturn,
}
WITH_PARTS = ("niah", "ruler", "longbench")


def task_named(name: str) -> Task[Any]:
    """Return a task, such as "niah" or "niah:single+passkey"; raises `InputError`."""
    bare, _, parts = name.partition(":")
    if bare not in TASKS:
        raise InputError(f"there is no task {bare!r}; there are {', '.join(TASKS)}")
    if not parts:
        return TASKS[bare]()
    if bare not in WITH_PARTS:
        raise InputError(f"the task {bare!r} has no variants; give {bare!r} alone")
    return TASKS[bare](parts.split("+"))  # type: ignore[call-arg]
