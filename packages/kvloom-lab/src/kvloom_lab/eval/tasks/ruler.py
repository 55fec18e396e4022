"""RULER (arXiv:2404.06654): the eleven tasks that can be generated offline.

Parts: niah_single_1 to 3, niah_multikey_1 to 3, niah_multivalue, niah_multiquery, vt (variable
tracking), cwe (common words) and fwe (frequent words). Templates, first words of the answers,
numbers of generated tokens and the metric (share of the expected strings in the answer) are the
official ones. The two question-answering tasks need data sets and are left out.

What differs from the official generator: the essays are not shipped, so that the haystack is the
evaluation's text, from a word drawn at random; its sentences end at a full stop, question or
exclamation mark, or after `SENTENCE` words. Instead of the lists of the package wonderwords, keys
are two words of `eval.needle_text.WORDS`, and cwe counts words of the text. The model reads the
question after the context is compressed, or, with ask="inside", as in the official code. A context
has at most the tokens of --context, and one more unit of its haystack would not fit. The worked
examples of vt and cwe are in the same user message as the question.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from kvloom.errors import InputError

from ..needle_text import WORDS, draw_number
from ..sample import Batch, Question, Source
from .questions import QuestionTask, chat_parts, prompt, question_batch

NIAH = (
    "Some special magic {kind} are hidden within the following text. Make sure to memorize it. I "
    "will quiz you about the {kind} afterwards.\n{context}\nWhat are all the special magic {kind} "
    "for {query} mentioned in the provided text?"
)
NIAH_PREFIX = " The special magic {kind} for {query} mentioned in the provided text are"
NEEDLE = "One of the special magic {kind} for {key} is: {value}."
VT = (
    "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n"
    "{context}\nQuestion: Find all variables that are assigned the value {query} in the text above."
)
VT_PREFIX = (
    " Answer: According to the chain(s) of variable assignment in the text above, 5 variables are "
    "assigned the value {query}, they are: "
)
CWE = (
    "Below is a numbered list of words. In these words, some appear more often than others. "
    "Memorize the ones that appear most often.\n{context}\nQuestion: What are the 10 most common "
    "words in the above list?"
)
CWE_PREFIX = " Answer: The top 10 words that appear most often in the list are:"
FWE = (
    "Read the following coded text and track the frequency of each coded word. Find the three most "
    "frequently appeared coded words. {context}\nQuestion: Do not provide any explanation. Please "
    "ignore the dots '....'. What are the three most frequently appeared words in the above coded "
    "text?"
)
FWE_PREFIX = (
    " Answer: According to the coded text above, the three most frequently appeared words are:"
)
NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
DEPTHS = np.linspace(0, 100, 40).round().astype(int)  # percent of the sentences before a needle
SENTENCE = 40  # most words of a sentence
HOPS = 4
EXAMPLE_TOKENS = 500  # most tokens of vt's worked example
LARGE = 4096  # tokens: shorter contexts have fewer repetitions in cwe
COMMON = 10
ALPHA = 2.0  # exponent of fwe's frequencies
CODED = 6  # letters of a coded word


class RulerPrompt(NamedTuple):
    """A prompt up to the question, the question, the answer's first words, and what is expected."""

    text: str
    question: str
    prefix: str
    expected: list[str]


@dataclass(frozen=True)
class PromptInputs:
    """What prompts are made from: words of the text in order, its different words, the length."""

    source: Source
    words: list[str]
    vocabulary: list[str]
    length: int


Make = Callable[[np.random.Generator, int, PromptInputs], RulerPrompt]
"""Returns a prompt with a number of units in its haystack."""


@dataclass(frozen=True)
class RulerPart:
    """A task of RULER: how prompts are made, the fewest units, and tokens to generate."""

    make: Make
    least: int
    tokens: int


def _batch(inputs: PromptInputs, name: str, number: int) -> Batch:
    """Return the sample with the largest haystack that fits."""
    source, length, part = inputs.source, inputs.length, PARTS[name]
    chat = chat_parts(source.tokenizer, source.first)
    seed = [source.seed, length, list(PARTS).index(name), number]

    def encoded(units: int) -> tuple[RulerPrompt, list[int], list[int] | None]:
        """Return a prompt, its question and what is compressed; None if that is too long."""
        task_text = part.make(np.random.default_rng(seed), units, inputs)
        tail = source.encode(task_text.question + chat.after + task_text.prefix)
        parts, text = prompt(source, chat.before, tail), source.encode(task_text.text)
        ids = parts.context(text) if len(text) <= parts.room(length) else None
        return task_text, parts.question, ids

    units = largest_fitting(lambda units: encoded(units)[2] is not None, part.least)
    task_text, question_ids, ids = encoded(units)
    if ids is None:
        raise InputError(
            f"ruler: a context of {length} tokens is too short for {name}; use a longer --context"
        )
    question = Question(question_ids, task_text.expected, part.tokens)
    sample = f"{name}/{length}/{number}"
    return question_batch(source, sample, ids, question, length, variant=name)


