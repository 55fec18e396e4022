"""What claims are tested with: a model, a text, and measurements that are made once.

Quality is measured by the tasks of `kvloom eval`: every recipe reads the same contexts.
"""

from __future__ import annotations

import math
import tempfile
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor
from transformers import PreTrainedModel

from kvloom.errors import InputError
from kvloom.hf import geometry
from kvloom.progress import Progress
from kvloom.recipe import Geometry, Recipe, resolve

from ..eval.compare import QUESTION_POSITIONS
from ..eval.evaluate import evaluate, units, with_full
from ..eval.results import ResultFolder
from ..eval.sample import Source, Task
from ..eval.tasks.needles import Niah
from ..eval.tasks.text import Perplexity
from ..models import max_positions
from ..workload.text import cut_rows
from .recalling import hit_rate, recall_rates


class NotTestable(Exception):
    """Raised by a test whose result on this model would say nothing about the claim."""


@dataclass(frozen=True)
class Size:
    """How much is measured.

    context: tokens of a context. samples: texts of a perplexity. new_tokens: predicted after each.
    needles: samples of each needle task. long_context: tokens of a context that a step recalls
    from. steps: decode steps of a recall rate.
    """

    context: int
    samples: int
    new_tokens: int
    needles: int
    long_context: int
    steps: int


QUICK = Size(1024, 8, 64, 2, 4096, 8)
DEFAULT = Size(2048, 16, 128, 4, 8192, 16)


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


