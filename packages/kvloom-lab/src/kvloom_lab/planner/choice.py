"""`auto`: the best recipe of a model within its memory, or within a share of the cache's bytes.

The order is: the exact cache, then a recipe that was tuned for this model, then the recipe with the
best published figures. These are of SmolLM2-135M-Instruct in bfloat16 after 2,048 tokens:
benchmarks/results/*/evidence_smollm2-2k.json, with which a test compares them.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedModel

from kvloom.errors import InputError
from kvloom.hf import identity, supported_model
from kvloom.recipe import Recipe, resolve

from ..workload.files import stored_recipes
from .plan_recipes import PlanRow, plan
from .step import CHUNK
from .units import show_bytes


@dataclass(frozen=True)
class Evidence:
    """A recipe, its mean KL divergence from the exact cache in nats, and its share of needles."""

    recipe: str
    kl: float
    needles: float | None  # None: not published

    def __str__(self) -> str:
        found = "" if self.needles is None else f", and it finds {self.needles:.0%} of the needles"
        return (
            "on SmolLM2-135M-Instruct its mean KL divergence from the exact cache is "
            f"{self.kl:.2g} nats{found}"
        )


EVIDENCE = (
    Evidence("full", 0.0, 0.77),
    Evidence("near-lossless", 0.00409, 0.73),
    Evidence("small:fraction=0.666", 0.00775, None),  # "small at 0.2", a fifth of the bytes
    Evidence("small", 0.00993, 0.74),
    Evidence("tiny", 0.015, 0.71),
    Evidence("balanced", 0.0164, 0.7),
    Evidence("micro", 0.0305, 0.68),
)
"""In the order in which `auto` prefers them: from the smallest divergence to the largest."""


ENOUGH = 0.8
"""A tuned recipe with less than this share of the best other recipe's bytes is not taken."""


@dataclass(frozen=True)
class AutoChoice:
    """The recipe that `kvloom_lab.auto` chose, and why; printable.

    Attributes:
        recipe: To attach.
        context: Tokens.
        batch: Rows.
        nbytes: Bytes of the cache at this context and batch.
        share: Of the exact cache's bytes.
        why: The reason, in sentences.
    """

    recipe: Recipe
    context: int
    batch: int
    nbytes: int
    share: float
    why: str

    def __str__(self) -> str:
        return (
            f"{self.recipe.name}: {show_bytes(self.nbytes)} of KV cache after {self.context:,} "
            f"tokens, batch {self.batch} ({self.share:.0%} of the exact cache). {self.why}"
        )


def auto(
    model: PreTrainedModel,
    *,
    memory: int | None = None,
    share: float | None = None,
    context: int | None = None,
    batch: int = 1,
) -> AutoChoice:
    """Choose the best recipe for a model within a bound; attach its `recipe` to use it.

    The exact cache is chosen if it fits. Next comes the recommended recipe with the smallest
    published divergence that fits; a recipe that `kvloom tune` stored for these weights replaces it
    if it has at least 80% of its bytes. The model is left as it was.

    Args:
        model: The model, loaded.
        memory: Bytes for weights, cache and the activations of a prompt. Give it or `share`.
        share: Of the exact cache's bytes, such as 0.2.
        context: Tokens (default: 32,768, or the model's positions if they are fewer).
        batch: Rows.

    Raises:
        InputError: Nothing fits; the message names the nearest. Or the weights need more memory.
        UnsupportedModel: As `plan` does.
    """
    if (memory is None) == (share is None):
        raise InputError("give either memory, in bytes, or a share of the exact cache, such as 0.2")
    if share is not None and not (isinstance(share, int | float) and 0 < share <= 1):
        raise InputError(f"share={share!r} must be a number above 0 and at most 1")
    model = supported_model(model, all_heads_for="kvloom_lab.auto")
    tuned = stored_recipes(identity(model)["weights"])
    recipes = [*(resolve(candidate.recipe) for candidate in EVIDENCE), *tuned]
    config = copy.deepcopy(model.config)
    config.dtype = model.dtype  # which its weights really have
    planned = plan(config, recipes, context=context, batch=batch, memory=memory)
    published = [*EVIDENCE, *(None for _ in tuned)]
    candidates = [
        _Candidate(*candidate) for candidate in zip(recipes, planned.rows, published, strict=True)
    ]
    exact = candidates[0].nbytes
    if share is not None:
        fitting = [candidate for candidate in candidates if candidate.nbytes <= share * exact]
    else:
        fitting = [candidate for candidate in candidates if candidate.row.fits]
    chunks = memory is not None and not fitting
    if chunks:  # a score of the prompt would see its first chunk alone
        fitting = [
            candidate
            for candidate in candidates
            if candidate.row.fits_in_chunks and not candidate.recipe.keeps_by_score
        ]
    if not fitting:
        bound = f"share={share:g}" if memory is None else f"{show_bytes(memory)} of memory"
        reason = _nothing(candidates, bound, memory is None, planned.context, batch)
        if planned.model.geometry.sliding:
            reason += "; recipes with sliding=packed, which is not tried, take less"
        raise InputError(reason)
    best = _best(fitting)
    why = [best.figures]
    if chunks:
        why.append(
            f"Only small chunks of the prompt fit: give prefill_chunk_size={CHUNK} to generate()."
        )
    return AutoChoice(
        best.recipe, planned.context, batch, int(best.nbytes), best.nbytes / exact, " ".join(why)
    )


