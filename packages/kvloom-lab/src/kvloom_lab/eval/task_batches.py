"""What `kvloom eval` measures: the samples of its tasks, checked before a model is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvloom.errors import InputError

from .sample import Batch, Source, Task

TaskBatches = Sequence[tuple[Task[Any], Sequence[Batch]]]
"""Tasks with their samples, in batches."""


def task_batches(tasks: Sequence[Task[Any]], source: Source, positions: int | None) -> TaskBatches:
    """Return the samples of tasks.

    positions: of the model; None if it has no limit. Raises `InputError` for a context that needs
    more of them with its question and answer, a task that is named twice, and a missing --data.
    """
    _check_data(tasks, source)
    tasks_with_batches = []
    for task in tasks:
        if not task.data:  # the texts of a user's file may be shorter
            _check_positions(task, max(source.lengths), 1, positions)
        batches = task.batches(source)
        for batch in batches:
            _check_positions(task, batch.ids.shape[1], task.positions(batch), positions)
        tasks_with_batches.append((task, batches))
    names: set[tuple[str, str]] = set()
    for task, batches in tasks_with_batches:
        for sample in (s for batch in batches for s in batch.samples):
            if (task.name, sample.name) in names:
                raise InputError(
                    f"the sample {sample.name} of {task.name} occurs twice; give every task, "
                    'variant and length once, and join variants, as in "niah:single+passkey"'
                )
            names.add((task.name, sample.name))
    return tasks_with_batches


def _check_data(tasks: Sequence[Task[Any]], source: Source) -> None:
    takers = [task for task in tasks if task.data]
    if source.data is not None and not takers:
        raise InputError(
            f"--data is given, and {', '.join(task.name for task in tasks)} takes none; leave it "
            "out, or add a task that takes it: longbench or summarize"
        )
    if source.data is None and takers:
        raise InputError(f"the task {takers[0].name} needs --data: {takers[0].data}")


def _check_positions(task: Task[Any], tokens: int, after: int, positions: int | None) -> None:
    if positions is not None and tokens + after > positions:
        raise InputError(
            f"{task.name}: a context of {tokens} tokens and the {after} or more after it need "
            f"{tokens + after} positions, and the model has {positions}; use a shorter --context "
            "or fewer --max-new-tokens"
        )
