"""Needles: facts hidden in real text, and questions about them once the text has been read.

Decides how a fact and a question are encoded for any tokenizer. An answer is correct if its text,
decoded greedily, starts with the whole number. `kvloom_lab.workload.facts` decides the positions of
facts, and their words and sentences.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvloom import Cache
from kvloom.errors import InputError
from kvloom.hf import read_tokens
from kvloom.recipe import Recipe

from ...workload import facts as tasks
from ...workload.crew import Ask, Work
from ..decoding import equal_lengths, read_question, repeated
from ..questions import draw_number, split_at_answer

NEEDLES_PER_CONTEXT = 8  # with one question each
ASK = {
    "after": "after the context is compressed, so that no score depends on the question",
    "inside": "at the end of the prompt, so that the question is part of what is compressed",
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
    contexts: list[Haystack] = []
    for done in range(0, questions, NEEDLES_PER_CONTEXT):
        count = min(questions - done, NEEDLES_PER_CONTEXT)
        rng = np.random.default_rng([seed, context, len(contexts)])
        contexts.append(_haystack(encode, rng, context, count))
    return contexts


def count_correct(
    model: PreTrainedModel,
    tokenizer: Any,
    recipe: Recipe,
    haystack: Haystack,
    batch: int,
    ask: str = "after",
    prefilled: Cache | None = None,
) -> Work[int]:
    """Return how many questions greedy decoding answers correctly, word for word.

    ask: a key of `ASK`. batch: questions answered together; none attends to another. prefilled: a
    cache of the recipe that has read the context already, for ask="after".
    """
    context = haystack.context_ids
    if ask == "after" and prefilled is None:
        prefilled = Cache(model, recipe)
        read_tokens(model, torch.tensor([context], device=model.device), prefilled)
    correct = 0
    for numbers in equal_lengths([len(q.ids) for q in haystack.questions], batch):
        together = [haystack.questions[i] for i in numbers]
        if prefilled is None:
            cache, ids = Cache(model, recipe), [context + q.ids for q in together]
        else:
            cache, ids = repeated(prefilled, len(together)), [q.ids for q in together]
        new = torch.tensor(ids, device=model.device)
        if prefilled is None:
            logits = read_tokens(model, new, cache)
        else:
            logits = yield from read_question(cache, new)
        correct += yield from _answer(tokenizer, cache, logits, together)
    return correct


def _answer(tokenizer: Any, cache: Cache, logits: Tensor, questions: list[Question]) -> Work[int]:
    """Decode greedily from the logits [B, V] of each question; return how many are right.

    Ends as soon as every answer is right or wrong, whatever follows.
    """
    generated, texts = [], [""] * len(questions)
    most = max(q.answer_tokens for q in questions)
    for left in reversed(range(most)):
        new = logits.argmax(-1, keepdim=True)  # [questions, 1]
        generated.append(new)
        decoded = tokenizer.batch_decode(torch.cat(generated, dim=1))
        texts = [text.lstrip() for text in decoded]
        undecided = any(_undecided(t, q.answer) for t, q in zip(texts, questions, strict=True))
        if not (left and undecided):
            break
        logits = yield Ask(new, cache)
    return sum(text.startswith(q.answer) for text, q in zip(texts, questions, strict=True))


def _undecided(text: str, answer: str) -> bool:
    """Return whether more tokens decide if the text starts with the answer."""
    unfinished = text.endswith("\N{REPLACEMENT CHARACTER}")  # a character of several tokens
    return unfinished or (answer.startswith(text) and text != answer)


def _haystack(
    encode: tasks.Encoder, rng: np.random.Generator, context: int, count: int
) -> Haystack:
    keys = encode.keys(rng, count)
    needles = [_needle(encode.tokenizer, key, draw_number(rng)) for key in keys]
    try:
        ids, _ = tasks.hide(encode, rng, [fact for fact, _ in needles], context, rng.random(count))
    except ValueError as error:
        raise InputError(
            f"a context of {context} tokens is too short for {count} needles; "
            "use a longer --context, or --questions 0"
        ) from error
    return Haystack(ids, [question for _, question in needles])


def _needle(tokenizer: Any, key: str, number: str) -> tuple[tasks.Fact, Question]:
    """Return the fact that states a number, and the question about it, encoded by a tokenizer."""
    sentence = f"The magic number for {key} is"
    question, answer = split_at_answer(tokenizer, f"\nQuestion: {sentence}", number)
    ids = tokenizer.encode(f"\n{sentence} {number}.\n", add_special_tokens=False)
    fact = tasks.Fact(ids, 0, answer, question, key)
    return fact, Question(question, number, len(answer))
