"""Prompts that ask: what is compressed, what follows it, and how the answers are scored."""

from __future__ import annotations

from dataclasses import dataclass

from ...workload.crew import Work
from ..decoding import answers
from ..sample import Batch, Outcome, Run, Sample, Source
from .chat import Frame, encode


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
    tail_ids = encode(source.tokenizer, tail + around.after + prefix)
    return prompt(source, around.before, tail_ids)


class QuestionTask:
    """A task that asks questions about one context; the data of each sample are `Asked`."""

    data = ""

    def score(self, text: str, sample: Sample) -> dict[str, float]:
        """Score an answer by the share of expected strings in it, whatever their case."""
        return {"correct": share_found(text, sample.data.expected)}

    def measure(self, run: Run[None]) -> Work[tuple[list[Outcome], None]]:
        """Answer the questions about one context."""
        asked = [sample.data for sample in run.batch.samples]
        found = yield from answers(run, [a.ids for a in asked], [a.tokens for a in asked])
        outcomes = []
        for sample, answer in zip(run.batch.samples, found, strict=True):
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
