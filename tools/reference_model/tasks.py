"""Generated long-context tasks with exact answers, on which the reference model is evaluated.

Needles in real text, key-value lists, copying and variable tracking. A task is a context and
questions about it, as token ids, generated from a seed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

from kvloom_lab.eval.needle_text import (
    ANSWER_DIGITS,
    WORDS,
    draw_keys,
    hide_at_line_ends,
    line_ends,
    random_window,
)
from kvloom_lab.workload.text import held_out_documents


@dataclass(frozen=True)
class Fact:
    """Ids to insert into a context, where the answer starts in them, and the question about it."""

    ids: list[int]
    answer_from: int
    answer_ids: list[int]
    question_ids: list[int]
    key: str


class Encoder:
    """Encodes pieces of text (cached), draws words as keys, and draws the text around facts."""

    def __init__(self, tokenizer: Any, text_ids: np.ndarray, words: Sequence[str] = WORDS) -> None:
        self.tokenizer = tokenizer
        self.text_ids = text_ids  # [tokens]
        self.words = words
        self.bos = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
        self.line_ends = line_ends(tokenizer, text_ids)
        self._pieces: dict[str, list[int]] = {}

    def __call__(self, *pieces: str) -> list[int]:
        """Return the ids of the pieces, each encoded separately."""
        ids: list[int] = []
        for piece in pieces:
            if piece not in self._pieces:
                encoded = self.tokenizer.encode(piece, add_special_tokens=False)
                self._pieces[piece] = encoded
            ids += self._pieces[piece]
        return ids

    def number(self, rng: np.random.Generator) -> list[int]:
        """Return the ids of a random number with 7 digits, one token a digit."""
        return self(str(rng.integers(1, 10)), *map(str, rng.integers(0, 10, ANSWER_DIGITS - 1)))

    def keys(self, rng: np.random.Generator, count: int) -> list[str]:
        """Return `count` different words."""
        return draw_keys(rng, count, self.words)

    def window(self, rng: np.random.Generator, tokens: int) -> np.ndarray:
        """Return a random piece of text [tokens]."""
        return random_window(self.text_ids, self.line_ends, rng, tokens)[0]

    def hide(
        self, rng: np.random.Generator, facts: Sequence[Fact], tokens: int, depths: Any
    ) -> tuple[list[int], list[int]]:
        """Insert facts into real text so that BOS, text and facts are exactly `tokens` ids.

        depths: [facts], 0 to 1, how far into the text each fact goes. Returns the ids, and for each
        fact the index where its answer starts. Raises `ValueError` if the facts do not fit.
        """
        before, ids = len(self.bos), [fact.ids for fact in facts]
        context, starts = hide_at_line_ends(
            self.text_ids, self.line_ends, rng, ids, depths, tokens - before
        )
        answers = [before + x + fact.answer_from for x, fact in zip(starts, facts, strict=True)]
        return [*self.bos, *context], answers


@dataclass(frozen=True)
class Question:
    """A question to append to a context.

    answer_at: index of the answer's first id in the context. depth: the same as a fraction.
    """

    question_ids: list[int]
    answer_ids: list[int]
    key: str
    answer_at: int
    depth: float


@dataclass(frozen=True)
class ContextSet:
    """One context, which starts with BOS, and the questions about it."""

    context_ids: list[int]
    questions: list[Question]


@dataclass(frozen=True)
class Example:
    """One prompt, and the ids that greedy generation should return."""

    prompt_ids: list[int]
    answer_ids: list[int]
    key: str
    answer_at: int
    depth: float


@lru_cache(maxsize=4)
def held_out_encoder(tokenizer: Any) -> Encoder:
    """Return the encoder over held-out text that evaluation uses; cached for each tokenizer."""
    text = [tokenizer.encode(d.text, add_special_tokens=False) for d in held_out_documents()]
    return Encoder(tokenizer, np.concatenate([np.asarray(t, dtype=np.int64) for t in text]))


def needle_fact(encode: Encoder, key: str, number: list[int]) -> Fact:
    """Return the fact `The magic number for <key> is 1234567.` on a line of its own."""
    head = encode("\n", "The magic number for", f" {key}", " is ")
    question = encode("\n", "Question", ":", " The magic number for", f" {key}", " is ")
    return Fact(head + number + encode(".", "\n"), len(head), number, question, key)


def pair_fact(encode: Encoder, key: str, number: list[int]) -> Fact:
    """Return the fact `key <key> = 1234567`, one line of a list."""
    head = encode("key", f" {key}", " = ")
    return Fact(head + number + encode("\n"), len(head), number, encode("\n") + head, key)


def needle_set(
    tokenizer: Any,
    *,
    context_tokens: int,
    n_keys: int = 8,
    seed: int = 0,
    depth: float | None = None,
    encoder: Encoder | None = None,
) -> ContextSet:
    """Return a context of exactly `context_tokens` ids with `n_keys` needles, one question each.

    depth: 0 to 1, fixes the position of the first question's needle; the others are random.
    """
    encode = encoder or held_out_encoder(tokenizer)
    rng = np.random.default_rng([seed, n_keys, context_tokens])
    facts = [needle_fact(encode, key, encode.number(rng)) for key in encode.keys(rng, n_keys)]
    depths = rng.random(n_keys)
    if depth is not None:
        depths[0] = depth
    return _with_questions(encode, rng, facts, context_tokens, depths)


def needle(
    tokenizer: Any,
    *,
    context_tokens: int,
    n_keys: int = 4,
    seed: int = 0,
    depth: float | None = None,
    encoder: Encoder | None = None,
) -> Example:
    """Return one prompt of exactly `context_tokens` ids, the question included."""
    encode = encoder or held_out_encoder(tokenizer)
    question = len(needle_fact(encode, encode.words[0], []).question_ids)
    context = needle_set(
        tokenizer,
        context_tokens=context_tokens - question,
        n_keys=n_keys,
        seed=seed,
        depth=depth,
        encoder=encode,
    )
    return _first(context)


def key_value_set(
    tokenizer: Any,
    *,
    context_tokens: int,
    n_questions: int = 8,
    seed: int = 0,
    encoder: Encoder | None = None,
) -> ContextSet:
    """Return a context of `key <word> = <number>` lines, with questions about some of them."""
    encode = encoder or held_out_encoder(tokenizer)
    rng = np.random.default_rng([seed, n_questions, context_tokens, 1])
    each = len(pair_fact(encode, encode.words[0], encode.number(rng)).ids)
    count = min(len(encode.words), (context_tokens - len(encode.bos)) // each)
    facts = [pair_fact(encode, key, encode.number(rng)) for key in encode.keys(rng, count)]
    whole = _with_questions(encode, rng, facts, context_tokens, np.ones(count))
    chosen = rng.choice(count, min(n_questions, count), replace=False)
    return ContextSet(whole.context_ids, [whole.questions[i] for i in chosen])


def copy_set(
    tokenizer: Any,
    *,
    context_tokens: int,
    n_words: int = 32,
    seed: int = 0,
    encoder: Encoder | None = None,
) -> ContextSet:
    """Return a context with a line of random words; the question is to repeat the line."""
    encode = encoder or held_out_encoder(tokenizer)
    rng = np.random.default_rng([seed, n_words, context_tokens, 2])
    fact = copy_fact(encode, rng, n_words)
    return _with_questions(encode, rng, [fact], context_tokens, rng.random(1))


def copy_fact(encode: Encoder, rng: np.random.Generator, n_words: int) -> Fact:
    """Return the fact `List: <words>` on a line of its own; the question starts the line again."""
    words = encode(*(f" {encode.words[i]}" for i in rng.integers(0, len(encode.words), n_words)))
    head = encode("\n", "List", ":")
    return Fact(head + words + encode("\n"), len(head), words, head, "List")


def variable_set(
    tokenizer: Any,
    *,
    context_tokens: int,
    n_chains: int = 4,
    hops: int = 2,
    seed: int = 0,
    encoder: Encoder | None = None,
) -> ContextSet:
    """Return chains of assignments in real text; each question asks for a chain's last value."""
    encode = encoder or held_out_encoder(tokenizer)
    rng = np.random.default_rng([seed, n_chains, context_tokens, 3, hops])
    facts = variable_facts(encode, rng, n_chains, hops)
    depths = np.sort(rng.random((n_chains, hops)), axis=1).T.ravel()
    every = _with_questions(encode, rng, facts, context_tokens, depths)
    first_hop, last_hop = every.questions[:n_chains], every.questions[(hops - 1) * n_chains :]
    return ContextSet(
        every.context_ids,
        [
            replace(q, answer_at=first.answer_at, depth=first.depth)
            for q, first in zip(last_hop, first_hop, strict=True)
        ],
    )


