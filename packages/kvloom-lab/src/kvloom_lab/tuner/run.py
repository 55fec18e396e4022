"""Tune a recipe for a model: score its layers, solve, measure the best recipes, correct the costs.

Layers are scored in float32: in bfloat16, rounding alone hides what one layer's format costs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvloom import Cache
from kvloom.calibrate import LayerContext, ReadPrompt, can_repeat
from kvloom.hf import attachment_restored, geometry, identity, read_tokens, supported_model
from kvloom.progress import TotalProgress
from kvloom.recipe import Recipe, Tuned

from ..models import check_positions, states_nbytes
from ..workload.files import store_recipe
from ..workload.text import leading_ids, separate_rows, tokenize
from .candidates import (
    JOINT,
    OBSERVED,
    OTHERS,
    SCORED_GROUP,
    Choice,
    LayerSizes,
    RecipeShape,
    combined,
    evicting,
    recents,
    to_score,
    uniform,
)
from .problem import Bound, MeasuredRecipe, Problem, all_problems, repair
from .scores import Scores

HALVINGS = 4
"""A bound on quality is also sought by bounds on bytes: sums of scores may be far above whole
recipes' divergences, and heads compete best for a given number of bytes."""


@dataclass(frozen=True)
class Settings:
    """What is measured.

    The distributions that are compared with those of the exact cache are of text that follows the
    prompt, and of passages that repeat the prompt from places drawn at random. Text that continues
    a prompt needs few of its facts, so evicting tokens costs almost nothing there; a passage that
    repeats the prompt needs them all.

    Attributes:
        context: Tokens of a prompt, which are compressed.
        texts: How many prompts.
        tokens: Tokens that follow the prompt in the text.
        passages: How many passages.
        passage: Tokens of each.
        window: The newest tokens of a layer that stay exact.
        seed: Draws the places.
    """

    context: int = 2048
    texts: int = 3
    tokens: int = 64
    passages: int = 2
    passage: int = 32
    window: int = 16
    seed: int = 0

    @property
    def measured(self) -> int:
        """The tokens after a prompt."""
        return self.tokens + self.passages * self.passage


_HALF = torch.float16, torch.bfloat16


@contextmanager
def in_float32(model: PreTrainedModel) -> Iterator[None]:
    """Convert half-precision weights to float32 in this context, and restore them after it.

    Other weights, such as quantized ones, do not change.
    """
    tensors = [x for x in (*model.parameters(), *model.buffers()) if x.dtype in _HALF]
    half_tensors = [x.data for x in tensors]
    try:
        for tensor in tensors:
            tensor.data = tensor.data.float()
        yield
    finally:
        for tensor, data in zip(tensors, half_tensors, strict=True):
            tensor.data = data


FRONT = 24  # bounds at which the front is solved


@dataclass
class Tuning:
    """A tuned recipe, and what it was chosen from.

    Attributes:
        recipe: The result.
        choices: The choice of each layer, by the model's number.
        predicted: The cost of each layer in nats, by the model's number.
        front: (share of the exact bytes, predicted KL) of the best choices at many bounds.
        uniform: The name and the same of the recipes whose layers are all the same.
        scores: The folder of the scores.
    """

    recipe: Recipe
    choices: dict[int, Choice]
    predicted: dict[int, float]
    front: list[tuple[float, float]]
    uniform: list[tuple[str, float, float]]
    scores: Path

    @property
    def tuned(self) -> Tuned:
        """The provenance and figures of the recipe."""
        assert self.recipe.tuned is not None
        return self.recipe.tuned


