"""Tasks that ask questions: what is compressed, what follows it, and how answers are scored.

A prompt has the parts of the tokenizer's chat template, or none. The user's data are JSON lines.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from jinja2 import TemplateError

from kvloom.errors import InputError

from ...workload.files import Fields, Record, read_records
from ...workload.passes import Measurement
from ..decoding import answers
from ..sample import Batch, Outcome, Question, Run, Sample, Source, Task

_MARK = "<<kvloom>>"
_USER = {"role": "user", "content": _MARK}


class ChatParts(NamedTuple):
    """Ids before the text; text between the user's words and the answer's prefix."""

    before: list[int]
    after: str


def chat_parts(tokenizer: Any, first: list[int], *, chat: bool | None = None) -> ChatParts:
    """Return the chat template's parts around a user's message, or plain ones without a template.

    first: special ids before a plain text. chat: True requires a template and raises `InputError`
    without one; None uses one if there is one.
    """
    has_template = getattr(tokenizer, "chat_template", None) is not None
    if chat and not has_template:
        from . import TASKS  # which are made of what is defined here

        others = [name for name, task in TASKS.items() if not task.needs_data]
        raise InputError(
            "the tokenizer has no chat template, and this task is for instruction-tuned models; "
            f"use such a model, or a task without --data: {', '.join(others)}"
        )
    if not has_template or chat is False:
        return ChatParts(list(first), "")
    return _around(tokenizer, _applied(tokenizer, [_USER]))


def system_chat_parts(tokenizer: Any, first: list[int], system: str) -> ChatParts:
    """Return the parts around a user's message that follows a system prompt.

    Without a chat template, or with one that has no system role, the system prompt stands at the
    start of the user's message.
    """
    if getattr(tokenizer, "chat_template", None) is not None:
        try:
            whole = _applied(tokenizer, [{"role": "system", "content": system}, _USER])
        except TemplateError:  # which a template raises for a role that it does not have
            whole = ""
        if system in whole and _MARK in whole:
            return _around(tokenizer, whole)
    plain = chat_parts(tokenizer, first)
    head = tokenizer.encode(f"{system}\n\n", add_special_tokens=False)
    return ChatParts([*plain.before, *head], plain.after)


def _applied(tokenizer: Any, messages: list[dict[str, str]]) -> str:
    """Return messages in the chat template, up to where the answer begins."""
    return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)


def _around(tokenizer: Any, whole: str) -> ChatParts:
    before, after = whole.split(_MARK)
    return ChatParts(tokenizer.encode(before, add_special_tokens=False) if before else [], after)


@dataclass(frozen=True)
class Prompt:
    """Ids around a text: compressed before and behind it, and the question, which follows."""

    before: list[int]
    behind: list[int]
    question: list[int]

    def room(self, length: int) -> int:
        """Return how many ids the text may have in a context of `length` ids."""
        return length - len(self.before) - len(self.behind)

    def context(self, text: list[int]) -> list[int]:
        """Return the ids that are compressed."""
        return [*self.before, *text, *self.behind]


def prompt(source: Source, before: list[int], question: list[int]) -> Prompt:
    """Return what a question follows: with ask="inside", all but its last id is compressed."""
    if source.ask == "inside":
        return Prompt(before, question[:-1], question[-1:])
    return Prompt(before, [], question)


def question_batch(
    source: Source,
    name: str,
    ids: list[int],
    question: Question,
    length: int,
    reference: str | None = None,
    **fields: Any,
) -> Batch:
    """Return one context `ids` and one question about it.

    length: the limit of the context. reference: default: the expected strings. fields: what else
    describes the sample.
    """
    sample = Sample(
        name,
        source.decode(ids),
        question=source.decode(question.ids),
        reference=", ".join(question.expected) if reference is None else reference,
        fields={"length": length, "tokens": len(ids), **fields},
        payload=question,
    )
    return Batch(torch.tensor([ids]), [sample])


def outcome_of(source: Source, answer: list[int], scores: dict[str, float]) -> Outcome:
    """Return the outcome of generated ids."""
    return Outcome(scores, source.decode(answer), source.pieces(answer))


class QuestionTask(Task[None]):
    """A task that asks questions about one context; the payload of each sample is a `Question`."""

    def score(self, text: str, sample: Sample) -> dict[str, float]:
        """Score an answer by the share of expected strings in it."""
        return {"correct": sample.payload.share_in(text)}

    def measure(self, run: Run[None]) -> Measurement[tuple[list[Outcome], None]]:
        """Answer the questions about one context."""
        samples, source = run.batch.samples, run.source
        ids, tokens = [s.payload.ids for s in samples], [s.payload.tokens for s in samples]
        generated = yield from answers(run.model, run.cache, ids, tokens, source.batch)
        outcomes = [
            outcome_of(source, answer, self.score(source.decode(answer), sample))
            for sample, answer in zip(samples, generated, strict=True)
        ]
        return outcomes, None

    def positions(self, batch: Batch) -> int:
        """Return the positions of the longest question and answer."""
        return question_positions(batch)


def question_positions(batch: Batch) -> int:
    """Return the positions of the longest question and its answer, whose last token takes none."""
    return max(len(s.payload.ids) + s.payload.tokens - 1 for s in batch.samples)


def data_records(path: str, fields: Fields) -> list[Record]:
    """Return the records of a file, or of the .jsonl files of a folder in the order of their names.

    fields: required ones, with their types. Raises `InputError` for a file that cannot be read or
    is empty, and for a damaged line, which it names.
    """
    source_path = Path(path)
    if not source_path.exists():
        raise InputError(f"there is no file or folder {path!r}; --data takes JSON lines")
    files = sorted(source_path.glob("*.jsonl")) if source_path.is_dir() else [source_path]
    records = [
        record for file in files for record in read_records(file, fields, "correct the line")
    ]
    if not records:
        raise InputError(f"{path!r} has no JSON lines; give a .jsonl file, or a folder of such")
    return records


def drawn(records: list[Record], samples: int, seed: int) -> list[Record]:
    """Return `samples` records drawn at random, in their order, or all if there are not more."""
    if len(records) <= samples:
        return records
    picks = np.random.default_rng([seed, len(records)]).choice(len(records), samples, replace=False)
    return [records[i] for i in sorted(picks)]
