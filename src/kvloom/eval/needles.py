"""Needles: facts hidden in real text, and questions about them once the text has been read.

Decides how a fact and a question are encoded for any tokenizer. An answer is correct if its text,
decoded greedily, starts with the whole number. `kvloom.reference.tasks` decides the positions of
facts, and their words and sentences.
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
from ..workload.forward import forward

NEEDLES_PER_CONTEXT = 8  # with one question each
ASK = {
    "after": "after the context is compressed, so that no score depends on the question",
    "with": "at the end of the prompt, so that the question is part of what is compressed",
}


@dataclass(frozen=True)
class Question:
    """A question to append to a context: its ids, the answer, and the answer's number of ids."""

    ids: list[int]
    answer: str
    answer_tokens: int


@dataclass(frozen=True)
class Haystack:
    """One context with needles, and the questions about them, which are not part of the context."""

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

    text_ids: int64 [tokens], the text around the needles. first: special ids before each context.
    Raises `InputError` if a context is too short for its needles.
    """
    encode = tasks.Encoder(tokenizer, text_ids)
    encode.bos = first
    found: list[Haystack] = []
    for done in range(0, questions, NEEDLES_PER_CONTEXT):
        count = min(questions - done, NEEDLES_PER_CONTEXT)
        rng = np.random.default_rng([seed, context, len(found)])
        found.append(_haystack(encode, rng, context, count))
    return found


def count_correct(
    model: PreTrainedModel,
    tokenizer: Any,
    recipe: Recipe,
    haystack: Haystack,
    batch: int,
    ask: str = "after",
    prefilled: Cache | None = None,
) -> int:
    """Return how many questions greedy decoding answers correctly, word for word.

    ask: a key of `ASK`. batch: questions answered together; none attends to another. prefilled: a
    cache of the recipe that has read the context already, for ask="after".

    With ask="after", a recipe with recall reads the question token by token: a step of several
    tokens would read the whole cache, and the index would not be tested.
    """
    context = haystack.context_ids
    if ask == "after" and prefilled is None:
        prefilled = Cache(model, recipe)
        forward(model, torch.tensor([context], device=model.device), prefilled)
    correct = 0
    by_length = sorted(haystack.questions, key=lambda q: len(q.ids))
    for _, same in groupby(by_length, key=lambda q: len(q.ids)):
        group = list(same)
        for at in range(0, len(group), batch):
            together = group[at : at + batch]
            if prefilled is None:
                cache, ids = Cache(model, recipe), [context + q.ids for q in together]
            else:
                cache, ids = copy.deepcopy(prefilled), [q.ids for q in together]
                if len(together) > 1:
                    cache.batch_repeat_interleave(len(together))
            if prefilled is not None and recipe.recall is not None:
                for column in torch.tensor(ids, device=model.device).split(1, dim=1)[:-1]:
                    forward(model, column, cache)
                ids = [row[-1:] for row in ids]
            correct += _answer(model, tokenizer, cache, ids, together)
    return correct


def _answer(
    model: PreTrainedModel,
    tokenizer: Any,
    cache: Cache,
    ids: list[list[int]],
    questions: list[Question],
) -> int:
    """Decode greedily after each row of ids; return how many questions are answered correctly.

    Ends as soon as every answer is right or wrong, whatever follows.
    """
    new = torch.tensor(ids, device=model.device)
    found, texts = [], [""] * len(questions)
    for _ in range(max(q.answer_tokens for q in questions)):
        new = forward(model, new, cache).argmax(-1, keepdim=True)  # [questions, 1]
        found.append(new)
        decoded = tokenizer.batch_decode(torch.cat(found, dim=1))
        texts = [text.lstrip() for text in decoded]
        if not any(_undecided(text, q.answer) for text, q in zip(texts, questions, strict=True)):
            break
    return sum(text.startswith(q.answer) for text, q in zip(texts, questions, strict=True))


def _undecided(text: str, answer: str) -> bool:
    """Return whether more tokens decide if the text starts with the answer."""
    unfinished = text.endswith("\N{REPLACEMENT CHARACTER}")  # a character of several tokens
    return unfinished or (answer.startswith(text) and text != answer)


def _haystack(
    encode: tasks.Encoder, rng: np.random.Generator, context: int, count: int
) -> Haystack:
    needles = [_needle(encode.tokenizer, key, _number(rng)) for key in encode.keys(rng, count)]
    try:
        ids, _ = tasks.hide(encode, rng, [fact for fact, _ in needles], context, rng.random(count))
    except ValueError as error:
        raise InputError(
            f"a context of {context} tokens is too short for {count} needles; "
            "use a longer --context, or --questions 0"
        ) from error
    return Haystack(ids, [question for _, question in needles])


def _number(rng: np.random.Generator) -> str:
    low = 10 ** (tasks.ANSWER_DIGITS - 1)
    return str(rng.integers(low, 10 * low))


def _needle(tokenizer: Any, key: str, number: str) -> tuple[tasks.Fact, Question]:
    """Return the fact that states a number, and the question about it, encoded by a tokenizer.

    The question ends where the ids of continuations with two different numbers start to differ, so
    that the answer's first id may include the space before it, as in the text.
    """

    def ids(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False)

    sentence = f"The magic number for {key} is "
    whole = ids(f"\nQuestion: {sentence}{number}")
    other = ids(f"\nQuestion: {sentence}{'98'[number[0] == '9']}{number[1:]}")
    cut = next(i for i, (a, b) in enumerate(zip(whole, other, strict=False)) if a != b)
    fact = tasks.Fact(ids(f"\n{sentence}{number}.\n"), 0, whole[cut:], whole[:cut], key)
    return fact, Question(whole[:cut], number, len(whole) - cut)