def tune(
    model: PreTrainedModel,
    tokenizer: Any,
    text: str,
    *,
    share: float | None = None,
    kl: float | None = None,
    context: int | None = None,
    settings: Settings | None = None,
    folder: str | Path | None = None,
    progress: TotalProgress | None = None,
) -> Tuning:
    """Return the recipe whose layers lose least within a bound, with formats and budgets by layer.

    It is stored in kvloom's cache folder, where `kvloom_lab.auto` finds it. The model is left as it
    was.

    Args:
        model: The model, loaded.
        tokenizer: The model's.
        text: What the model is tuned on; it has room for `settings.texts` separate contexts.
        share: The bound: a share of the exact cache's bytes after the prompt. Give it or `kl`.
        kl: The bound: a mean divergence from the exact cache in nats.
        context: Tokens of the prompt; None: those of `settings`.
        settings: How layers are scored.
        folder: Where scores are written, and read by a second run; None: in kvloom's cache folder.
        progress: Called with finished units of work.

    Raises:
        InputError: Nothing meets the bound, or the text or the model's context is too short.
        UnsupportedModel: kvloom does not support the model.
    """
    settings = settings or Settings()
    if context is not None:
        settings = replace(settings, context=context)
    context = settings.context
    with attachment_restored(model), torch.inference_mode():
        supported_model(model, all_heads_for="tuning")
        sizes = LayerSizes(geometry(model), context, RecipeShape(settings.window))
        fixed = Recipe().sliding_nbytes(context, sizes.geometry) + states_nbytes(model)
        bound = Bound(share, kl, Recipe().nbytes(context, sizes.geometry) + fixed, fixed)
        repeating = uniform(Choice(kept=OTHERS[0]), sizes.shape)
        scored = to_score(sizes.geometry, can_repeat(model, context, repeating))
        bound.check(int(sizes.of(combined(scored)).min()) * sizes.geometry.layers)
        check_positions(model, context, settings.measured)
        ids = tokenize(tokenizer, text)
        tokens = context + settings.tokens
        rows = separate_rows(ids, leading_ids(tokenizer), settings.texts, tokens, settings.seed)
        weights = identity(model)["weights"]
        read = hashlib.sha256(ids.astype(np.int64).tobytes()).hexdigest()
        about = {"model": weights, "dtype": str(model.dtype), "text": read, **asdict(settings)}
        scores = Scores(scored, about, None if folder is None else Path(folder))
        prompts = _Prompts(model, rows.to(model.device), settings)
        with in_float32(model):
            best, first = _search(prompts, scores, sizes, bound, progress or (lambda *_: None))
        cache = Cache(model, best.recipe)
        read_tokens(model, prompts.rows[:1, :context], cache)
        tuned = Tuned(
            model=weights,
            text_sha256=read,
            bound=str(bound),
            context=context,
            texts=settings.texts,
            tokens=settings.measured,
            seed=settings.seed,
            predicted_kl=_rounded(best.predicted.sum()),
            kl=_rounded(best.mean),
            kl_p99=_rounded(best.kl.quantile(0.99).item()),
            predicted_nbytes=best.recipe.nbytes(context, sizes.geometry) + fixed,
            nbytes=cache.nbytes,
            share=_rounded(cache.nbytes / bound.exact_nbytes),
        )
        recipe = replace(best.recipe, tuned=tuned)
        store_recipe(recipe)
        layer_indices, predicted = sizes.geometry.layer_indices, best.predicted.sum(axis=1).tolist()
        return Tuning(
            recipe=recipe,
            choices=dict(zip(layer_indices, best.choices, strict=True)),
            predicted=dict(zip(layer_indices, predicted, strict=True)),
            front=_front(first, bound),
            uniform=_uniform(first, bound),
            scores=scores.folder,
        )


def _search(
    prompts: _Prompts, scores: Scores, sizes: LayerSizes, bound: Bound, on_step: TotalProgress
) -> tuple[MeasuredRecipe, Problem]:
    """Score the layers; return the best recipe that was measured, and the first problem."""
    score(prompts, scores, sizes.geometry.layer_indices, on_step)
    competes = scores.scored.others.kept == OTHERS[0]
    shares = {
        recent: joint_shares(prompts, sizes.shape._replace(recent=recent)) if competes else {}
        for recent in recents(sizes.context)
    }

    def measure(recipes: Sequence[Recipe]) -> Iterable[Tensor]:
        on_step(f"measuring {len(recipes)} recipes", len(scores.lines), len(scores.lines))
        return prompts.whole(recipes) if recipes else []

    def problems(nbytes: int | None) -> list[Problem]:
        return all_problems(scores, sizes, shares, nbytes)

    first = problems(bound.nbytes if bound.kl is None else None)
    best = repair(first, bound, measure)[0]
    fewest = int(first[0].nbytes.min(axis=1).sum())
    for _ in range(HALVINGS if bound.kl is not None else 0):  # of what may be saved
        share = bound.share_of(round((fewest * best.nbytes) ** 0.5))
        within = replace(bound, share=share, kl=None)
        found = filter(bound.satisfied_by, repair(problems(within.nbytes), within, measure))
        smaller = min(found, key=lambda x: x.nbytes, default=None)
        best, fewest = (best, within.nbytes) if smaller is None else (smaller, fewest)
    return best, first[0]


