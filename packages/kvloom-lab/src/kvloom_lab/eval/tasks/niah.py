"""Needles in a haystack: a grid of context lengths and depths.

Every variant hides facts in real text and asks about them after the context is compressed, or, with
ask="inside", at the end of what is compressed. An answer counts by the share of expected strings in
it.

Variants: `single`, one fact per context; `multikey`, ten facts and a question about each;
`multivalue`, one key with four numbers; `multiquery`, four keys asked together; `passkey`, the
template of KIVI (arXiv:2402.02750, appendix B).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kvloom.errors import InputError

from ...workload.facts import WORDS
from ..questions import draw_number, split_at_answer
from ..sample import Batch, Sample, Source
from .asking import Asked, Prompt, QuestionTask, prompt
from .chat import encode, frame
from .haystack import hide

DEPTHS = tuple(np.linspace(0, 1, 10).round(3).tolist())
VARIANTS = ("single", "multikey", "multivalue", "multiquery", "passkey")


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
        facts = [_Fact(plain_fact(k, v), d) for k, v, d in zip(keys, values, DEPTHS, strict=True)]
        questions = [
            (f"\nQuestion: The magic number for {k} is", [v], d)
            for k, v, d in zip(keys, values, DEPTHS, strict=True)
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
        fact = _Fact(plain_fact(keys[0], value), depth)
        return "", [fact], f"\nQuestion: The magic number for {keys[0]} is", [value]
    values = [draw_number(rng) for _ in range(4)]
    depths = [depth, *rng.random(3)]
    if variant == "multivalue":
        facts = [_Fact(plain_fact(keys[0], v), d) for v, d in zip(values, depths, strict=True)]
        question = f"\nQuestion: The four magic numbers for {keys[0]} are"
    else:
        facts = [_Fact(plain_fact(k, v), d) for k, v, d in zip(keys, values, depths, strict=True)]
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
    before = [*around.before, *encode(tokenizer, intro)]
    if source.ask == "inside" and len(questions) > 1:
        raise InputError("niah: the variant multikey asks ten questions; use it with --ask after")
    prompts: list[Prompt] = []
    tails = []
    for text, expected, _ in questions:
        ids = question_ids(tokenizer, text, around.after, expected[0])
        prompts.append(prompt(source, before, ids))
        longest = max(len(encode(tokenizer, f" {value}")) for value in expected)
        tails.append(Asked(prompts[-1].question, expected, len(expected) * (longest + 3) + 2))
    hay = hide(
        source, rng, [encode(tokenizer, f.text) for f in facts], [f.depth for f in facts],
        prompts[0].room(length),
    )  # fmt: skip
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


def plain_fact(key: str, value: str) -> str:
    """Return the sentence that states a number, on a line of its own."""
    return f"\nThe magic number for {key} is {value}.\n"


def draw_keys(rng: np.random.Generator, count: int) -> list[str]:
    """Return `count` different words."""
    return [WORDS[i] for i in rng.choice(len(WORDS), count, replace=False)]
