"""Needles in a haystack: a grid of context lengths and depths, and conversations about documents.

`niah` hides facts in real text and asks about them after the context is compressed, or, with
ask="inside", at the end of what is compressed. An answer counts by the share of expected strings in
it. Variants: `single`, one fact per context; `multikey`, ten facts and a question about each;
`multivalue`, one key with four numbers; `multiquery`, four keys asked together; `passkey`, the
template of KIVI (arXiv:2402.02750, appendix B).

`multiturn` asks several questions on one compressed context, then appends a second document, of
half the length, in one step, and asks about it. One cache serves all turns: it keeps every question
and every answer, so that what a recipe evicts or distorts in one turn is missing in the next. There
is no chat template; a recipe with recall reads the questions token by token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from kvloom.errors import InputError

from ...workload.passes import ForwardRequest, Measurement
from ..decoding import greedy, read_question
from ..needle_text import (
    draw_keys,
    draw_number,
    fact_text,
    hide_near_depths,
    question_text,
    split_at_answer,
)
from ..sample import Batch, Outcome, Question, Run, Sample, Source, Task
from .questions import QuestionTask, chat_parts, outcome_of, prompt

DEPTHS = tuple(np.linspace(0, 1, 10).round(3).tolist())
VARIANTS = ("single", "multikey", "multivalue", "multiquery", "passkey")
TURNS = 4  # questions about each of the two documents
TURN_DEPTHS = tuple(((np.arange(TURNS) + 0.5) / TURNS).tolist())


class Niah(QuestionTask):
    """Facts found, by length and depth."""

    name = "niah"
    about = "A fact is hidden in a long text, and a question asks for it."
    variants = VARIANTS

    def __init__(self, variants: Sequence[str] = ("single", "multikey", "passkey")) -> None:
        super().__init__(variants)

    @staticmethod
    def context_of(sample: str) -> str:
        """Return the name without the depth for `multikey`, which asks ten times."""
        return sample.rpartition("/")[0] if "multikey/" in sample else sample

    def batches(self, source: Source) -> list[Batch]:
        """Return contexts of exactly the lengths of the source."""
        batches = []
        for length in source.lengths:
            for variant in self.chosen:
                for number in range(source.samples):
                    seed = [source.seed, length, VARIANTS.index(variant), number]
                    rng = np.random.default_rng(seed)
                    name = f"{variant}/{length}/{number}"
                    batches += [
                        _batch(source, rng, name, variant, length, content)
                        for content in _contents(rng, variant)
                    ]
        return batches


class _Haystack(NamedTuple):
    """A context: its introduction, its facts with their depths, and the questions about them.

    questions: the text, the expected strings and the depth of each.
    """

    intro: str
    facts: list[tuple[str, float]]
    questions: list[tuple[str, list[str], float]]


def _contents(rng: np.random.Generator, variant: str) -> Iterator[_Haystack]:
    """Yield the content of contexts: one for each depth, or one with facts at all depths."""
    if variant == "multikey":
        keys, values = draw_keys(rng, len(DEPTHS)), [draw_number(rng) for _ in DEPTHS]
        needles = list(zip(keys, values, DEPTHS, strict=True))
        yield _Haystack(
            "",
            [(fact_text(key, value), depth) for key, value, depth in needles],
            [(question_text(key), [value], depth) for key, value, depth in needles],
        )
        return
    for depth in DEPTHS:
        if variant == "passkey":
            key = draw_number(rng)
            intro = (
                "There is an important info hidden inside a lot of irrelevant text. Find it and "
                "memorize them. I will quiz you about the important information there.\n"
            )
            text = f"\nThe pass key is {key}. Remember it. {key} is the pass key.\n"
            question = "\nWhat is the pass key? The pass key is"
            yield _Haystack(intro, [(text, depth)], [(question, [key], depth)])
            continue
        keys = draw_keys(rng, 4)
        count = 1 if variant == "single" else 4
        values = [draw_number(rng) for _ in range(count)]
        depths = [depth, *rng.random(count - 1)]
        if variant == "single":
            keys, question = keys[:1], question_text(keys[0])
        elif variant == "multivalue":
            question = f"\nQuestion: The four magic numbers for {keys[0]} are"
            keys = keys[:1] * 4
        else:
            names = f"{', '.join(keys[:3])} and {keys[3]}"
            question = f"\nQuestion: The magic numbers for {names} are"
        texts = [fact_text(key, value) for key, value in zip(keys, values, strict=True)]
        facts = list(zip(texts, depths, strict=True))
        yield _Haystack("", facts, [(question, values, depth)])


def _batch(
    source: Source,
    rng: np.random.Generator,
    name: str,
    variant: str,
    length: int,
    content: _Haystack,
) -> Batch:
    """Return one context of exactly `length` ids and the samples that ask about it."""
    tokenizer, questions = source.tokenizer, content.questions
    chat = chat_parts(tokenizer, source.first, chat=None if variant == "passkey" else False)
    before = [*chat.before, *source.encode(content.intro)]
    if source.ask == "inside" and len(questions) > 1:
        raise InputError("niah: the variant multikey asks ten questions; use it with --ask after")
    prompts = [
        prompt(source, before, question_ids(tokenizer, text, chat.after, expected[0]))
        for text, expected, _ in questions
    ]
    facts = [source.encode(text) for text, _ in content.facts]
    depths = [depth for _, depth in content.facts]
    text = hide_near_depths(tokenizer, source.text_ids, rng, facts, depths, prompts[0].room(length))
    ids = prompts[0].context(text)
    context = source.decode(ids)
    samples = []
    for part, (_, expected, depth) in zip(prompts, questions, strict=True):
        longest = max(len(source.encode(f" {value}")) for value in expected)
        samples.append(
            Sample(
                f"{name}/{depth:g}",
                context,
                question=source.decode(part.question),
                reference=", ".join(expected),
                fields={"length": length, "depth": depth, "variant": variant},
                payload=Question(part.question, expected, len(expected) * (longest + 3) + 2),
            )
        )
    return Batch(torch.tensor([ids]), samples)


def question_ids(tokenizer: Any, text: str, after: str, answer: str) -> list[int]:
    """Return a question's ids; a chat template's turn goes between the question and its answer."""
    if after:
        head, mark, prefix = text.partition("? ")
        text = head + mark.strip() + after + prefix
    return split_at_answer(tokenizer, text, answer)[0]


class Multiturn(Task[None]):
    """Facts found, by turn and document."""

    name = "multiturn"
    about = "Several questions about one compressed text, then about a second document."

    @staticmethod
    def context_of(sample: str) -> str:
        """Return the name without the turn."""
        return sample.rpartition("/")[0]

    def batches(self, source: Source) -> list[Batch]:
        """Return contexts of exactly the lengths of the source, with eight turns each."""
        if source.ask == "inside":
            raise InputError("multiturn asks eight questions; use it with --ask after")
        return [
            _conversation(source, length, count)
            for length in source.lengths
            for count in range(source.samples)
        ]

    def measure(self, run: Run[None]) -> Measurement[tuple[list[Outcome], None]]:
        """Ask turn by turn; the last token of an answer is read with the next turn."""
        device, source, outcomes = run.model.device, run.source, []
        last: list[int] = []
        for sample in run.batch.samples:
            document, question = sample.payload
            if document:
                yield ForwardRequest(torch.tensor([[*last, *document]], device=device), run.cache)
                last = []
            ids = torch.tensor([[*last, *question.ids]], device=device)
            logits = yield from read_question(run.cache, ids)
            answer = (yield from greedy(run.cache, logits, question.tokens))[0].tolist()
            last = answer[-1:]
            scores = {"correct": question.share_in(source.decode(answer))}
            outcomes.append(outcome_of(source, answer, scores))
        return outcomes, None

    def positions(self, batch: Batch) -> int:
        """Return the positions of all turns and of the second document."""
        payloads = [sample.payload for sample in batch.samples]
        return sum(len(document) + len(q.ids) + q.tokens for document, q in payloads) - 1


def _conversation(source: Source, length: int, count: int) -> Batch:
    """Return a context of exactly `length` ids, and the turns after it."""
    rng = np.random.default_rng([source.seed, length, count])
    names = draw_keys(rng, 2 * TURNS)
    values = [draw_number(rng) for _ in names]
    facts = [source.encode(fact_text(k, v)) for k, v in zip(names, values, strict=True)]
    hide = partial(hide_near_depths, source.tokenizer, source.text_ids, rng)
    first = [*source.first, *hide(facts[:TURNS], TURN_DEPTHS, length - len(source.first))]
    second = hide(facts[TURNS:], TURN_DEPTHS, length // 2)
    texts = [source.decode(first), source.decode(second)]
    samples = []
    for turn, (key, value) in enumerate(zip(names, values, strict=True)):
        document, position = divmod(turn, TURNS)
        ids = question_ids(source.tokenizer, question_text(key), "", value)
        tokens = len(source.encode(f" {value}")) + 1
        samples.append(
            Sample(
                f"{length}/{count}/turn {turn + 1}",
                texts[document],
                question=source.decode(ids),
                reference=value,
                fields={
                    "length": length, "turn": turn + 1, "document": document + 1,
                    "depth": TURN_DEPTHS[position],
                },
                payload=(
                    second if document and not position else [], Question(ids, [value], tokens)
                ),
            )
        )  # fmt: skip
    return Batch(torch.tensor([first]), samples)
