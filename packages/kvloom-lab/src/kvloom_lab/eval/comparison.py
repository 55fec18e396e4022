"""`kvloom compare`: recipes on one model and one text, as one task of the evaluator.

The task has contexts with needles and, after them, rows of text whose continuation is decoded token
by token, so that every scored prediction reads the compressed cache. `prepare` makes the task for a
model.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from kvloom import Cache
from kvloom.errors import IncompatibleRecipe, InputError, NotFinite
from kvloom.hf import attachment_restored, read_tokens, supported_model
from kvloom.progress import Progress
from kvloom.recipe import Recipe

from ..models import max_positions
from ..workload.errors import check_least, logged_line
from ..workload.files import finite
from ..workload.machine import conditions
from ..workload.passes import ForwardRequest, Measurement
from ..workload.text import cut_rows
from .decoding import answers, equal_lengths, greedy
from .evaluate import Measured, measure_batch, with_full
from .needle_text import (
    draw_keys,
    draw_number,
    fact_text,
    hide_at_line_ends,
    line_ends,
    question_text,
    split_at_answer,
)
from .sample import Batch, Outcome, Question, Run, Sample, Source, Task, check_ask

DEFAULT_CONTEXT = 2048
MIN_NEW_TOKENS = 32  # fewer steps are too few to measure decoding speed
TIMED_STEPS = 24  # of decoding, with those that warm up
QUESTION_POSITIONS = 64  # positions after the context that a question and its answer may need
NEEDLES_PER_CONTEXT = 8  # with one question each


@dataclass(frozen=True)
class Settings:
    """How much to measure.

    Attributes:
        context: Tokens to prefill; None: 2048, or as many as the model has positions for.
        new_tokens: Tokens of the continuation, decoded one by one.
        batch: Rows of text, and questions asked together.
        questions: Number of needles, eight in one context.
        ask: Where a question stands, a word of `ASK`.
        seed: Of the parts of the text, the needles and their positions.
    """

    context: int | None = None
    new_tokens: int = 160
    batch: int = 4
    questions: int = 48
    ask: str = "after"
    seed: int = 0

    def __post_init__(self) -> None:
        check_least(1, context=self.context, batch=self.batch)
        check_least(0, questions=self.questions, seed=self.seed)
        check_least(MIN_NEW_TOKENS, new_tokens=self.new_tokens)
        check_ask(self.ask)


def positions_after(new_tokens: int) -> int:
    """Return the positions that a continuation, or a question, needs after the context."""
    return max(new_tokens + 1, QUESTION_POSITIONS)


@dataclass(frozen=True)
class Row:
    """The figures of one recipe; all None if `problem` has the reason.

    Attributes:
        recipe: Its name.
        bits_per_value: Bits in memory for each key or value read, with metadata, exact windows and
            spare room, in the layers that kvloom compresses; None without such layers.
        kv_bytes: Bytes of the cache's tensors in all layers, whole batch.
        times_smaller: `kv_bytes` of `full` over its own.
        prefill_s: Seconds for the contexts of the whole batch: the forward pass, which several
            recipes may share, and storing the contexts in this recipe's cache.
        decode_tokens_s: Tokens per second, all rows together, after a warm-up.
        perplexity: Of the continuation.
        agreement: Fraction of positions with the same greedy next token as `full`.
        needle: Fraction of questions answered correctly; None without questions.
        tokens_read: Tokens of a row that the last step read, the mean over layers of full
            attention; None for a recipe without recall, which reads its whole cache.
        moved_bytes: Bytes copied from a tier to the device in a step, whole batch; None without a
            tier, or if nothing was read from it.
        ready: Fraction of the selected tokens that were on the device already; None as
            `moved_bytes`.
        problem: Why there are no figures.
        failed: Whether the recipe started and raised an error; one that does not fit the model did
            not start.
    """

    recipe: str
    bits_per_value: float | None = None
    kv_bytes: int | None = None
    times_smaller: float | None = None
    prefill_s: float | None = None
    decode_tokens_s: float | None = None
    perplexity: float | None = None
    agreement: float | None = None
    needle: float | None = None
    tokens_read: float | None = None
    moved_bytes: float | None = None
    ready: float | None = None
    problem: str | None = None
    failed: bool = False


def to_data(rows: Sequence[Row], environment: dict[str, Any]) -> dict[str, Any]:
    """Return plain data; figures that are not finite are None."""
    return finite({"environment": environment, "rows": [asdict(row) for row in rows]})


# needles


class Haystack(NamedTuple):
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
    """Return contexts of exactly `context` ids with a total of `questions` questions.

    text_ids: int64 [tokens], the text around the needles. first: special ids before each context.
    Raises `InputError` if a context is too short for its needles.
    """
    ends = line_ends(tokenizer, text_ids)
    contexts: list[Haystack] = []
    for done in range(0, questions, NEEDLES_PER_CONTEXT):
        count = min(questions - done, NEEDLES_PER_CONTEXT)
        rng = np.random.default_rng([seed, context, len(contexts)])
        needles = [(key, draw_number(rng)) for key in draw_keys(rng, count)]
        facts = [
            tokenizer.encode(fact_text(*needle), add_special_tokens=False) for needle in needles
        ]
        try:
            depths = rng.random(count)
            ids, _ = hide_at_line_ends(text_ids, ends, rng, facts, depths, context - len(first))
        except ValueError as error:
            raise InputError(
                f"a context of {context} tokens is too short for {count} needles; "
                "use a longer --context, or --questions 0"
            ) from error
        haystack_questions = [question_about(tokenizer, *needle) for needle in needles]
        contexts.append(Haystack([*first, *ids], haystack_questions))
    return contexts


def question_about(tokenizer: Any, key: str, number: str) -> Question:
    """Return the question about a number that a fact states."""
    ids, answer = split_at_answer(tokenizer, question_text(key), number)
    return Question(ids, [number], len(answer))


def correct_after(
    model: PreTrainedModel, tokenizer: Any, cache: Cache, questions: Sequence[Question], batch: int
) -> Measurement[int]:
    """Return how many questions about the context of a cache greedy decoding answers correctly.

    batch: questions answered together; none attends to another.
    """
    ids, tokens = [q.ids for q in questions], [q.tokens for q in questions]
    generated = yield from answers(model, cache, ids, tokens, batch)
    return _correct(tokenizer, generated, questions)


def correct_inside(
    model: PreTrainedModel, tokenizer: Any, recipe: Recipe, haystack: Haystack, batch: int
) -> Measurement[int]:
    """Return how many questions at the end of the prompt greedy decoding answers correctly.

    batch: prompts, each with one question, that share a cache of the recipe.
    """
    questions = haystack.questions
    generated = [[0]] * len(questions)
    for numbers in equal_lengths([len(q.ids) for q in questions], batch):
        cache = Cache(model, recipe)
        prompts = torch.tensor([haystack.context_ids + questions[i].ids for i in numbers])
        logits = read_tokens(model, prompts.to(model.device), cache)
        rows = yield from greedy(cache, logits, max(questions[i].tokens for i in numbers))
        for i, row in zip(numbers, rows.tolist(), strict=True):
            generated[i] = row
    return _correct(tokenizer, generated, questions)


def _correct(tokenizer: Any, generated: list[list[int]], questions: Sequence[Question]) -> int:
    """Return how many answers begin with the expected string, word for word."""
    texts = [text.lstrip() for text in tokenizer.batch_decode(generated)]
    return sum(text.startswith(q.expected[0]) for text, q in zip(texts, questions, strict=True))


# the task


@dataclass(frozen=True)
class ComparisonTask(Task[Tensor]):
    """What a recipe is measured on: a task of the evaluator.

    text: int64 [B, context + new_tokens + 1], real text. haystacks: contexts with questions.
    """

    source: Source
    text: Tensor
    haystacks: list[Haystack]

    name = "compare"

    @property
    def context(self) -> int:
        """Tokens of a context."""
        return self.source.lengths[0]

    @property
    def new_tokens(self) -> int:
        """Tokens of the continuation, decoded one by one after the context."""
        return self.source.new_tokens

    @property
    def questions(self) -> int:
        """Questions in all haystacks."""
        return sum(len(h.questions) for h in self.haystacks)

    @property
    def units(self) -> int:
        """Units of progress of one recipe: one per prompt, token and question."""
        return len(self.batches()) + self.new_tokens + self.questions

    def batches(self, source: Source | None = None) -> list[Batch]:
        """Return the prompts that caches hold before anything is decoded.

        The rows of text come last: only they are timed, and the prompts before them warm up. These
        are the haystacks or, if questions are part of prompts, one row of text.
        """
        text = self.text[:, : self.context]
        if self.source.ask == "after" and self.haystacks:
            before = [
                Batch(torch.tensor([haystack.context_ids]), [Sample(str(i), "", payload=haystack)])
                for i, haystack in enumerate(self.haystacks)
            ]
        else:
            before = [Batch(text[:1], [Sample("0", "")])]
        timed = self.text[:, self.context : self.context + min(TIMED_STEPS, self.new_tokens)]
        return [*before, Batch(text, [Sample("text", "")], timed)]

    def measure(self, run: Run[Tensor]) -> Measurement[tuple[list[Outcome], Tensor]]:
        """Answer the questions about a haystack, or decode the continuation of the text.

        The second result is the greedy next tokens [B, new_tokens], which agreement is computed
        from.
        """
        run.count("reading contexts", 1)
        if run.batch.timed is not None:
            return (yield from self._measure_text(run))
        haystack, correct = run.batch.samples[0].payload, 0
        if haystack is not None:  # else the context is read only to warm up
            correct = yield from correct_after(
                run.model, run.source.tokenizer, run.cache, haystack.questions, len(self.text)
            )
            run.count("answering needle questions", len(haystack.questions))
        return [Outcome({"correct": correct})], torch.empty(0)

    def _measure_text(self, run: Run[Tensor]) -> Measurement[tuple[list[Outcome], Tensor]]:
        text = self.text.to(run.model.device)
        losses, greedy = [], []
        for i in range(self.context, self.context + self.new_tokens):
            logits = yield ForwardRequest(text[:, i : i + 1], run.cache)  # [B, V]
            losses.append(F.cross_entropy(logits.float(), text[:, i + 1], reduction="none"))
            greedy.append(logits.argmax(-1))
            run.count("decoding", 1)
        tokens = torch.stack(greedy, dim=1).cpu()
        nats = torch.stack(losses).mean().item()
        if math.isnan(nats):
            raise NotFinite("the model predicts NaN; use another dtype")
        scores = {
            "perplexity": math.exp(nats) if nats < 700 else math.inf,
            "agreement": (tokens == (tokens if run.baseline is None else run.baseline))
            .float()
            .mean()
            .item(),
            "correct": 0,
        }
        if self.source.ask == "inside":
            for haystack in self.haystacks:
                scores["correct"] += yield from correct_inside(
                    run.model, run.source.tokenizer, run.cache.recipe, haystack, len(text)
                )
                run.count("answering needle questions", len(haystack.questions))
        return [Outcome(scores)], tokens


def prepare(
    model: PreTrainedModel | PreTrainedConfig,
    tokenizer: Any,
    text: str,
    settings: Settings | None = None,
) -> ComparisonTask:
    """Return the task that these settings define for a text.

    Args:
        model: The model or its config, which limits the context.
        tokenizer: The model's.
        text: Longer than the context and its continuation.
        settings: How much to measure.

    Raises:
        InputError: The text is too short or the context too long.
    """
    settings = settings or Settings()
    available, after = max_positions(model), positions_after(settings.new_tokens)
    longest = DEFAULT_CONTEXT if available is None else max(1, available - after)
    context = settings.context or min(DEFAULT_CONTEXT, longest)
    if available is not None and context + after > available:
        raise InputError(
            f"context={context} and the {after} tokens after it need {context + after} positions "
            f"and the model has {available}; use a context of {longest} or less"
        )
    batch, new_tokens, seed = settings.batch, settings.new_tokens, settings.seed
    source = Source.of(
        tokenizer, text, lengths=[context], samples=batch, new_tokens=new_tokens, batch=batch,
        seed=seed, ask=settings.ask,
    )  # fmt: skip
    ids, first = source.text_ids, source.first
    rows = cut_rows(ids, first, batch, context + new_tokens + 1, seed)
    needles = haystacks(
        tokenizer, ids, first, context=context, questions=settings.questions, seed=seed
    )
    return ComparisonTask(source, rows, needles)


def environment(
    model: PreTrainedModel, name: str, task: ComparisonTask, seed: int, text: str = ""
) -> dict[str, Any]:
    """Return versions, hardware and sizes as plain data. name: of the model; text: its name."""
    return conditions(
        model, name, text, context=task.context, new_tokens=task.new_tokens, batch=len(task.text),
        questions=task.questions, ask=task.source.ask, seed=seed,
    )  # fmt: skip


# rows


def compare(
    model: PreTrainedModel,
    recipes: Sequence[Recipe | str | Path],
    task: ComparisonTask,
    progress: Progress | None = None,
) -> list[Row]:
    """Measure recipes on a task; the model is left as it was.

    Args:
        model: The model, loaded.
        recipes: Recipes, their names or their files.
        task: As `prepare` returns it.
        progress: Called with `task.units` units for each recipe of `with_full(recipes)`.

    Returns:
        One row for each recipe, that of `full` always first.
    """
    return list(iter_rows(model, recipes, task, progress))


def iter_rows(
    model: PreTrainedModel,
    recipes: Sequence[Recipe | str | Path],
    task: ComparisonTask,
    progress: Progress | None = None,
) -> Iterator[Row]:
    """Yield the rows that `compare` returns, in order, as soon as they are measured.

    A recipe that does not fit the model, or raises an error, gets a row with the reason, and is
    left out of later batches; the traceback of a defect is logged.
    """
    supported_model(model)
    resolved, batches = with_full(recipes), task.batches()
    on_step, left = progress or (lambda what, units: None), dict.fromkeys(resolved, task.units)
    results: dict[Recipe, list[Measured[Tensor]]] = {recipe: [] for recipe in resolved}
    failed: dict[Recipe, Exception] = {}

    def count(recipe: Recipe, what: str, units: int) -> None:
        left[recipe] -= units
        on_step(f"{recipe.name}: {what}", units)

    def row(recipe: Recipe) -> Row:
        if recipe not in failed:
            return _row(recipe, results[recipe], results[resolved[0]][-1], task)
        count(recipe, "no figures", left[recipe])
        error = failed[recipe]
        if isinstance(error, IncompatibleRecipe):
            return Row(recipe.name, problem="; ".join(error.problems))
        return Row(recipe.name, problem=logged_line(error, f"recipe {recipe.name!r}"), failed=True)

    pending = list(resolved)
    with attachment_restored(model):
        for batch in batches:
            working = [recipe for recipe in resolved if recipe not in failed]
            for recipe, measured in measure_batch(model, task.source, task, batch, working, count):
                if isinstance(measured, Exception):
                    failed[recipe] = measured
                else:
                    results[recipe].append(measured)
                while pending and (
                    pending[0] in failed or len(results[pending[0]]) == len(batches)
                ):
                    yield row(pending.pop(0))


def _row(
    recipe: Recipe, results: list[Measured[Tensor]], full: Measured[Tensor], task: ComparisonTask
) -> Row:
    """Return the row of a recipe. results: on each batch, the text last; full: that of `full`."""
    text = results[-1]
    assert text.decode_s is not None
    correct = sum(measured.outcomes[0].scores["correct"] for measured in results)
    selected = text.traffic.hits + text.traffic.misses
    return Row(
        recipe=recipe.name,
        bits_per_value=text.bits_per_value,
        kv_bytes=text.kv_bytes,
        times_smaller=full.kv_bytes / text.kv_bytes,
        prefill_s=text.prefill_s,
        decode_tokens_s=len(task.text) / text.decode_s,
        perplexity=text.outcomes[0].scores["perplexity"],
        agreement=text.outcomes[0].scores["agreement"],
        needle=correct / task.questions if task.questions else None,
        tokens_read=text.tokens_read,
        moved_bytes=text.traffic.nbytes / task.new_tokens if selected else None,
        ready=text.traffic.hits / selected if selected else None,
    )
