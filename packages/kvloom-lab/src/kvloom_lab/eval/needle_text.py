"""Facts hidden in real text, and the questions about them: the needles of every task and command.

This module draws the words and the numbers, inserts facts into a text, and divides the ids of a
question and its answer, for any tokenizer: greedy generation continues a question with its answer.
The reference model was trained on such facts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from kvloom.errors import InputError

ANSWER_DIGITS = 7
NEAR = 64  # tokens: `hide_near_depths` does not use a line end further away than that
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


def line_ends(tokenizer: Any, text_ids: np.ndarray) -> np.ndarray:
    """Return the indices of the tokens of a text that start with a line end."""
    ends = [i for t, i in tokenizer.get_vocab().items() if t.startswith(("Ċ", "\n"))]
    return np.flatnonzero(np.isin(text_ids, ends))


def random_window(
    text_ids: np.ndarray, ends: np.ndarray, rng: np.random.Generator, tokens: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return a random piece of text [tokens], and the indices in it where a line ends."""
    start = int(rng.integers(0, max(1, len(text_ids) - tokens)))
    text = np.resize(text_ids[start : start + tokens], tokens)
    low, high = np.searchsorted(ends, [start, start + tokens])
    return text, ends[low:high] - start


def hide_at_line_ends(
    text_ids: np.ndarray,
    ends: np.ndarray,
    rng: np.random.Generator,
    facts: Sequence[list[int]],
    depths: Any,
    tokens: int,
) -> tuple[list[int], list[int]]:
    """Insert facts into real text so that text and facts are exactly `tokens` ids.

    ends: of the lines of the text, as `line_ends` returns them. facts: ids of each. depths:
    [facts], 0 to 1, how far into the text each fact goes; it is moved to the next line end. Returns
    the ids, and the index at which each fact starts. Raises `ValueError` if the facts do not fit.
    """
    room = tokens - sum(map(len, facts))
    if room < 0:
        raise ValueError(
            f"{tokens} tokens are too few for {len(facts)} facts; use {tokens - room} or more"
        )
    text, breaks = random_window(text_ids, ends, rng, room)
    places = np.asarray(np.asarray(depths) * room, dtype=np.int64)
    if len(breaks):
        places = breaks[np.minimum(np.searchsorted(breaks, places), len(breaks) - 1)]
    return _inserted(text, facts, places.tolist())


def hide_near_depths(
    tokenizer: Any,
    text_ids: np.ndarray,
    rng: np.random.Generator,
    facts: Sequence[list[int]],
    depths: Sequence[float],
    tokens: int,
) -> list[int]:
    """Return `tokens` ids of real text that contain the facts; the text starts at random.

    Unlike `hide_at_line_ends`, it moves a fact only to a near line end, and does not repeat a short
    text; published figures of the tasks and of `kvloom compare` depend on these rules.

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
        target = round(depth * room)
        after = line_ends[np.searchsorted(line_ends, target) :]
        end = int(after[0]) if len(after) else room
        places.append(end if end - target <= NEAR else target)
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
