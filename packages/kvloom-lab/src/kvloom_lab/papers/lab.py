"""What claims are tested with: a model, a text, and measurements that are made once.

Quality is measured by the tasks of `kvloom eval`: every recipe reads the same contexts.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvloom import Cache
from kvloom.calibrate import AttentionInputs, AttentionSample, ExactAttention, record
from kvloom.errors import CalibrationError, IncompatibleRecipe, InputError
from kvloom.hf import CALIBRATION_FILE, attachment_restored, geometry
from kvloom.progress import Progress
from kvloom.recipe import Geometry, Recipe, resolve

from ..analyse import attention, error
from ..bench import ModelShape
from ..bench.candidates import generate_candidates
from ..bench.timing import time_candidates
from ..eval.comparison import positions_after
from ..eval.evaluate import Measured, measure_batch, with_full
from ..eval.sample import Source, Task
from ..eval.tasks.needles import Niah
from ..eval.tasks.text import Perplexity
from ..models import max_positions, random_llama
from ..workload.errors import logged_line
from ..workload.text import cut_rows
from .recalling import Importance, hit_rate, importance, recall_rates


class NotTestable(Exception):
    """Raised by a test whose result on this model would not be evidence on the claim."""


@dataclass(frozen=True)
class Size:
    """How much is measured.

    context: tokens of a context. samples: texts of a perplexity. new_tokens: predicted after each.
    needles: samples of each needle task. long_context: tokens of a context that a step recalls
    from. steps: decode steps of a recall rate, and timed steps of a speed.
    """

    context: int
    samples: int
    new_tokens: int
    needles: int
    long_context: int
    steps: int


QUICK = Size(1024, 8, 64, 6, 4096, 8)
DEFAULT = Size(2048, 16, 128, 8, 8192, 16)


@dataclass(frozen=True)
class Quality:
    """One recipe after a context, sample by sample.

    nll: nats per token [samples]. kl: KL divergence from the exact cache in nats per token
    [samples]. agreement: share of positions with the same greedy token. bytes_share: bytes of the
    cache after the sample over those of an exact one. full_nll: of the exact cache [samples].
    """

    nll: np.ndarray
    kl: np.ndarray
    agreement: float
    bytes_share: float
    full_nll: np.ndarray

    @property
    def ratio(self) -> float:
        """Perplexity over that of the exact cache."""
        return math.exp(float(self.nll.mean() - self.full_nll.mean()))

    @property
    def perplexity(self) -> float:
        """Perplexity of all samples together."""
        return math.exp(float(self.nll.mean()))


class TimedStep(NamedTuple):
    """A decode step: its median time, and the bytes of weights, keys and values that it reads."""

    ms: float
    read_bytes: int


class Lab:
    """Measures recipes on one model and one text; repeated measurements come from the first.

    name: of the model: "reference" and "smollm2" have causes of their own in claims.
    progress: called with the current work, and with the finished units of one measurement.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: Any,
        text: str,
        *,
        size: Size = DEFAULT,
        name: str = "",
        seed: int = 0,
        progress: Progress = lambda what, units: None,
    ) -> None:
        self.model, self.tokenizer, self.text = model, tokenizer, text
        self.size, self.name, self.seed = size, name, seed
        self.progress = progress
        needed = size.samples * (self.context + size.new_tokens + 1)
        self._source = Source.of(
            tokenizer, text, lengths=[size.context], samples=1, new_tokens=1, batch=8, seed=seed
        )
        if len(self._source.text_ids) < needed:
            raise InputError(
                f"the text has {len(self._source.text_ids):,} tokens, and the claims read "
                f"{needed:,}; give more text, or --quick"
            )
        self._measured: dict[tuple[object, ...], dict[Recipe, list[Measured[Any]]]] = {}
        self._recall: dict[str, dict[int, float]] = {}
        self._attention: dict[int, list[list[attention.LayerAttention]]] = {}
        self._importance: dict[int, Importance] = {}
        self._errors: dict[tuple[tuple[Recipe, ...], bool], dict[str, error.LayerError]] = {}

    def check_calibration(self, recipes: Sequence[str]) -> None:
        """Raise `InputError` if the model's calibration lacks a format of the recipes."""
        with attachment_restored(self.model):
            for recipe in recipes:
                try:
                    Cache(self.model, recipe)
                except IncompatibleRecipe as error:
                    if isinstance(error.__cause__, CalibrationError):
                        raise InputError(
                            "the claims need a calibration of this model; write it beside its "
                            f"weights: kvloom calibrate {self.name or 'MODEL'} --out "
                            f'FOLDER/{CALIBRATION_FILE} --recipes "{",".join(recipes)}"'
                        ) from error

    @property
    def geometry(self) -> Geometry:
        """The shape of the model's cache."""
        return geometry(self.model)

    def quality(
        self,
        recipes: Sequence[Recipe | str],
        context: int | None = None,
        samples: int | None = None,
    ) -> dict[str, Quality]:
        """Return the quality of `full` and of the recipes, by name.

        context, samples: other than the lab's. Raises `InputError` for a recipe that has no
        figures.
        """
        context, samples = context or self.context, samples or self.size.samples
        measured_by_recipe = self._measure(
            Perplexity(), recipes, context, samples, min(samples, 8), self.size.new_tokens
        )
        return {
            name: Quality(
                nll=_scores(measured, "nll"),
                kl=_scores(measured, "kl_mean"),
                agreement=float(_scores(measured, "agreement").mean()),
                bytes_share=measured[0].kv_bytes / measured[0].exact_bytes,
                full_nll=_scores(measured_by_recipe["full"], "nll"),
            )
            for name, measured in measured_by_recipe.items()
        }

    def needles(
        self, recipes: Sequence[Recipe | str], variant: str, context: int | None = None
    ) -> dict[str, np.ndarray]:
        """Return the share of questions answered correctly [contexts], by recipe name."""
        measured_by_recipe = self._measure(
            Niah([variant]), recipes, context or self.context, self.size.needles, 10, 1
        )
        return {
            name: np.array([_scores([one], "correct").mean() for one in measured])
            for name, measured in measured_by_recipe.items()
        }

    def errors(
        self, recipes: Sequence[Recipe], elementwise: bool = False
    ) -> dict[str, error.LayerError]:
        """Return the relative errors of the recipes' formats, the mean over layers, by name."""
        key = tuple(recipes), elementwise
        if key not in self._errors:
            by_layer = error.measure(
                self.model, self.texts(2, self.context), recipes, elementwise=elementwise
            )
            self._errors[key] = {name: error.mean(errors) for name, errors in by_layer.items()}
        return self._errors[key]

    def attention_layers(self) -> list[attention.LayerAttention]:
        """Return the attention figures of each layer, as `kvloom analyse attention` does."""
        return self.attention_of_texts(1)[0]

    def attention_of_texts(self, texts: int) -> list[list[attention.LayerAttention]]:
        """Return these figures of several parts of the text."""
        if texts not in self._attention:
            self._attention[texts] = [
                attention.measure(self.model, ids[None], context=self.context)
                for ids in self.texts(texts, self.context + 1)
            ]
        return self._attention[texts]

    def recall(self) -> dict[str, dict[int, float]]:
        """Return the recall rates after the long context, by index and budget in tokens."""
        if not self._recall:
            ids = self.texts(1, self.long_context + self.size.steps)
            recalled = recall_rates(self.model, ids, self.long_context, self.progress)
            self._recall = {name: x.rates["each"] for name, x in recalled.items()}
        return self._recall

    def entropies(self, draws: int) -> dict[int, tuple[float, float]]:
        """Return the mean entropy of attention weights by layer: as they are, and with noise.

        With noise: of the mean weights over draws of Gumbel noise on the logits, on sampled rows of
        one context.
        """
        generator = torch.Generator().manual_seed(self.seed)
        by_layer: dict[int, tuple[float, float]] = {}

        def entropy(weights: Tensor) -> float:
            return torch.special.entr(weights).sum(dim=-1).mean().item()

        def add(layer: int, inputs: AttentionInputs) -> None:
            weights = ExactAttention(AttentionSample.of(inputs, 16)).weights
            logits, mean = weights.log(), torch.zeros_like(weights)
            for _ in range(draws):
                noise = -torch.empty_like(weights).exponential_(generator=generator).log()
                mean += (logits + noise).softmax(dim=-1) / draws
            by_layer[layer] = entropy(weights), entropy(mean)

        with attachment_restored(self.model):
            record(self.model, self.texts(1, self.context), add)
        return by_layer

    def importance(self, tokens: int) -> Importance:
        """Return where the `tokens` most important tokens are, over 64 steps as in the paper."""
        if tokens not in self._importance:
            ids = self.texts(1, self.long_context + self.size.new_tokens)
            self._importance[tokens] = importance(self.model, ids, self.long_context, tokens)
        return self._importance[tokens]

    def hits(self, recipe: str) -> float:
        """Return the share of recalled tokens that earlier steps left on the device."""
        ids = self.texts(1, self.long_context + self.size.new_tokens)
        return hit_rate(self.model, recipe, ids, self.long_context)

    def steps(
        self,
        shape: ModelShape,
        recipes: Sequence[str],
        context: int,
        baselines: Sequence[str] = (),
    ) -> dict[str, TimedStep]:
        """Return decode steps after a context, by recipe and by baseline of `bench generate`.

        The model has random weights, and caches are filled with random keys and values. Raises
        `InputError` for a recipe that has no time.
        """
        candidates = generate_candidates(
            random_llama(shape, context), shape, recipes, context, baselines
        )
        what = f"timing steps of {shape} after {context:,} tokens"
        time_candidates(
            candidates, self.size.steps, lambda name, _: self.progress(f"{what}: {name}", 0)
        )
        for candidate in candidates:
            if candidate.problem is not None:
                raise InputError(f"{candidate.name}: {candidate.problem}")
        return {x.name: TimedStep(statistics.median(x.ms), x.read_bytes() or 0) for x in candidates}

    @property
    def context(self) -> int:
        """Tokens of a context, as many as the model has positions for."""
        return self._fitting(self.size.context)

    @property
    def long_context(self) -> int:
        """Tokens of the long context, as many as the model has positions for."""
        return self._fitting(self.size.long_context)

    def texts(self, rows: int, tokens: int) -> Tensor:
        """Return rows of text, int64 [rows, tokens]."""
        return cut_rows(self._source.text_ids, self._source.first, rows, tokens, self.seed)

    def _fitting(self, context: int) -> int:
        available = max_positions(self.model)
        after = positions_after(self.size.new_tokens)
        return context if available is None else min(context, available - after)

    def _measure(
        self,
        task: Task,
        recipes: Sequence[Recipe | str],
        context: int,
        samples: int,
        batch: int,
        new_tokens: int,
    ) -> dict[str, list[Measured[Any]]]:
        """Return what recipes did on each batch of a task, by recipe name."""
        chosen = with_full(recipes)
        source = replace(
            self._source, lengths=[context], samples=samples, new_tokens=new_tokens, batch=batch
        )
        key = task.name, *task.chosen, context, samples, new_tokens
        finished = self._measured.setdefault(key, {})
        missing = [recipe for recipe in chosen if recipe not in finished]
        if missing:
            finished |= self._measure_missing(task, source, missing)
        return {recipe.name: finished[recipe] for recipe in chosen}

    def _measure_missing(
        self, task: Task, source: Source, recipes: Sequence[Recipe]
    ) -> dict[Recipe, list[Measured[Any]]]:
        """Measure recipes on all batches; raises `InputError` for one that has no figures."""
        found: dict[Recipe, list[Measured[Any]]] = {recipe: [] for recipe in recipes}
        with attachment_restored(self.model):
            for batch in task.batches(source):
                for recipe, measured in measure_batch(
                    self.model, source, task, batch, with_full(recipes),
                    lambda recipe, what, _: self.progress(f"{task.name}: {recipe.name}, {what}", 0),
                ):  # fmt: skip
                    if isinstance(measured, Exception):
                        problem = logged_line(measured, f"recipe {recipe.name!r}")
                        raise InputError(f"{recipe.name}: {problem}")
                    if recipe in found:  # not if `full` is measured for the others only
                        found[recipe].append(replace(measured, baseline=None))
        return found


def _scores(measured: Sequence[Measured[Any]], score: str) -> np.ndarray:
    """Return a score of each sample."""
    return np.array([outcome.scores[score] for one in measured for outcome in one.outcomes])


def named(spec: str, name: str) -> Recipe:
    """Return a recipe under another name."""
    return replace(resolve(spec), name=name)
