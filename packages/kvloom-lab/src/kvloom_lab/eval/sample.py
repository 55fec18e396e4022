"""What a task measures: samples in batches, and the outcome of one recipe on one sample."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvloom import Cache
from kvloom.errors import InputError

from ..workload.passes import Measurement
from ..workload.text import leading_ids, tokenize

Baseline = TypeVar("Baseline")
"""What a task measures of `full`, and compares other recipes with."""

ASK = "after", "inside"
"""Where a question stands. after: after the compressed context; no score depends on it. inside: at
the end of the prompt; it is compressed with the context."""


def check_ask(ask: str) -> None:
    """Raise `InputError` for a word that is not in `ASK`."""
    if ask not in ASK:
        raise InputError(f"ask={ask!r} is unknown; use one of {', '.join(ASK)}")


@dataclass(frozen=True)
class Sample:
    """One measurement of a task.

    Attributes:
        name: Unique in the task.
        context: A text, as in `prompts.jsonl`; `question` and `reference` likewise.
        fields: What else describes it, such as its length and depth.
        payload: What the task measures it with.
    """

    name: str
    context: str
    question: str = ""
    reference: str = ""
    fields: dict[str, Any] = field(default_factory=dict)
    payload: Any = None


@dataclass(frozen=True)
class Question:
    """A question about a context.

    Attributes:
        ids: Its ids.
        expected: The expected strings.
        tokens: Tokens of an answer.
    """

    ids: list[int]
    expected: list[str]
    tokens: int

    def share_in(self, answer: str) -> float:
        """Return which share of the expected strings an answer contains, whatever their case."""
        return sum(text.lower() in answer.lower() for text in self.expected) / len(self.expected)


@dataclass(frozen=True)
class Batch:
    """Contexts that one forward pass compresses, and the samples that follow them.

    Attributes:
        ids: int64 [B, T], the contexts.
        samples: Of all contexts; the task knows which belong together.
        timed: int64 [B, steps], the tokens of decode steps that are timed after the contexts; None:
            none are.
    """

    ids: Tensor
    samples: Sequence[Sample]
    timed: Tensor | None = None


@dataclass
class Outcome:
    """What a recipe did on a sample; the fields are those of `TASK.jsonl`."""

    scores: dict[str, float]
    answer: str = ""
    tokens: list[str] = field(default_factory=list)
    curves: dict[str, list[float]] = field(default_factory=dict)


@dataclass(frozen=True)
class Source:
    """What samples are made from.

    Attributes:
        tokenizer: The model's.
        text: The text in which tasks hide facts and from which they take contexts.
        text_ids: int64 [tokens], its ids.
        first: Special ids before a context.
        lengths: Of contexts, in tokens.
        samples: How many of each kind.
        new_tokens: Of a continuation.
        batch: Contexts in one pass.
        seed: Of everything drawn.
        ask: A word of `ASK`.
        data_path: A file or folder of the user, for tasks that take one.
    """

    tokenizer: Any
    text: str
    text_ids: np.ndarray
    first: list[int]
    lengths: Sequence[int]
    samples: int
    new_tokens: int
    batch: int
    seed: int
    ask: str = "after"
    data_path: str | None = None

    def __post_init__(self) -> None:
        check_ask(self.ask)

    @classmethod
    def of(cls, tokenizer: Any, text: str, **settings: Any) -> Source:
        """Return a source from a text."""
        ids, first = tokenize(tokenizer, text), leading_ids(tokenizer)
        return cls(tokenizer, text, ids, first, **settings)

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text without special tokens."""
        return self.tokenizer.encode(text, add_special_tokens=False) if text else []

    def decode(self, ids: Tensor | Sequence[int]) -> str:
        """Return ids as text."""
        return self.tokenizer.decode(torch.as_tensor(ids).tolist())

    def pieces(self, ids: Tensor | Sequence[int]) -> list[str]:
        """Return each id as text."""
        return [self.tokenizer.decode([i]) for i in torch.as_tensor(ids).tolist()]


