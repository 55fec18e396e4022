"""Tasks that ask: what is compressed, the question behind it, and how the answers are scored.

Decides the ids around a text and a question about it, for chat models and for others, and how the
JSON lines of a user are read.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from kvloom.errors import InputError

from ...workload.files import Fields, Record, read_records
from ...workload.passes import Measurement
from ..decoding import answers
from ..sample import Batch, Outcome, Run, Sample, Source

_MARK = "<<kvloom>>"


class Frame(NamedTuple):
    """Ids before the text; text between the user's words and the answer's prefix."""

    before: list[int]
    after: str


def frame(tokenizer: Any, first: list[int], *, chat: bool | None = None) -> Frame:
    """Return the chat template's parts around a user's message, or plain ones without a template.

    first: special ids before a plain text. chat: True requires a template and raises `InputError`
    without one; None uses one if there is one.
    """
    has = getattr(tokenizer, "chat_template", None) is not None
    if chat and not has:
        raise InputError(
            "the tokenizer has no chat template, and this task is for instruction-tuned models; "
            "use such a model, or the tasks perplexity, free, niah, ruler and multiturn"
        )
    if not has or chat is False:
        return Frame(list(first), "")
    whole = tokenizer.apply_chat_template(
        [{"role": "user", "content": _MARK}], tokenize=False, add_generation_prompt=True
    )
    before, after = whole.split(_MARK)
    return Frame(tokenizer.encode(before, add_special_tokens=False) if before else [], after)


@dataclass(frozen=True)
class Asked:
    """A question's ids, the expected strings, and how many tokens an answer may have."""

    ids: list[int]
    expected: list[str]
    tokens: int


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


def prompt_in(source: Source, around: Frame, tail: str, prefix: str = "") -> Prompt:
    """Return a prompt in a chat template; prefix: the first words of the answer."""
    tail_ids = source.encode(tail + around.after + prefix)
    return prompt(source, around.before, tail_ids)


class QuestionTask:
    """A task that asks questions about one context; the data of each sample are `Asked`."""

    data = ""

    def score(self, text: str, sample: Sample) -> dict[str, float]:
        """Score an answer by the share of expected strings in it, whatever their case."""
        return {"correct": share_found(text, sample.data.expected)}

    def measure(self, run: Run[None]) -> Measurement[tuple[list[Outcome], None]]:
        """Answer the questions about one context."""
        asked = [sample.data for sample in run.batch.samples]
        ids = yield from answers(run, [a.ids for a in asked], [a.tokens for a in asked])
        outcomes = []
        for sample, answer in zip(run.batch.samples, ids, strict=True):
            text = run.source.decode(answer)
            outcomes.append(Outcome(self.score(text, sample), text, run.source.pieces(answer)))
        return outcomes, None

    def positions(self, batch: Batch) -> int:
        """Return the positions of the longest question and answer; its last token takes none."""
        return max(len(s.data.ids) + s.data.tokens - 1 for s in batch.samples)


def share_found(answer: str, expected: list[str]) -> float:
    """Return which share of the expected strings the answer contains, whatever their case."""
    low = answer.lower()
    return sum(text.lower() in low for text in expected) / len(expected)


def data_records(path: str, fields: Fields) -> list[Record]:
    """Return the records of a file, or of the .jsonl files of a folder in the order of their names.

    fields: required ones, with their types. Raises `InputError` for a file that cannot be read or
    is empty, and for a damaged line, which it names.
    """
    place = Path(path)
    if not place.exists():
        raise InputError(f"there is no file or folder {path!r}; --data takes JSON lines")
    files = sorted(place.glob("*.jsonl")) if place.is_dir() else [place]
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
