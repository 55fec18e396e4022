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
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kvloom.errors import InputError

from ...workload.passes import ForwardRequest, Measurement
from ..decoding import greedy
from ..needles import draw_keys, draw_number, fact_text, hide_at, question_text, split_at_answer
from ..sample import Batch, Outcome, Run, Sample, Source
from .asking import Asked, Prompt, QuestionTask, frame, prompt, share_found

DEPTHS = tuple(np.linspace(0, 1, 10).round(3).tolist())
VARIANTS = ("single", "multikey", "multivalue", "multiquery", "passkey")
TURNS = 4  # questions about each of the two documents
TURN_DEPTHS = tuple(((np.arange(TURNS) + 0.5) / TURNS).tolist())


class Niah(QuestionTask):
    """Facts found, by length and depth."""

    def __init__(self, variants: Sequence[str] = ("single", "multikey", "passkey")) -> None:
        unknown = [name for name in variants if name not in VARIANTS]
        if unknown:
            raise InputError(f"niah has no variant {unknown[0]!r}; there are {', '.join(VARIANTS)}")
        self.name, self.variants = "niah", variants

    def batches(self, source: Source) -> list[Batch]:
        """Return contexts of exactly the lengths of the source."""
        return [
            batch
            for length in source.lengths
            for variant in self.variants
            for number in range(source.samples)
            for batch in _contexts(source, variant, length, number)
        ]


@dataclass(frozen=True)
class _Fact:
    text: str
    depth: float


def _contexts(source: Source, variant: str, length: int, number: int) -> Iterator[Batch]:
    """Yield contexts: one for each depth, or one with facts at all depths."""
    rng = np.random.default_rng([source.seed, length, VARIANTS.index(variant), number])
    if variant == "multikey":
        keys, values = draw_keys(rng, len(DEPTHS)), [draw_number(rng) for _ in DEPTHS]
        facts = [_Fact(fact_text(k, v), d) for k, v, d in zip(keys, values, DEPTHS, strict=True)]
        questions = [
            (question_text(k), [v], d) for k, v, d in zip(keys, values, DEPTHS, strict=True)
        ]
        yield _batch(source, rng, variant, length, number, "", facts, questions)
        return
    for depth in DEPTHS:
        intro, facts, question, expected = _one(rng, variant, depth)
        yield _batch(
            source, rng, variant, length, number, intro, facts, [(question, expected, depth)]
        )


def _one(
    rng: np.random.Generator, variant: str, depth: float
) -> tuple[str, list[_Fact], str, list[str]]:
    """Return the introduction, the facts, the question and the expected strings of one context."""
    if variant == "passkey":
        key = draw_number(rng)
        intro = (
            "There is an important info hidden inside a lot of irrelevant text. Find it and "
            "memorize them. I will quiz you about the important information there.\n"
        )
        text = f"\nThe pass key is {key}. Remember it. {key} is the pass key.\n"
        return intro, [_Fact(text, depth)], "\nWhat is the pass key? The pass key is", [key]
    keys = draw_keys(rng, 4)
    if variant == "single":
        value = draw_number(rng)
        fact = _Fact(fact_text(keys[0], value), depth)
        return "", [fact], question_text(keys[0]), [value]
    values = [draw_number(rng) for _ in range(4)]
    depths = [depth, *rng.random(3)]
    if variant == "multivalue":
        facts = [_Fact(fact_text(keys[0], v), d) for v, d in zip(values, depths, strict=True)]
        question = f"\nQuestion: The four magic numbers for {keys[0]} are"
    else:
        facts = [_Fact(fact_text(k, v), d) for k, v, d in zip(keys, values, depths, strict=True)]
        question = f"\nQuestion: The magic numbers for {', '.join(keys[:3])} and {keys[3]} are"
    return "", facts, question, values