@dataclass(frozen=True)
class _Candidate:
    """A recipe, its plan, and its published figures (None: it was tuned for the model)."""

    recipe: Recipe
    row: PlanRow
    published: Evidence | None

    @property
    def nbytes(self) -> float:
        """The bytes of the cache; infinity if the recipe does not fit the model."""
        return self.row.kv_bytes or math.inf

    @property
    def kl(self) -> float:
        """The divergence that was measured: on this model, or of published figures."""
        if self.published is not None:
            return self.published.kl
        assert self.recipe.tuned is not None
        return self.recipe.tuned.kl

    @property
    def figures(self) -> str:
        """Return what is known of its quality, in sentences."""
        tuned = self.recipe.tuned
        if tuned is not None:
            reason = (
                f"It was tuned for this model at {tuned.context:,} tokens ({tuned.bound}): its "
                f"mean KL divergence from the exact cache was {tuned.kl:.2g} nats."
            )
        elif self.recipe.name == "full":
            return "The exact cache fits."
        else:
            reason = f"No recommended recipe with a smaller divergence fits: {self.published}."
        if self.recipe.keeps_by_score:
            reason += " It evicts tokens: facts in them are lost."
        if self.recipe.repeats_prompt:
            reason += " A prompt takes several times as long, because the model repeats it."
        return reason


def _best(fitting: Sequence[_Candidate]) -> _Candidate:
    known = [candidate for candidate in fitting if candidate.published is not None]
    tuned = [candidate for candidate in fitting if candidate.published is None]
    if known:  # in the order of preference
        enough = 1.0 if known[0].recipe.name == "full" else ENOUGH
        tuned = [candidate for candidate in tuned if candidate.nbytes > enough * known[0].nbytes]
    return min(tuned, key=lambda candidate: candidate.kl) if tuned else known[0]


def _nothing(
    candidates: Sequence[_Candidate], bound: str, by_share: bool, context: int, batch: int
) -> str:
    """Return why nothing is chosen, with the nearest recipe."""
    reason = f"no recipe fits into {bound} at {context:,} tokens and batch {batch}"
    if by_share:
        nearest = min(candidates, key=lambda candidate: candidate.nbytes)
        share = nearest.nbytes / candidates[0].nbytes
        return f"{reason}; the nearest is {nearest.recipe.name} with share={share:.3f}"
    in_chunks = [candidate for candidate in candidates if not candidate.recipe.keeps_by_score]
    nearest = max(in_chunks, key=lambda candidate: candidate.row.longest_in_chunks or 0)
    return (
        f"{reason}, with the prompt in one piece; the nearest is {nearest.recipe.name}, with which "
        f"{nearest.row.longest_in_chunks or 0:,} tokens fit in small chunks"
    )