def largest_fitting(fits: Callable[[int], bool], least: int) -> int:
    """Return the largest number that fits, or `least`.

    What is larger than a number that does not fit must not fit either.
    """
    low, high = least, 2 * least
    while fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


@dataclass(frozen=True)
class NeedleSettings:
    """The settings of a needle task: of the haystack, the keys and values, and their numbers."""

    haystack: str  # noise, essay or needle
    keys: str = "words"
    values: str = "numbers"
    num_keys: int = 1
    num_values: int = 1
    num_queries: int = 1


def _another(rng: np.random.Generator, kind: str, drawn: list[str]) -> str:
    """Return a random key that is not in `drawn`, so that one sentence has the asked key."""
    key = draw(rng, kind)
    while key in drawn:
        key = draw(rng, kind)
    return key


def niah(
    settings: NeedleSettings, rng: np.random.Generator, units: int, inputs: PromptInputs
) -> RulerPrompt:
    """Return a prompt with needles; a unit is a word of an essay, or a sentence."""
    names: list[str] = []
    for _ in range(settings.num_keys):
        names.append(_another(rng, settings.keys, names))
    values = [[draw(rng, settings.values) for _ in range(settings.num_values)] for _ in names]
    needles = [
        NEEDLE.format(kind=settings.values, key=name, value=value)
        for name, each in zip(names, values, strict=True)
        for value in each
    ]
    rng.shuffle(needles)
    queried = rng.choice(len(names), settings.num_queries, replace=False)
    if settings.haystack == "essay":
        context = hidden_in_essay(rng, needles, units, inputs.words)
    else:
        places = np.sort(rng.permutation(units)[: len(needles)])[::-1]
        sentences = [
            NOISE
            if settings.haystack == "noise"
            else NEEDLE.format(
                kind=settings.values,
                key=_another(rng, settings.keys, names),
                value=draw(rng, settings.values),
            )
            for _ in range(units)
        ]
        for place, needle in zip(places, needles, strict=True):
            sentences.insert(int(place), needle)
        context = "\n".join(sentences)
    queries = [names[i] for i in queried]
    query = queries[0] if len(queries) == 1 else f"{', '.join(queries[:-1])}, and {queries[-1]}"
    template, prefix, kind = NIAH, NIAH_PREFIX, settings.values
    if settings.num_queries * settings.num_values == 1:
        template, prefix, kind = singular(template), singular(prefix), kind[:-1]
    text, question = template.split("{context}")
    return RulerPrompt(
        text.format(kind=kind) + context,
        question.format(kind=kind, query=query),
        prefix.format(kind=kind, query=query),
        [value for i in queried for value in values[i]],
    )


def singular(template: str) -> str:
    """Return a template of needles for a single one."""
    return template.replace("Some", "A").replace("are all", "is").replace("are", "is")


def draw(rng: np.random.Generator, kind: str) -> str:
    """Return a random key or value: one of words, numbers or uuids."""
    if kind == "numbers":
        return draw_number(rng)
    if kind == "uuids":
        return str(uuid.UUID(bytes=rng.bytes(16), version=4))
    return "-".join(WORDS[i] for i in rng.choice(len(WORDS), 2, replace=False))


def hidden_in_essay(
    rng: np.random.Generator, needles: Sequence[str], units: int, words: Sequence[str]
) -> str:
    """Return `units` words with needles between their sentences; a short text is repeated."""
    start = int(rng.integers(len(words)))
    sentences: list[list[str]] = [[]]
    for i in range(units):
        last = sentences[-1]
        if last and (last[-1].endswith((".", "!", "?")) or len(last) == SENTENCE):
            sentences.append([])
        sentences[-1].append(words[(start + i) % len(words)])
    depths = np.sort(rng.choice(DEPTHS, len(needles), replace=False))
    ends = [0, *(int(len(sentences) * depth / 100) for depth in depths), len(sentences)]
    parts = []
    for i, end in enumerate(ends[1:]):
        parts.append(" ".join(" ".join(sentence) for sentence in sentences[ends[i] : end]))
        parts += needles[i : i + 1]
    return " ".join(parts)


def vt(rng: np.random.Generator, units: int, inputs: PromptInputs) -> RulerPrompt:
    """Return a prompt with a chain of variables, after a worked example; units are sentences."""

    def example(units: int) -> str:
        return with_answer(tracked(np.random.default_rng(seed), units, 3)) + "\n"

    seed = int(rng.integers(2**32))
    most = largest_fitting(
        lambda n: len(inputs.source.encode(example(n))) <= EXAMPLE_TOKENS, HOPS + 1
    )
    task = tracked(rng, units, 5)
    return task._replace(text=f"{example(most)}\n{task.text}")