@dataclass(frozen=True)
class Run(Generic[Baseline]):
    """One recipe on one batch.

    Attributes:
        model: The model.
        source: What the samples are made from.
        cache: The recipe's, which has read the contexts.
        batch: The contexts and their samples.
        baseline: What the task's `measure` returned for `full`; None for `full` itself.
        count: Reports the current work and finished units of progress.
    """

    model: PreTrainedModel
    source: Source
    cache: Cache
    batch: Batch
    baseline: Baseline | None
    count: Callable[[str, int], None] = lambda what, units: None


class Task(Generic[Baseline]):
    """A task: how samples are made, and what is measured on them; the base class of all tasks.

    Attributes:
        name: What it is called by.
        about: What it measures, in a sentence of a report.
        needs_data: What the user's file or folder must contain; "" for a task that takes none.
        variants: Their names, as after the colon of "niah:single"; empty: it has none.
        variant_word: What messages call a variant.
        main_score: The score that a report shows first, if the samples have it.
        lower_is_better: The scores of which a smaller value is better.
        chosen: The variants to measure.
    """

    name: ClassVar[str] = ""
    about: ClassVar[str] = ""
    needs_data: ClassVar[str] = ""
    variants: ClassVar[Sequence[str]] = ()
    variant_word: ClassVar[str] = "variant"
    main_score: ClassVar[str] = "correct"
    lower_is_better: ClassVar[Sequence[str]] = ()
    chosen: Sequence[str] = ()

    def __init__(self, variants: Sequence[str] = ()) -> None:
        """Take the variants to measure; empty: all. Raises `InputError` for an unknown one."""
        for variant in variants:
            if variant not in self.variants:
                raise InputError(
                    f"{self.name} has no {self.variant_word} {variant!r}; "
                    f"there are {', '.join(self.variants)}"
                )
        self.chosen = variants or self.variants

    @staticmethod
    def context_of(sample: str) -> str:
        """Return the name of a sample's context, which several samples may share.

        sample: its name, perhaps after the kind of its text and a slash.
        """
        return sample

    def batches(self, source: Source) -> list[Batch]:
        """Return the samples, the same for the same source."""
        raise NotImplementedError

    def measure(self, run: Run[Baseline]) -> Measurement[tuple[list[Outcome], Baseline]]:
        """Return the outcome of every sample, and what other recipes are compared with."""
        raise NotImplementedError

    def positions(self, batch: Batch) -> int:
        """Return how many positions the samples of a batch need after their contexts."""
        raise NotImplementedError


TaskBatches = Sequence[tuple[Task[Any], Sequence[Batch]]]
"""Tasks with their samples, in batches."""


def task_batches(tasks: Sequence[Task[Any]], source: Source, positions: int | None) -> TaskBatches:
    """Return the samples of tasks.

    positions: of the model; None if it has no limit. Raises `InputError` for a context that needs
    more of them with its question and answer, a task that is named twice, and a missing --data.
    """
    takers = [task for task in tasks if task.needs_data]
    if source.data_path is not None and not takers:
        from .tasks import TASKS  # which are made of what is defined here

        takers_by_name = [name for name, task in TASKS.items() if task.needs_data]
        raise InputError(
            f"--data is given, and {', '.join(task.name for task in tasks)} takes none; leave it "
            f"out, or add a task that takes it: {' or '.join(takers_by_name)}"
        )
    if source.data_path is None and takers:
        raise InputError(f"the task {takers[0].name} needs --data: {takers[0].needs_data}")
    tasks_with_batches = []
    for task in tasks:
        if not task.needs_data:  # the texts of a user's file may be shorter
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


def _check_positions(task: Task[Any], tokens: int, after: int, positions: int | None) -> None:
    if positions is not None and tokens + after > positions:
        raise InputError(
            f"{task.name}: a context of {tokens} tokens and the {after} or more after it need "
            f"{tokens + after} positions, and the model has {positions}; use a shorter --context "
            "or fewer --max-new-tokens"
        )
