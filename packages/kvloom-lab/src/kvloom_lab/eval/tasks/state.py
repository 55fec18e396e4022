"""State that changes step by step: assignments that stand between the lines of a real text.

An `update` assigns one variable repeatedly, and the last number counts. A `chain` gives a
variable a number, and each further one the value of the one before it, plus or minus a number. A
`recursion` gives a function its first value and the step from one to the next. Questions ask for
the value after 1, 2, 4 and 8 steps. Variables that are copied without arithmetic are `ruler:vt`,
whose statements these follow.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from kvloom.errors import InputError

from ..needle_text import draw_keys, hide_near_depths
from ..sample import Batch, Question, Sample, Source
from .questions import QuestionTask, chat_parts, prompt, question_batch

STEPS = (1, 2, 4, 8)
ANSWER_TOKENS = 8
INTRO = (
    "Memorize and track the chain of variable assignments hidden in the following text. For "
    "example, with VAR x = 2 and VAR y = x + 3, the value of y is 5.\n\n"
)


class Puzzle(NamedTuple):
    """Statements in the order of the text, what the question asks for, and its value."""

    statements: list[str]
    asked: str
    value: int


def chain(rng: np.random.Generator, steps: int) -> Puzzle:
    """Return a variable for each of `steps` updates, from 1 to 9; values stay above 0."""
    names, value = draw_keys(rng, steps + 1), int(rng.integers(1, 10))
    statements = [f"VAR {names[0]} = {value}"]
    for old, new in pairwise(names):
        change = int(rng.integers(1, 10))
        sign = "-" if change < value and rng.random() < 0.5 else "+"
        value += change if sign == "+" else -change
        statements.append(f"VAR {new} = {old} {sign} {change}")
    return Puzzle(statements, names[-1], value)


def recursion(rng: np.random.Generator, steps: int) -> Puzzle:
    """Return a function; the question asks for its value after `steps` calls."""
    (name,), (first, change) = draw_keys(rng, 1), rng.integers(1, 10, 2).tolist()
    statements = [f"VAR {name}(0) = {first}", f"VAR {name}(n) = {name}(n - 1) + {change}"]
    return Puzzle(statements, f"{name}({steps})", first + steps * change)


def update(rng: np.random.Generator, steps: int) -> Puzzle:
    """Return one variable that is assigned `steps` times more; the last value counts."""
    (name,), values = draw_keys(rng, 1), rng.choice(np.arange(10, 100), steps + 1, replace=False)
    return Puzzle([f"VAR {name} = {value}" for value in values], name, int(values[-1]))


MAKERS: dict[str, Callable[[np.random.Generator, int], Puzzle]] = {
    "update": update,
    "chain": chain,
    "recursion": recursion,
}


class State(QuestionTask):
    """Whether the first number of the answer is the value, by steps that lead to it."""

    name = "state"
    about = (
        "Assignments in a long text change a value step by step; a question asks for the last one."
    )
    variants = tuple(MAKERS)

    def batches(self, source: Source) -> list[Batch]:
        """Return contexts of exactly the lengths of the source, one for each number of steps."""
        return [
            _batch(source, length, variant, steps, number)
            for length in source.lengths
            for variant in self.chosen
            for steps in STEPS
            for number in range(source.samples)
        ]

    def score(self, text: str, sample: Sample) -> dict[str, float]:
        """Score the first number of an answer: over all steps, and of these steps."""
        numbers = re.findall(r"-?\d+", text)
        correct = float(numbers[:1] == sample.payload.expected)
        return {"correct": correct, f"correct_{sample.fields['steps']}": correct}


def _batch(source: Source, length: int, variant: str, steps: int, number: int) -> Batch:
    """Return one context of exactly `length` ids and its question."""
    rng = np.random.default_rng([source.seed, length, list(MAKERS).index(variant), steps, number])
    content = MAKERS[variant](rng, steps)
    chat = chat_parts(source.tokenizer, source.first)
    question = f"\nQuestion: What is the value of {content.asked} in the text above?"
    answer = f" Answer: The value of {content.asked} is"
    parts = prompt(
        source,
        [*chat.before, *source.encode(INTRO)],
        source.encode(f"{question}{chat.after}{answer}"),
    )
    facts = [source.encode(f"\n{statement}.\n") for statement in content.statements]
    room = parts.room(length)
    if room < sum(map(len, facts)):
        raise InputError(
            f"state: a context of {length} tokens is too short for {variant} with {steps} steps; "
            "use a longer --context"
        )
    depths = np.sort(rng.random(len(facts))).tolist()
    ids = parts.context(
        hide_near_depths(source.tokenizer, source.text_ids, rng, facts, depths, room)
    )
    name = f"{variant}/{length}/{steps}/{number}"
    asked = Question(parts.question, [str(content.value)], ANSWER_TOKENS)
    return question_batch(source, name, ids, asked, length, variant=variant, steps=steps)