def tracked(rng: np.random.Generator, units: int, letters: int) -> RulerPrompt:
    """Return a prompt with one chain of variables, whose names have a number of letters."""
    names: list[str] = []
    while len(names) <= HOPS:
        name = letters_of(rng, letters).upper()
        names += [] if name in names else [name]
    value = str(rng.integers(10_000, 99_999))
    chain = [f"VAR {names[0]} = {value}"]
    chain += [f"VAR {new} = VAR {old} " for old, new in pairwise(names)]
    lines = [NOISE] * units
    for i, place in enumerate(np.sort(rng.permutation(units)[: len(chain)])):
        lines.insert(int(place) + i, chain[i])
    text, question = VT.split("{context}")
    context = "\n".join(lines)
    return RulerPrompt(
        text + context, question.format(query=value), VT_PREFIX.format(query=value), names
    )


def with_answer(prompt: RulerPrompt) -> str:
    """Return a prompt with its answer."""
    return f"{prompt.text}{prompt.question}{prompt.prefix} {' '.join(prompt.expected)}"


def cwe(rng: np.random.Generator, units: int, inputs: PromptInputs) -> RulerPrompt:
    """Return a list of words after a worked example; units are the different words."""
    large = inputs.length >= LARGE
    shape, repeats = ((40, 10, 3), (30, 3)) if large else ((20, 3, 1), (6, 1))
    example = counted(rng, *shape, inputs.vocabulary)
    answer = [f"{i}. {word}" for i, word in enumerate(example.expected, start=1)]
    task = counted(rng, units, *repeats, inputs.vocabulary)
    solved = with_answer(example._replace(expected=answer))
    return task._replace(text=f"{solved}\n{task.text}")


def counted(
    rng: np.random.Generator, units: int, common: int, uncommon: int, vocabulary: Sequence[str]
) -> RulerPrompt:
    """Return a list in which the first ten of `units` words occur more often than the others."""
    if len(vocabulary) < units:
        vocabulary = [*vocabulary, *(f"{a}-{b}" for a in WORDS for b in WORDS)]
    words = [vocabulary[i] for i in rng.choice(len(vocabulary), units, replace=False)]
    listed = words[:COMMON] * common + words[COMMON:] * uncommon
    rng.shuffle(listed)
    text, question = CWE.split("{context}")
    context = " ".join(f"{i}. {word}" for i, word in enumerate(listed, start=1))
    return RulerPrompt(text + context, question, CWE_PREFIX, words[:COMMON])


def fwe(rng: np.random.Generator, units: int, inputs: PromptInputs) -> RulerPrompt:
    """Return coded words with the frequencies of a zeta distribution; the first is noise."""
    size = max(COMMON, inputs.length // 50)
    coded: dict[str, None] = {}
    while len(coded) < size:
        coded[letters_of(rng, CODED)] = None
    names = ["...", *list(coded)[1:]]
    counts = (units * np.arange(1, size + 1) ** -ALPHA / (np.pi**2 / 6)).astype(int)
    listed = [name for name, count in zip(names, counts, strict=True) for _ in range(count)]
    rng.shuffle(listed)
    text, question = FWE.split("{context}")
    return RulerPrompt(text + " ".join(listed), question, FWE_PREFIX, names[1:4])


def letters_of(rng: np.random.Generator, count: int) -> str:
    """Return random lower-case letters."""
    return "".join(chr(ord("a") + i) for i in rng.integers(0, 26, count))


_SINGLE = NeedleSettings("essay")
_NIAH = {
    "niah_single_1": NeedleSettings("noise"),
    "niah_single_2": _SINGLE,
    "niah_single_3": replace(_SINGLE, values="uuids"),
    "niah_multikey_1": replace(_SINGLE, num_keys=4),
    "niah_multikey_2": NeedleSettings("needle"),
    "niah_multikey_3": NeedleSettings("needle", "uuids", "uuids"),
    "niah_multivalue": replace(_SINGLE, num_values=4),
    "niah_multiquery": replace(_SINGLE, num_keys=4, num_queries=4),
}
PARTS = {
    **{name: RulerPart(partial(niah, settings), 4, 128) for name, settings in _NIAH.items()},
    "vt": RulerPart(vt, HOPS + 1, 30),
    "cwe": RulerPart(cwe, COMMON + 1, 120),
    "fwe": RulerPart(fwe, 30, 50),
}


class Ruler(QuestionTask):
    """RULER's tasks, scored by the share of expected strings in the answer."""

    name = "ruler"
    about = (
        "Long generated texts with hidden facts, chains of variables and frequent words; a "
        "question asks for them."
    )
    variants = tuple(PARTS)
    variant_word = "part"

    def batches(self, source: Source) -> list[Batch]:
        """Return one context for each sample, of at most the lengths of the source."""
        words = source.text.split()
        vocabulary = sorted(set(re.findall(r"\b[a-z]{3,12}\b", source.text)))
        return [
            _batch(PromptInputs(source, words, vocabulary, length), name, number)
            for length in source.lengths
            for name in self.chosen
            for number in range(source.samples)
        ]
