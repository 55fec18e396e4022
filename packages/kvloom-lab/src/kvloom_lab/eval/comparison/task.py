"""What `kvloom compare` measures recipes on: a context, its continuation, and needles.

Decides the sizes of the task, and which sizes do not fit the model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from kvloom.errors import InputError

from ...models import max_positions
from ...workload.text import cut_rows, leading_ids, tokenize
from .needles import ASK, Haystack, haystacks

DEFAULT_CONTEXT = 2048
MIN_NEW_TOKENS = 32  # fewer steps are too few to measure decoding speed
QUESTION_POSITIONS = 64  # positions after the context that a question and its answer may need


@dataclass(frozen=True)
class Settings:
    """How much to measure.

    Attributes:
        context: Tokens to prefill; None: 2048, or as many as the model has positions for.
        new_tokens: Tokens of the continuation, decoded one by one.
        batch: Rows of text, and questions asked together.
        questions: Needles in all, eight in one context.
        ask: When a question is asked, a key of `needles.ASK`.
        seed: Decides which parts of the text are read, and the needles and their positions.
    """

    context: int | None = None
    new_tokens: int = 160
    batch: int = 4
    questions: int = 48
    ask: str = "after"
    seed: int = 0

    def __post_init__(self) -> None:
        least = {"context": 1, "new_tokens": MIN_NEW_TOKENS, "batch": 1, "questions": 0, "seed": 0}
        for name, lowest in least.items():
            value = getattr(self, name)
            if value is not None and value < lowest:
                raise InputError(f"{name}={value} must be {lowest} or more")
        if self.ask not in ASK:
            raise InputError(f"ask={self.ask!r} is unknown; use one of {', '.join(ASK)}")

    @property
    def positions_after(self) -> int:
        """Positions needed after the context."""
        return max(self.new_tokens + 1, QUESTION_POSITIONS)


@dataclass(frozen=True)
class ComparisonTask:
    """What a recipe is measured on.

    text: int64 [B, context + new_tokens + 1], real text. haystacks: contexts with questions. ask: a
    key of `needles.ASK`.
    """

    text: Tensor
    context: int
    haystacks: list[Haystack]
    ask: str = "after"

    @property
    def new_tokens(self) -> int:
        """Tokens of the continuation, decoded one by one after the context."""
        return self.text.shape[1] - self.context - 1

    @property
    def questions(self) -> int:
        """Questions in all haystacks."""
        return sum(len(h.questions) for h in self.haystacks)

    @property
    def reads_haystacks(self) -> bool:
        """Whether caches hold the haystacks before any question is asked."""
        return self.ask == "after" and bool(self.haystacks)

    @property
    def prompts(self) -> list[tuple[Tensor, Haystack | None]]:
        """The prompts that caches hold before anything is decoded, int64 [rows, context] each.

        The rows of text come last: only they are timed, and the prompts before them warm up. These
        are the haystacks or, if caches do not hold haystacks, one row of text.
        """
        text = self.text[:, : self.context]
        if self.reads_haystacks:
            return [*((torch.tensor([h.context_ids]), h) for h in self.haystacks), (text, None)]
        return [(text[:1], None), (text, None)]

    @property
    def units(self) -> int:
        """Units of progress of one recipe: one per prompt, token and question."""
        return len(self.prompts) + self.new_tokens + self.questions


def prepare(
    model: PreTrainedModel | PreTrainedConfig,
    tokenizer: Any,
    text: str,
    settings: Settings | None = None,
) -> ComparisonTask:
    """Return the task that these settings define for a text.

    Args:
        model: The model or its config, which limits the context.
        tokenizer: The model's.
        text: Longer than the context and its continuation.
        settings: How much to measure.

    Raises:
        InputError: The text is too short or the context too long.
    """
    settings = settings or Settings()
    context = _context(model, settings)
    ids, first = tokenize(tokenizer, text), leading_ids(tokenizer)
    rows = cut_rows(ids, first, settings.batch, context + settings.new_tokens + 1, settings.seed)
    needles = haystacks(
        tokenizer,
        ids,
        first,
        context=context,
        questions=settings.questions,
        seed=settings.seed,
    )
    return ComparisonTask(rows, context, needles, settings.ask)


def _context(model: PreTrainedModel | PreTrainedConfig, settings: Settings) -> int:
    available, after = max_positions(model), settings.positions_after
    longest = DEFAULT_CONTEXT if available is None else max(1, available - after)
    context = settings.context or min(DEFAULT_CONTEXT, longest)
    if available is not None and context + after > available:
        raise InputError(
            f"context={context} and the {after} tokens after it need {context + after} positions "
            f"and the model has {available}; use a context of {longest} or less"
        )
    return context