def _batch(
    source: Source,
    rng: np.random.Generator,
    variant: str,
    length: int,
    number: int,
    intro: str,
    facts: Sequence[_Fact],
    questions: Sequence[tuple[str, list[str], float]],
) -> Batch:
    """Return one context of exactly `length` ids and the samples that ask about it."""
    tokenizer = source.tokenizer
    around = frame(tokenizer, source.first, chat=None if variant == "passkey" else False)
    before = [*around.before, *source.encode(intro)]
    if source.ask == "inside" and len(questions) > 1:
        raise InputError("niah: the variant multikey asks ten questions; use it with --ask after")
    prompts: list[Prompt] = []
    tails = []
    for text, expected, _ in questions:
        ids = question_ids(tokenizer, text, around.after, expected[0])
        prompts.append(prompt(source, before, ids))
        longest = max(len(source.encode(f" {value}")) for value in expected)
        tails.append(Asked(prompts[-1].question, expected, len(expected) * (longest + 3) + 2))
    texts, depths = [source.encode(f.text) for f in facts], [f.depth for f in facts]
    room = prompts[0].room(length)
    hay = hide_at(tokenizer, source.text_ids, rng, texts, depths, room)
    ids = prompts[0].context(hay)
    context = source.decode(ids)
    samples = [
        Sample(
            f"{variant}/{length}/{number}/{depth:g}",
            context,
            question=source.decode(asked.ids),
            reference=", ".join(asked.expected),
            fields={"length": length, "depth": depth, "variant": variant},
            data=asked,
        )
        for asked, (_, _, depth) in zip(tails, questions, strict=True)
    ]
    return Batch(torch.tensor([ids]), samples)


def question_ids(tokenizer: Any, text: str, after: str, answer: str) -> list[int]:
    """Return a question's ids; a chat template's turn goes between the question and its answer."""
    if after:
        asked, mark, prefix = text.partition("? ")
        text = asked + mark.strip() + after + prefix
    return split_at_answer(tokenizer, text, answer)[0]


class Multiturn:
    """Facts found, by turn and document."""

    name, data = "multiturn", ""

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
        device, outcomes = run.model.device, []
        last: list[int] = []
        for sample in run.batch.samples:
            document, asked = sample.data
            if document:
                yield ForwardRequest(torch.tensor([[*last, *document]], device=device), run.cache)
                last = []
            ids = torch.tensor([[*last, *asked.ids]], device=device)
            answer = (yield from greedy(run.cache, ids, asked.tokens))[0].tolist()
            last = answer[-1:]
            text = run.source.decode(answer)
            outcomes.append(
                Outcome(
                    scores={"correct": share_found(text, asked.expected)},
                    answer=text,
                    tokens=run.source.pieces(answer),
                )
            )
        return outcomes, None

    def positions(self, batch: Batch) -> int:
        """Return the positions of all turns and of the second document."""
        data = [sample.data for sample in batch.samples]
        return sum(len(document) + len(a.ids) + a.tokens for document, a in data) - 1


def _conversation(source: Source, length: int, count: int) -> Batch:
    """Return a context of exactly `length` ids, and the turns after it."""
    rng = np.random.default_rng([source.seed, length, count])
    names = draw_keys(rng, 2 * TURNS)
    values = [draw_number(rng) for _ in names]
    facts = [source.encode(fact_text(k, v)) for k, v in zip(names, values, strict=True)]
    first = hide_at(
        source.tokenizer,
        source.text_ids,
        rng,
        facts[:TURNS],
        TURN_DEPTHS,
        length - len(source.first),
    )
    second = hide_at(
        source.tokenizer, source.text_ids, rng, facts[TURNS:], TURN_DEPTHS, length // 2
    )
    texts = [source.decode([*source.first, *first]), source.decode(second)]
    samples = []
    for turn, (key, value) in enumerate(zip(names, values, strict=True)):
        part, place = divmod(turn, TURNS)
        ids = question_ids(source.tokenizer, question_text(key), "", value)
        tokens = len(source.encode(f" {value}")) + 1
        samples.append(
            Sample(
                f"{length}/{count}/turn {turn + 1}",
                texts[part],
                question=source.decode(ids),
                reference=value,
                fields={
                    "length": length, "turn": turn + 1, "document": part + 1,
                    "depth": TURN_DEPTHS[place],
                },
                data=(second if part and not place else [], Asked(ids, [value], tokens)),
            )
        )  # fmt: skip
    return Batch(torch.tensor([[*source.first, *first]]), samples)
