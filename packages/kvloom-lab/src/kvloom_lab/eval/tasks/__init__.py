"""The tasks of `kvloom eval`, open to others: `register_task` adds one."""

from __future__ import annotations

from typing import Any, TypeVar

from kvloom.errors import InputError, RecipeError
from kvloom.registry import Registry

from ..sample import Task
from .instructions import Instructions
from .needles import Multiturn, Niah
from .ruler import Ruler
from .state import State
from .text import Free, Perplexity, Short
from .trace import TraceTask
from .user_data import LongBench, Summarize

AnyTask = TypeVar("AnyTask", bound=Task[Any])

TASKS: Registry[type[Task[Any]]] = Registry(
    "task",
    {
        task.name: task
        for task in (
            Perplexity,
            Short,
            Free,
            TraceTask,
            Niah,
            Ruler,
            LongBench,
            Summarize,
            Multiturn,
            Instructions,
            State,
        )
    },
    Task,
    ("batches", "measure", "positions"),
)
_FILES = ("prompts", "run")  # of a results folder, beside one of each task


def register_task(cls: type[AnyTask]) -> type[AnyTask]:
    """Make a task available to `kvloom eval` by its `name`; usable as a decorator.

    Args:
        cls: A class derived from `Task`.

    Returns:
        The class.

    Raises:
        RecipeError: It is another class, or its name is empty or taken.
    """
    name = getattr(cls, "name", "")
    if not name:
        raise RecipeError(f'{cls.__name__} has no name: give it name = "..."')
    if name in _FILES:
        raise RecipeError(f"{name!r} is the name of a file of results; choose another name")
    return TASKS.register(cls, name)


def task_named(name: str) -> Task[Any]:
    """Return a task, such as "niah" or "niah:single+passkey"; raises `InputError`."""
    bare, _, variants = name.partition(":")
    if bare not in TASKS:
        raise InputError(f"there is no task {bare!r}; there are {', '.join(TASKS)}")
    if not variants:
        return TASKS[bare]()
    if not TASKS[bare].variants:
        raise InputError(f"the task {bare!r} has no variants; give {bare!r} alone")
    return TASKS[bare](variants.split("+"))
