"""Training rows: real text, and dense recall tasks with a question about every fact.

A row is ids [T + 1] and the kind of each token [T + 1], which decides its weight in the loss: 0 not
predicted (the digits of a needle are random), 1 text, 2 an answer.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kvloom_lab.eval.needle_text import WORDS
from kvloom_lab.workload.text import train_documents

from .tasks import Encoder, Fact, copy_fact, needle_fact, pair_fact, variable_facts

NOTHING, TEXT, ANSWER = 0, 1, 2
# shares of the rows: short rows teach retrieval, long rows teach long distances
SHORT_MIX = {"needles": 0.32, "pairs": 0.32, "copy": 0.18, "variables": 0.05, "text": 0.13}
MIX = {"needles": 0.52, "pairs": 0.16, "copy": 0.06, "variables": 0.06, "text": 0.20}
SHORT_TOKENS = 256
PROSE_REPEATS = 3  # the help topics are the only prose

Row = tuple[np.ndarray, np.ndarray]


def training_encoder(tokenizer: Any) -> Encoder:
    """Return an encoder over the training text, with EOS between documents and more key words."""
    prose: list[str] = []
    code: list[str] = []
    for document in train_documents():
        (prose if document.name.startswith("topic/") else code).append(document.text)
    texts = prose * PROSE_REPEATS + code
    np.random.default_rng(0).shuffle(texts)
    encoded = tokenizer.backend_tokenizer.encode_batch_fast(texts, add_special_tokens=False)
    end = [tokenizer.eos_token_id]
    ids = np.concatenate([np.asarray(e.ids + end, dtype=np.int32) for e in encoded])
    return Encoder(tokenizer, ids, WORDS + vocabulary_words(tokenizer))


def vocabulary_words(tokenizer: Any) -> list[str]:
    """Return further words of at least four letters that are one token, sorted."""
    words = {
        token[1:]
        for token in tokenizer.get_vocab()
        if token[0] == "Ġ" and len(token) > 4 and token[1:].isascii() and token[1:].isalpha()
    }
    return sorted(words - set(WORDS))


def batch(encode: Encoder, rng: np.random.Generator, rows: int, length: int) -> Row:
    """Return ids and weights `[rows, length + 1]`, each row of a task drawn from a mix."""
    mix = SHORT_MIX if length <= SHORT_TOKENS else MIX
    kinds = rng.choice(list(mix), size=rows, p=list(mix.values()))
    made = [row(encode, rng, str(kind), length + 1) for kind in kinds]
    return np.stack([ids for ids, _ in made]), np.stack([weights for _, weights in made])


def row(encode: Encoder, rng: np.random.Generator, kind: str, tokens: int) -> Row:
    """Return one row of `tokens` ids."""
    if kind == "needles":
        count = _count(rng, low=2, high=max(2, tokens // 50), most=64)
        keys = encode.keys(rng, count)
        facts = [needle_fact(encode, key, encode.number(rng)) for key in keys]
        return _with_questions(encode, rng, facts, tokens, rng.random(count))
    if kind == "pairs":
        count = _count(rng, low=3, high=tokens // 26, most=96)
        keys = encode.keys(rng, count)
        facts = [pair_fact(encode, key, encode.number(rng)) for key in keys]
        return _with_questions(encode, rng, facts, tokens, np.full(count, rng.random()))
    if kind == "copy":
        fact = copy_fact(encode, rng, int(rng.integers(12, max(13, min(200, tokens // 3)))))
        return _with_questions(encode, rng, [fact], tokens, rng.random(1))
    if kind == "variables":
        chains, hops = _count(rng, low=2, high=tokens // 64, most=8), int(rng.integers(1, 4))
        hops = min(hops, max(1, tokens // (chains * 32)))
        facts = variable_facts(encode, rng, chains, hops)
        depths = np.sort(rng.random((chains, hops)), axis=1).T.ravel()
        return _with_questions(encode, rng, facts, tokens, depths, drawn=chains)
    ids, _begins = encode.hide(rng, [], tokens, [])
    return np.asarray(ids), np.full(tokens, TEXT)


def _count(rng: np.random.Generator, low: int, high: int, most: int) -> int:
    """Draw a count between `low` and `high`, log-uniformly."""
    high = max(low, min(high, most))
    return int(np.exp(rng.uniform(np.log(low), np.log(high + 1))))


def _with_questions(
    encode: Encoder,
    rng: np.random.Generator,
    facts: list[Fact],
    tokens: int,
    depths: Any,
    drawn: int | None = None,
) -> Row:
    """Hide facts in text, followed by questions about all of them in random order.

    The answers of the first `drawn` facts (default: all) are random, so the loss ignores them in
    the text.
    """
    order = rng.permutation(len(facts))
    questions = sum(len(f.question_ids) + len(f.answer_ids) for f in facts)
    ids, begins = encode.hide(rng, facts, tokens - questions, depths)
    weights = [TEXT] * len(ids)
    for fact, begin in list(zip(facts, begins, strict=True))[:drawn]:
        weights[begin : begin + len(fact.answer_ids)] = [NOTHING] * len(fact.answer_ids)
    for i in order:
        ids += facts[i].question_ids + facts[i].answer_ids
        weights += [NOTHING] * len(facts[i].question_ids) + [ANSWER] * len(facts[i].answer_ids)
    return np.asarray(ids), np.asarray(weights)
