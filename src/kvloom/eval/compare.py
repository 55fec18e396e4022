"""A list of recipes on one model and one text: the same task for all, one row each.

Decides the sizes of the task, and that `full` is always measured, first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel

from ..errors import InputError
from ..hf import attach, compat
from ..recipe.resolve import resolve
from ..recipe.spec import Recipe
from ..workload import text
from ..workload.models import positions
from ..workload.step import Progress
from . import needles
from .measure import Row, Task, measure

DEFAULT_CONTEXT = 2048
LEAST_STEPS = 32  # fewer say little about decoding speed
QUESTION_ROOM = 64  # tokens a question and its answer may take behind the context


@dataclass(frozen=True)
class Settings:
    """How much to measure.

    context: tokens prefilled (None: 2048, or as many as the model has positions for). new_tokens:
    tokens of real text fed one by one after it. batch: rows of text side by side, and questions
    asked side by side. questions: needles asked for in all, eight to a context. ask: "after" the
    context is compressed, or "with" it, as the end of the prompt. seed: which parts of the text
    are read, and which needles are hidden where.
    """

    context: int | None = None
    new_tokens: int = 160
    batch: int = 4
    questions: int = 48
    ask: str = "after"
    seed: int = 0

    def __post_init__(self) -> None:
        least = {"context": 1, "new_tokens": LEAST_STEPS, "batch": 1, "questions": 0, "seed": 0}
        for name, lowest in least.items():
            value = getattr(self, name)
            if value is not None and value < lowest:
                raise InputError(f"{name}={value} must be {lowest} or more")
        if self.ask not in needles.ASK:
            raise InputError(f"ask={self.ask!r} is not one of {', '.join(needles.ASK)}")

    @property
    def room(self) -> int:
        """Positions needed behind the context."""
        return max(self.new_tokens + 1, QUESTION_ROOM)


def prepare(
    model: PreTrainedModel | PreTrainedConfig,
    tokenizer: Any,
    words: str,
    settings: Settings | None = None,
) -> Task:
    """Return the task that these settings make of a text.

    model: the model or its config, which says how long a context may be. Raises `InputError` if
    the text is too short or the context too long.
    """
    settings = settings or Settings()
    context = _context(model, settings)
    ids, first = text.tokenize(tokenizer, words), text.opening(tokenizer)
    cut = text.rows(ids, first, settings.batch, context + settings.new_tokens + 1, settings.seed)
    hay = needles.haystacks(
        tokenizer,
        ids,
        first,
        context=context,
        questions=settings.questions,
        seed=settings.seed,
    )
    return Task(cut, context, hay, settings.ask)


def compare(
    model: PreTrainedModel,
    tokenizer: Any,
    recipes: Sequence[Recipe | str | Path],
    task: Task,
    progress: Progress | None = None,
) -> list[Row]:
    """Measure recipes on a task; return one `Row` each, that of `full` always first.

    recipes: recipes, their names or their files. progress is called as work goes on; there are
    `task.units` units to each recipe of `with_full(recipes)`. The model is left as it was.
    """
    return list(rows(model, tokenizer, recipes, task, progress))


def rows(
    model: PreTrainedModel,
    tokenizer: Any,
    recipes: Sequence[Recipe | str | Path],
    task: Task,
    progress: Progress | None = None,
) -> Iterator[Row]:
    """Yield what `compare` returns, each row as soon as its recipe is measured."""
    compat.refuse_unsupported(model)
    chosen = with_full(recipes)
    routed_before = getattr(model, "_kvloom", None) is not None
    try:
        full = measure(model, tokenizer, chosen[0], task, None, progress)
        yield full.row
        for recipe in chosen[1:]:
            yield measure(model, tokenizer, recipe, task, full, progress).row
    finally:
        if not routed_before and getattr(model, "_kvloom", None) is not None:
            attach.detach(model)


def with_full(recipes: Sequence[Recipe | str | Path]) -> list[Recipe]:
    """Return the recipes, resolved, each once, with `full` in front."""
    return list(dict.fromkeys(resolve(recipe) for recipe in ("full", *recipes)))


def _context(model: PreTrainedModel | PreTrainedConfig, settings: Settings) -> int:
    most = positions(model)
    longest = DEFAULT_CONTEXT if most is None else max(1, most - settings.room)
    context = settings.context or min(DEFAULT_CONTEXT, longest)
    if most is not None and context + settings.room > most:
        raise InputError(
            f"context={context} and what follows take {context + settings.room} positions and the "
            f"model has {most}; use a context of {longest} or less"
        )
    return context
