"""A haystack: real text with facts at chosen depths, of an exact number of tokens.

A fact goes between two lines, or into a long line. Decides positions only.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvloom.errors import InputError

from ..sample import Source

NEAR = 64  # tokens: a line end further away than that is not used


def hide(
    source: Source,
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
    if room < 0 or len(source.text_ids) < room:
        raise InputError(
            f"a context of {tokens} tokens does not fit: its facts take {tokens - room} and the "
            f"text has {len(source.text_ids):,}; use another --context, or give more text"
        )
    start = int(rng.integers(0, len(source.text_ids) - room + 1))
    text = source.text_ids[start : start + room]
    ends = _line_ends(source, text)
    ids: list[int] = []
    done = 0
    for at, fact in sorted(zip(depths, facts, strict=True), key=lambda x: x[0]):
        wanted = round(at * room)
        to = int(np.searchsorted(ends, wanted))
        end = int(ends[to]) if to < len(ends) else room
        cut = max(done, end if end - wanted <= NEAR else wanted)
        ids += [*text[done:cut].tolist(), *fact]
        done = cut
    return [*ids, *text[done:].tolist()]


def _line_ends(source: Source, text: np.ndarray) -> np.ndarray:
    """Return the indices behind tokens that end a line, and 0."""
    unique, where = np.unique(text, return_inverse=True)
    ends = np.array([source.tokenizer.decode([i]).endswith("\n") for i in unique])
    return np.concatenate([[0], np.flatnonzero(ends[where]) + 1])
