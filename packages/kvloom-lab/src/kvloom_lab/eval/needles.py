"""Facts hidden in real text, and the questions about them: the needles of every task and command.

Decides the words, the numbers, where facts go, and where a question ends and its answer begins, for
any tokenizer: greedy generation continues a question with its answer. The reference model was
trained on such facts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvloom.errors import InputError

ANSWER_DIGITS = 7
NEAR = 64  # tokens: `hide_at` does not use a line end further away than that
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
        return draw_keys(rng, count, self.words)

    def window(self, rng: np.random.Generator, tokens: int) -> tuple[np.ndarray, np.ndarray]:
        """Return a random piece of text [tokens], and the indices in it where a line ends."""
        start = int(rng.integers(0, max(1, len(self.text_ids) - tokens)))
        text = np.resize(self.text_ids[start : start + tokens], tokens)
        low, high = np.searchsorted(self.line_ends, [start, start + tokens])
        return text, self.line_ends[low:high] - start


def draw_keys(rng: np.random.Generator, count: int, words: Sequence[str] = WORDS) -> list[str]:
    """Return `count` different words."""
    return [words[i] for i in rng.choice(len(words), count, replace=False)]


def draw_number(rng: np.random.Generator) -> str:
    """Return a random number with `ANSWER_DIGITS` digits."""
    low = 10 ** (ANSWER_DIGITS - 1)
    return str(rng.integers(low, 10 * low))


def fact_text(key: str, value: str) -> str:
    """Return the sentence that states a number, on a line of its own."""
    return f"\nThe magic number for {key} is {value}.\n"


def question_text(key: str) -> str:
    """Return the question about a number, up to its answer."""
    return f"\nQuestion: The magic number for {key} is"


def split_at_answer(tokenizer: Any, text: str, answer: str) -> tuple[list[int], list[int]]:
    """Return the ids of a question's text, and those of its answer after a space.

    The question ends where the ids of two different answers start to differ, so that the space
    before an answer belongs to the question for some tokenizers, and to the answer for others.
    """
    different = f"{'98'[answer[0] == '9']}{answer[1:]}"
    whole, other = (
        tokenizer.encode(f"{text} {end}", add_special_tokens=False) for end in (answer, different)
    )
    cut = next(i for i, (a, b) in enumerate(zip(whole, other, strict=False)) if a != b)
    return whole[:cut], whole[cut:]


def hide(
    encode: Encoder, rng: np.random.Generator, facts: Sequence[Fact], tokens: int, depths: Any
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
    places = np.asarray(np.asarray(depths) * room, dtype=np.int64)
    if len(breaks):
        places = breaks[np.minimum(np.searchsorted(breaks, places), len(breaks) - 1)]
    ids, starts = _inserted(text, [fact.ids for fact in facts], places.tolist())
    before = len(encode.bos)
    answers = [before + x + fact.answer_from for x, fact in zip(starts, facts, strict=True)]
    return [*encode.bos, *ids], answers


def hide_at(
    tokenizer: Any,
    text_ids: np.ndarray,
    rng: np.random.Generator,
    facts: Sequence[list[int]],
    depths: Sequence[float],
    tokens: int,
) -> list[int]:
    """Return `tokens` ids of real text that contain the facts; the text starts at random.

    facts: ids of each. depths: 0 to 1, the share of the text before each fact, which is moved to
    the next line end if one is near. Raises `InputError` if the facts do not fit, or the text is
    too short.
    """
    room = tokens - sum(map(len, facts))
    if room < 0 or len(text_ids) < room:
        raise InputError(
            f"a context of {tokens} tokens does not fit: its facts take {tokens - room} and the "
            f"text has {len(text_ids):,}; use another --context, or give more text"
        )
    start = int(rng.integers(0, len(text_ids) - room + 1))
    text = text_ids[start : start + room]
    unique, where = np.unique(text, return_inverse=True)
    ends = np.array([tokenizer.decode([i]).endswith("\n") for i in unique])
    line_ends = np.concatenate([[0], np.flatnonzero(ends[where]) + 1])
    places = []
    for depth in depths:
        wanted = round(depth * room)
        after = line_ends[np.searchsorted(line_ends, wanted) :]
        end = int(after[0]) if len(after) else room
        places.append(end if end - wanted <= NEAR else wanted)
    order = sorted(range(len(facts)), key=depths.__getitem__)
    ordered = np.maximum.accumulate([places[i] for i in order]).tolist() if order else []
    return _inserted(text, [facts[i] for i in order], ordered)[0]


def _inserted(
    text: np.ndarray, facts: Sequence[list[int]], places: Sequence[int]
) -> tuple[list[int], list[int]]:
    """Insert ids at places in text [tokens]; return all ids, and where each fact starts."""
    ids: list[int] = []
    starts, done = [0] * len(facts), 0
    for i in np.argsort(places, kind="stable"):
        ids += text[done : places[i]].tolist()
        done = places[i]
        starts[i] = len(ids)
        ids += facts[i]
    return [*ids, *text[done:].tolist()], starts
