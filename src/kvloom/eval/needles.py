"""Needles: facts hidden in real text, asked for when the text has been read.

Decides how a fact and a question are written for any tokenizer, and what counts as right: a
greedy answer whose text begins with the whole number. Where facts lie in the text is decided by
`kvloom.reference.tasks`, whose words and sentences these are.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from ..errors import InputError
from ..hf.cache import Cache
from ..recipe.spec import Recipe
from ..reference import tasks
from ..workload.step import step

IN_A_CONTEXT = 8  # needles hidden in one context, all asked for
ASK = {
    "after": "once the context is compressed, which knows nothing of the question",
    "with": "as the end of the prompt, which is compressed with the question in it",
}


@dataclass(frozen=True)
class Question:
    """A question to append to a context: its ids, the right answer, and how many ids that takes."""

    ids: list[int]
    answer: str
    answer_tokens: int


@dataclass(frozen=True)
class Haystack:
    """One context with needles in it, and the questions, which the context does not hold."""

    context_ids: list[int]
    questions: list[Question]


def haystacks(
    tokenizer: Any,
    text_ids: np.ndarray,
    first: list[int],
    *,
    context: int,
    questions: int,
    seed: int = 0,
) -> list[Haystack]:
    """Return contexts of exactly `context` ids with `questions` questions in all.

    text_ids: int64 [tokens], where the hay is cut from; first: special ids in front of each
    context. Raises `InputError` if a context cannot hold its needles.
    """
    encode = tasks.Encoder(tokenizer, text_ids)
    encode.bos = first
    made: list[Haystack] = []
    left = questions
    while left > 0:
        count = min(left, IN_A_CONTEXT)
        rng = np.random.default_rng([seed, context, len(made)])
        made.append(_haystack(encode, rng, context, count))
        left -= count
    return made


def count_right(
    model: PreTrainedModel,
    tokenizer: Any,
    recipe: Recipe,
    haystack: Haystack,
    batch: int,
    ask: str = "after",
    read: Cache | None = None,
) -> int:
    """Return how many questions are answered right, word for word, by greedy decoding.

    ask: a key of `ASK`. Up to `batch` questions are asked side by side, and none sees another. A
    recipe that recalls is given a question asked after token by token: a step of several tokens
    would read everything, and what is asked for would not have to be found. read: a cache of the
    recipe that has read the context already, for ask="after".
    """
    context = haystack.context_ids
    if ask == "after" and read is None:
        read = Cache(model, recipe)
        step(model, torch.tensor([context], device=model.device), read)
    right = 0
    by_length = sorted(haystack.questions, key=lambda q: len(q.ids))
    for _, same in groupby(by_length, key=lambda q: len(q.ids)):
        group = list(same)
        for at in range(0, len(group), batch):
            asked = group[at : at + batch]
            if read is None:
                cache, ids = Cache(model, recipe), [context + q.ids for q in asked]
            else:
                cache, ids = copy.deepcopy(read), [q.ids for q in asked]
                if len(asked) > 1:
                    cache.batch_repeat_interleave(len(asked))
            if read is not None and recipe.recall is not None:
                for one in torch.tensor(ids, device=model.device).split(1, dim=1)[:-1]:
                    step(model, one, cache)
                ids = [row[-1:] for row in ids]
            texts = _answers(model, tokenizer, cache, ids, max(q.answer_tokens for q in asked))
            right += sum(t.lstrip().startswith(q.answer) for t, q in zip(texts, asked, strict=True))
    return right


def _answers(
    model: PreTrainedModel, tokenizer: Any, cache: Cache, ids: list[list[int]], tokens: int
) -> list[str]:
    """What follows each row of ids, `tokens` tokens, greedily."""
    new = torch.tensor(ids, device=model.device)
    found = []
    for _ in range(tokens):
        new = step(model, new, cache).argmax(-1, keepdim=True)  # [questions, 1]
        found.append(new)
    return tokenizer.batch_decode(torch.cat(found, dim=1))


def _haystack(
    encode: tasks.Encoder, rng: np.random.Generator, context: int, count: int
) -> Haystack:
    made = [_fact(encode.tokenizer, key, _number(rng)) for key in encode.keys(rng, count)]
    try:
        ids, _ = tasks.hide(encode, rng, [fact for fact, _ in made], context, rng.random(count))
    except ValueError as error:
        raise InputError(
            f"a context of {context} tokens does not hold {count} needles; "
            "use a longer --context, or --questions 0"
        ) from error
    return Haystack(ids, [question for _, question in made])


def _number(rng: np.random.Generator) -> str:
    low = 10 ** (tasks.ANSWER_DIGITS - 1)
    return str(rng.integers(low, 10 * low))


def _fact(tokenizer: Any, key: str, number: str) -> tuple[tasks.Fact, Question]:
    """Return the sentence that says a number and the question for it, in a tokenizer's own words.

    The question ends where the ids of two continuations with different numbers part, so that the
    answer's first id may hold the space in front of it, as it does in the text.
    """

    def ids(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False)

    says = f"The magic number for {key} is "
    asked = ids(f"\nQuestion: {says}{number}")
    other = ids(f"\nQuestion: {says}{'98'[number[0] == '9']}{number[1:]}")
    cut = next(i for i, (a, b) in enumerate(zip(asked, other, strict=False)) if a != b)
    fact = tasks.Fact(ids(f"\n{says}{number}.\n"), 0, asked[cut:], asked[:cut], key)
    return fact, Question(asked[:cut], number, len(asked) - cut)