def variable_facts(
    encode: Encoder, rng: np.random.Generator, n_chains: int, hops: int
) -> list[Fact]:
    """Return the facts `set <a> = 1234567`, `set <b> = <a>`, …: all first hops, then all second."""
    names = np.array(encode.keys(rng, n_chains * hops)).reshape(hops, n_chains)
    numbers = [encode.number(rng) for _ in range(n_chains)]
    facts = []
    for hop in range(hops):
        for chain, number in enumerate(numbers):
            head = encode("\n", "set", f" {names[hop, chain]}", " =")
            value = encode(" ") + number if hop == 0 else encode(f" {names[hop - 1, chain]}")
            question = encode("\n", "value of", f" {names[hop, chain]}", " = ")
            facts.append(
                Fact(
                    head + value + encode("\n"),
                    len(head) + 1,
                    number,
                    question,
                    str(names[hop, chain]),
                )
            )
    return facts


def _with_questions(
    encode: Encoder, rng: np.random.Generator, facts: list[Fact], tokens: int, depths: Any
) -> ContextSet:
    """Return a context with all facts inserted, and one question a fact."""
    ids, answers = encode.hide(rng, facts, tokens, depths)
    return ContextSet(
        ids,
        [
            Question(f.question_ids, f.answer_ids, f.key, at, at / max(1, tokens))
            for f, at in zip(facts, answers, strict=True)
        ],
    )


def _first(context: ContextSet) -> Example:
    q = context.questions[0]
    return Example(context.context_ids + q.question_ids, q.answer_ids, q.key, q.answer_at, q.depth)