def score(
    prompts: _Prompts, scores: Scores, layer_indices: Sequence[int], on_step: TotalProgress
) -> None:
    """Add the scores that are missing, layer by layer."""
    shape = RecipeShape(prompts.settings.window, SCORED_GROUP)
    scored = scores.scored
    formats = [uniform(choice, shape) for choice in scored.formats]
    kept = [uniform(choice, shape) for choice in scored.kept]
    others = evicting(scored.others, shape)
    layers_of_texts = list(product(range(len(prompts.rows)), layer_indices))
    evicted: dict[int, LayerContext] = {}
    for done, (text, layer_index) in enumerate(layers_of_texts):
        if (text, layer_index) not in scores:
            on_step(f"scoring layer {layer_index} on text {text + 1}", done, len(layers_of_texts))
            prompt = prompts[text]
            if text not in evicted:
                evicted = {text: prompt.evicted(others)}
            layer_scores = {
                "formats": prompt.one_layer(layer_index, formats, prompt.exact),
                "kept": prompt.one_layer(layer_index, kept, evicted[text]),
            }
            scores.add(text, layer_index, layer_scores)


def joint_shares(prompts: _Prompts, shape: RecipeShape) -> dict[str, list[float]]:
    """Return what each layer keeps where the heads of all layers compete, by the names in `JOINT`.

    The mean over the texts, in ten thousandths of the prompt.
    """
    joint = shape._replace(layers="joint")
    recipes = [uniform(Choice(kept=name), joint) for name in JOINT]
    texts = range(len(prompts.rows))
    kept = np.mean([[prompts[text].kept(recipe) for recipe in recipes] for text in texts], axis=0)
    return dict(zip(JOINT, kept.round(4).tolist(), strict=True))


class _Prompts:
    """The prompts of rows int64 [texts, context + tokens]; those that were read stay in memory."""

    def __init__(self, model: PreTrainedModel, rows: Tensor, settings: Settings) -> None:
        self.model, self.rows, self.settings = model, rows, settings
        self.read: dict[int, ReadPrompt] = {}

    def __getitem__(self, text: int) -> ReadPrompt:
        if text not in self.read:
            s = self.settings
            ids, after = self.rows[text : text + 1].split([s.context, s.tokens], dim=1)
            begins = np.random.default_rng([s.seed, text]).integers(
                0, max(1, s.context - s.passage), s.passages
            )
            repeated = [ids[:, begin : begin + s.passage] for begin in begins]
            after = torch.cat([after, *repeated], dim=1)
            self.read[text] = ReadPrompt(self.model, ids, after, s.window, OBSERVED)
        return self.read[text]

    def whole(self, recipes: Sequence[Recipe]) -> Tensor:
        """Return the divergences of recipes over all texts, fp32 [recipes, texts * T]."""
        return torch.cat([self[text].whole(recipes) for text in range(len(self.rows))], dim=1)


def _front(problem: Problem, bound: Bound) -> list[tuple[float, float]]:
    knapsack = problem.knapsack()
    solved = knapsack.front(FRONT)
    return [(bound.share_of(knapsack.size(items)), knapsack.cost(items)) for items in solved]


def _uniform(problem: Problem, bound: Bound) -> list[tuple[str, float, float]]:
    costs, sizes = problem.parts.sum(axis=(0, 2)), problem.nbytes.sum(axis=0)
    rows = zip(map(str, problem.choices), sizes, costs, strict=True)
    return [(name, float(bound.share_of(size)), float(cost)) for name, size, cost in rows]


def _rounded(x: float) -> float:
    return float(f"{x:.4g}")