class Lab:
    """Measures recipes on one model and one text; repeated measurements come from the first.

    counter: takes a number of units of work, and returns the function that counts them.
    format_errors, attention: `measure` of `kvloom_lab.analyse.error` and of its `attention`.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: Any,
        text: str,
        *,
        size: Size = DEFAULT,
        is_reference: bool = False,
        seed: int = 0,
        format_errors: Callable[..., Any] | None = None,
        attention: Callable[..., Any] | None = None,
    ) -> None:
        self.model, self.tokenizer, self.text = model, tokenizer, text
        self.size, self.is_reference, self.seed = size, is_reference, seed
        self.format_errors, self.attention = format_errors, attention
        self.counter: Callable[[int], Progress] = lambda total: lambda what, units: None
        self._temporary = tempfile.TemporaryDirectory()
        self._source = Source.of(
            tokenizer, text, lengths=[size.context], samples=1, new_tokens=1, batch=8, seed=seed
        )
        self._folders: dict[str, ResultFolder] = {}
        self._measured: dict[str, Recipe] = {}
        self._recall: dict[int, dict[str, dict[int, float]]] = {}
        self._errors: dict[tuple[Recipe, ...], dict[str, dict[str, float]]] = {}

    def close(self) -> None:
        """Remove the measurements."""
        self._temporary.cleanup()

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
        lines_by_recipe = self._measure(
            Perplexity(), recipes, context, samples, min(samples, 8), self.size.new_tokens
        )
        scores = {
            name: {
                key: np.array([line["scores"][key] for line in lines])
                for key in ("nll", "kl_mean", "agreement")
            }
            for name, lines in lines_by_recipe.items()
        }
        shares = {
            name: lines[0]["kv_bytes"] / lines[0]["exact_bytes"]
            for name, lines in lines_by_recipe.items()
        }
        full = scores["full"]["nll"]
        return {
            name: Quality(
                by["nll"], by["kl_mean"], float(by["agreement"].mean()),
                shares[name], full,
            )
            for name, by in scores.items()
        }  # fmt: skip

    def needles(
        self, recipes: Sequence[Recipe | str], variant: str, context: int | None = None
    ) -> dict[str, np.ndarray]:
        """Return which questions were answered correctly, 0 or 1 [questions], by recipe name."""
        lines_by_recipe = self._measure(
            Niah([variant]), recipes, context or self.context, self.size.needles, 10, 1
        )
        return {
            name: np.array([line["scores"]["correct"] for line in lines])
            for name, lines in lines_by_recipe.items()
        }

    def errors(self, recipes: Sequence[Recipe]) -> dict[str, dict[str, float]]:
        """Return the relative errors of the recipes' formats, the mean over layers, by name."""
        if self.format_errors is None:
            raise NotTestable("the lab has no measurement of format errors")
        key = tuple(recipes)
        if key not in self._errors:
            self._errors[key] = self._mean_errors(recipes)
        return self._errors[key]

    def _mean_errors(self, recipes: Sequence[Recipe]) -> dict[str, dict[str, float]]:
        assert self.format_errors is not None
        errors_by_recipe = self.format_errors(self.model, self.texts(2, self.context), recipes)
        means: dict[str, dict[str, float]] = {}
        for name, layers in errors_by_recipe.items():
            by: dict[str, list[float]] = defaultdict(list)
            for errors in layers.values():
                for key, value in vars(errors).items():
                    by[key].append(value)
            means[name] = {key: sum(values) / len(values) for key, values in by.items()}
        return means

    def attention_layers(self) -> Sequence[Any]:
        """Return the attention figures of each layer, as `kvloom analyse attention` does."""
        if self.attention is None:
            raise NotTestable("the lab has no measurement of attention")
        ids = self.texts(1, self.context + 1)
        layers: Sequence[Any] = self.attention(self.model, ids, context=self.context)
        return layers

    def recall(self) -> dict[str, dict[int, float]]:
        """Return the recall rates after the long context, by index and budget in tokens."""
        context = self.long_context
        if context not in self._recall:
            ids = self.texts(1, context + self.size.steps)
            recalled = recall_rates(self.model, ids, context, self.counter(self.size.steps))
            self._recall[context] = {name: x.rates["each"] for name, x in recalled.items()}
        return self._recall[context]

    def hits(self, recipe: str) -> float:
        """Return the share of recalled tokens that earlier steps left on the device."""
        ids = self.texts(1, self.long_context + self.size.new_tokens)
        return hit_rate(self.model, recipe, ids, self.long_context)

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
        available, after = (
            max_positions(self.model),
            max(self.size.new_tokens + 1, QUESTION_POSITIONS),
        )
        return context if available is None else min(context, available - after)

    def _distinct(self, recipe: Recipe) -> Recipe:
        """Return the recipe under a name that no other recipe was measured with."""
        for number in count(1):
            name = recipe.name if number == 1 else f"{recipe.name} ({number})"
            renamed = replace(recipe, name=name)
            if self._measured.setdefault(name, renamed) == renamed:
                return renamed
        raise AssertionError

    def _measure(
        self,
        task: Task,
        recipes: Sequence[Recipe | str],
        context: int,
        samples: int,
        batch: int,
        new_tokens: int,
    ) -> dict[str, list[dict[str, Any]]]:
        """Return the finished lines of a task by recipe name, in the order of samples."""
        shown = with_full(recipes)
        chosen = [self._distinct(recipe) for recipe in shown]
        source = Source(
            self.tokenizer, self.text, self._source.text_ids, self._source.first,
            lengths=[context], samples=samples, new_tokens=new_tokens, batch=batch, seed=self.seed,
        )  # fmt: skip
        plan = [(task, task.batches(source))]
        variants = "+".join(getattr(task, "variants", ()))
        folder = self._folder(f"{task.name} {variants} {context} {samples} {new_tokens}")
        progress = self.counter(units(plan, chosen))
        evaluate(self.model, source, chosen, plan, folder, progress)
        order = [sample.name for _, batches in plan for b in batches for sample in b.samples]
        lines = {(line["recipe"], line["sample"]): line for line in folder.lines(task.name)}
        problems = [
            x for x in lines.values() if "problem" in x and x["recipe"] in {r.name for r in chosen}
        ]
        if problems:
            raise InputError(f"{problems[0]['recipe']}: {problems[0]['problem']}")
        return {
            asked.name: [lines[r.name, name] for name in order]
            for asked, r in zip(shown, chosen, strict=True)
        }

    def _folder(self, name: str) -> ResultFolder:
        if name not in self._folders:
            path = Path(self._temporary.name) / str(len(self._folders))
            self._folders[name] = ResultFolder.open(
                path, {"environment": {}, "model": {}, "settings": {}}
            )
        return self._folders[name]


def named(spec: str, name: str) -> Recipe:
    """Return a recipe under another name."""
    return replace(resolve(spec), name=name)
