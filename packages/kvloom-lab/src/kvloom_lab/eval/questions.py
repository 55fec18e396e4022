"""Questions about a number that is hidden in a text.

Decides where a question ends and its answer begins, for any tokenizer.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..workload import facts as tasks


def draw_number(rng: np.random.Generator) -> str:
    """Return a random number with `ANSWER_DIGITS` digits."""
    low = 10 ** (tasks.ANSWER_DIGITS - 1)
    return str(rng.integers(low, 10 * low))


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
