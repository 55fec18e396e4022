"""Facts hidden in real text: the words, the positions, and the question about each.

A question ends where its answer starts, so that greedy generation continues with the answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

ANSWER_DIGITS = 7
_WORDS = """
amber anchor apple arrow autumn badge bamboo banjo barrel basket beacon beaver bishop blossom
bottle bridge bronze bucket butter cabin cactus camel candle canyon carpet castle cedar cherry
circle clover coffee comet copper coral cotton cradle crystal dagger daisy desert diamond dolphin
donkey dragon eagle ember engine falcon feather fiddle forest fossil fountain garden garlic ginger
glacier goblet granite guitar hammer harbor harvest hazel helmet hermit honey horizon island ivory
jacket jaguar jasmine jungle kettle kitten ladder lagoon lantern lemon leopard lizard lobster
magnet mango maple marble meadow melon mirror monkey mountain mustard napkin needle nutmeg ocean
olive onion orange orchid otter oyster paddle panther paper parrot pebble pencil pepper pigeon
pillow planet pocket pony potato prairie puzzle rabbit raven ribbon river rocket saddle saffron
salmon sandal satin scarlet shadow shelter silver sparrow spider spiral sponge spring statue
summer sunset teapot temple thistle thunder ticket tiger timber tomato tulip tunnel turtle valley
velvet violin volcano walnut willow window winter wizard yellow zebra
"""
WORDS = _WORDS.split()


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
        ends = [i for t, i in tokenizer.get_vocab().items() if t.startswith(("Ċ", "\n"))]
        self.line_ends = np.flatnonzero(np.isin(text_ids, ends))
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
        return [self.words[i] for i in rng.choice(len(self.words), count, replace=False)]

    def window(self, rng: np.random.Generator, tokens: int) -> tuple[np.ndarray, np.ndarray]:
        """Return a random piece of text [tokens], and the indices in it where a line ends."""
        start = int(rng.integers(0, max(1, len(self.text_ids) - tokens)))
        text = np.resize(self.text_ids[start : start + tokens], tokens)
        low, high = np.searchsorted(self.line_ends, [start, start + tokens])
        return text, self.line_ends[low:high] - start


def hide(
    encode: Encoder, rng: np.random.Generator, facts: list[Fact], tokens: int, depths: Any
) -> tuple[list[int], list[int]]:
    """Insert facts into real text so that BOS, text and facts are exactly `tokens` ids.

    depths: [facts], 0 to 1, how far into the text each fact goes; it is moved to the next end of a
    line. Returns the ids, and for each fact the index where its answer starts. Raises `ValueError`
    if the facts do not fit.
    """
    room = tokens - len(encode.bos) - sum(len(f.ids) for f in facts)
    if room < 0:
        need = tokens - room
        raise ValueError(
            f"context_tokens={tokens} is too few for {len(facts)} facts; use {need} or more"
        )
    text, breaks = encode.window(rng, room)
    inserts = np.asarray(np.asarray(depths) * room, dtype=np.int64)
    if len(breaks):
        inserts = breaks[np.minimum(np.searchsorted(breaks, inserts), len(breaks) - 1)]
    ids, answers, done = list(encode.bos), [0] * len(facts), 0
    for i in np.argsort(inserts, kind="stable"):
        ids += text[done : inserts[i]].tolist()
        done = int(inserts[i])
        answers[i] = len(ids) + facts[i].answer_from
        ids += facts[i].ids
    return ids + text[done:].tolist(), answers
