"""Make a recipe the default of a model, undo it, and report what changed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch
from transformers import PreTrainedModel

from ..errors import CacheMisuse, RecipeError
from ..recipe.geometry import Geometry
from ..recipe.layers import listed
from ..recipe.spec import Recipe
from . import compat, shard
from .cache import Cache
from .guard import ModelRef
from .layer_facts import recipe_for
from .prompts import reading
from .prompts.store import PromptStore
from .routing import Attached, attachment, set_attachment, unroute
from .states import state_nbytes
from .supported import unwrap

_TOKENS = 32768  # the prompt for which a report states sizes
_SMALL = 1_000_000_000  # parameters below which 2 bits can cost much quality
_SMALL_HEAD = 64
_FEW = 0.15  # share of a prompt below which evicting costs much quality
_INDEXED = "its attention reads the tokens that an index of its own selects"
_POOLED = "it stores a window of tokens, and summaries of those before it"
_EXACT = "the recipe leaves it exact"
_POSITION_BIASES = "its attention adds learned position biases; kept as transformers has it"
_REASONS = {
    compat.SLIDING: "its sliding window bounds it",
    "LinearAttentionLayer": "it stores a recurrent state, not keys and values",
    "LinearAttentionAndFullAttentionLayer": _POSITION_BIASES,
    "LinearAttentionAndSlidingWindowAttentionLayer": _POSITION_BIASES,
    "DynamicIndexedLayer": _INDEXED,
    "MiniMaxM3VLSparseCacheLayer": _INDEXED,
    "DeepseekV4HCACache": _POOLED,
    "DeepseekV4CSACache": _POOLED,
    "DummyLayer": "it stores nothing: it has no keys and values, or those of an earlier layer",
}
"""Why a layer of each kind is not compressed."""


@dataclass(frozen=True)
class Report:
    """The changes that `attach` made: printable, and plain data.

    In a `with` statement, it undoes them at the end of the block.

    Attributes:
        model: The model's class.
        recipe: The attached recipe.
        geometry: The model's layers and heads.
        compressed: Indices of the compressed layers.
        skipped: Why each other layer is not compressed.
        full_nbytes: Bytes of an exact cache that holds 32,768 tokens.
        nbytes: Bytes of a cache of the recipe that holds them. Both count layers of full attention,
            sliding windows and states.
        state_nbytes: Bytes of the states among these, such as those of linear attention, which no
            recipe changes.
        notes: Advice and warnings, a sentence each.
    """

    model: str
    recipe: Recipe
    geometry: Geometry
    compressed: tuple[int, ...]
    skipped: dict[int, str]
    full_nbytes: int
    nbytes: int
    state_nbytes: int = 0
    notes: tuple[str, ...] = ()
    _undo: Callable[[], None] | None = field(default=None, repr=False, compare=False)

    def __enter__(self) -> Report:
        """Return the report itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Attach what was attached before `attach`, or nothing."""
        if self._undo is not None:
            self._undo()

    def __str__(self) -> str:
        total = len(self.compressed) + len(self.skipped)
        lines = [
            f"kvloom: {self.recipe.name} on {self.model}: {len(self.compressed)} of {total} layers "
            f"compressed ({listed(self.compressed)})"
        ]
        for reason in dict.fromkeys(self.skipped.values()):
            which = tuple(i for i, r in self.skipped.items() if r == reason)
            lines.append(f"  not compressed: layers {listed(which)}: {reason}")
        if self.compressed:
            times = self.full_nbytes / self.nbytes
            smaller = "no smaller" if times < 1.05 else f"{times:.1f}x smaller"
            lines.append(
                f"  {self.nbytes / 2**20:,.1f} MiB at 32k tokens instead of "
                f"{self.full_nbytes / 2**20:,.1f} ({smaller})"
            )
        if self.state_nbytes:
            lines.append(f"  {self.state_nbytes / 2**20:,.1f} MiB of both are states, as they were")
        return "\n".join([*lines, *(f"  {note}" for note in self.notes)])

    __repr__ = __str__


def attach(
    model: PreTrainedModel,
    recipe: Recipe | str | Path = "near-lossless",
    check: bool = True,
    store: PromptStore | None = None,
) -> Report:
    """Give every later `generate()` or call of this model a fresh cache of `recipe`.

    A cache that the caller passes, use_cache=False and cache_implementation work as without kvloom.
    A recipe that is attached already is replaced. After the block of
    `with kvloom.attach(model, recipe):`, what was attached before it is attached again, or nothing.

    Args:
        model: As for `Cache`. In the wrapper of `torch.compile` its steps run uncompiled.
        recipe: As for `Cache`.
        check: As for `Cache`.
        store: `generate()` reuses the beginnings of prompts that are in it, and stores new ones.

    Returns:
        Which layers are compressed, and how much.

    Raises:
        UnsupportedModel: kvloom cannot route the model. These errors are raised before the model
            changes.
        RecipeError: There is no such recipe.
        IncompatibleRecipe: The recipe does not fit the model.
    """
    before = attachment(unwrap(model))
    if not isinstance(store, PromptStore | None):
        raise CacheMisuse(f"store={store!r} is no prompt store; give kvloom.PromptStore(folder)")
    cache = Cache(model, recipe, check)  # which refuses what does not fit
    read_prompt = None if store is None else partial(reading.read, store)
    set_attachment(cache.owner.model, Attached(cache.recipe, Cache, read_prompt))
    undo = partial(_restore, cache.owner, before)
    return replace(report(cache.owner.model, cache.recipe), _undo=undo)


def detach(model: PreTrainedModel) -> None:
    """Restore the model as it was before `attach` or `Cache` changed it.

    Args:
        model: The model, or its wrapper.

    Raises:
        CacheMisuse: Nothing is attached.
    """
    unroute(unwrap(model))


def report(model: PreTrainedModel, recipe: Recipe) -> Report:
    """Return the report of `recipe` on `model`."""
    geometry = compat.geometry(model)
    plain = {i: recipe.for_layer(i, geometry.layer_indices) for i in geometry.layer_indices}
    if recipe.packs_windows:
        plain |= {layer.layer_index: recipe.in_windows for layer in geometry.sliding}
    compressed = tuple(sorted(i for i in plain if not plain[i].exact))
    kinds = compat.stock_kinds(model)
    reasons = {kind: _reason(kind, recipe, geometry) for kind in {*kinds}}
    skipped = {
        i: _EXACT if i in plain else reasons[kind]
        for i, kind in enumerate(kinds)
        if i not in compressed
    }
    states = state_nbytes(model)
    notes = _notes(model, recipe, geometry) if compressed else ()
    if states is None:
        notes = (*notes, "note: the bytes of states are not counted: the model cannot be traced")
    unchanged = sum(states or ())
    exact_windows = Recipe().sliding_nbytes(_TOKENS, geometry)
    return Report(
        type(model).__name__,
        recipe,
        geometry,
        compressed,
        skipped,
        _TOKENS * geometry.token_nbytes() + exact_windows + unchanged,
        recipe.nbytes(_TOKENS, geometry) + recipe.sliding_nbytes(_TOKENS, geometry) + unchanged,
        unchanged,
        notes,
    )


def _reason(kind: str, recipe: Recipe, geometry: Geometry) -> str:
    """Return why layers of a kind that kvloom does not cache are not compressed, and a remedy."""
    reason = _REASONS.get(kind, f"kvloom does not compress a {kind}")
    if kind != compat.SLIDING:
        return reason
    try:
        fits = not replace(recipe, sliding="packed").problems(geometry)
    except RecipeError:
        fits = False
    return f"{reason}; sliding=packed in the recipe packs the window" if fits else reason


def _notes(model: PreTrainedModel, recipe: Recipe, geometry: Geometry) -> tuple[str, ...]:
    """Return advice and warnings on this recipe with this model."""
    notes = []
    if recipe.packs_windows and not geometry.sliding:
        notes.append("note: no layer has a sliding window, so sliding=packed changes nothing")
    adapted = recipe_for(model, recipe)
    if recipe.rotates_queries and not adapted.rotates_queries:
        instead = "another score takes the place of the recipe's"
        if adapted.repeats_prompt:
            instead = "it reads each prompt twice, as with kvzip"
        notes.append(
            f"note: the model's queries cannot be rotated to other positions, so {instead}, and "
            "values are not fitted"
        )
    if recipe.keep is not None or recipe.recall is not None or not recipe.store.exact:
        notes.append(
            "note: a prompt attends exactly, so log-likelihoods from one forward pass (as lm-eval "
            "computes them) do not depend on the recipe"
        )
    fraction = None if recipe.keep is None else recipe.keep.budget.fraction
    if fraction is not None and fraction < _FEW and recipe.tuned is None:
        notes.append(
            f"warning: keeping {fraction:g} of a prompt can cost much quality; use "
            f"fraction={_FEW:g} or more"
        )
    formats = [fmt for store in adapted.stores for fmt in store.quantized.values()]
    if any(isinstance(fmt.clip, str) for fmt in formats) and not all(recipe.protect.exact_recents):
        notes.append(
            "warning: calibrated clip factors are those of a store whose newest tokens are exact; "
            "without a window they can cost much quality; add clip=0.96"
        )
    bits = min((fmt.bits for fmt in formats), default=16)
    parameters = sum(p.numel() for p in model.parameters())
    if bits <= 2 and (parameters < _SMALL or geometry.head_dim <= _SMALL_HEAD):
        notes.append(
            f"warning: {bits:g}-bit keys or values can cost much quality on a model of this size "
            f"({parameters / 1e6:,.0f} M parameters, head_dim {geometry.head_dim}); compare with "
            "kivi-4"
        )
    ratio = _key_bias(model, adapted)
    if ratio:
        notes.append(
            f"warning: biases of this model's keys are up to {ratio:,.0f} times as large as a "
            "channel varies, and the recipe packs keys per token, in groups that these channels "
            "dominate; pack keys per channel, as near-lossless does"
        )
    return tuple(notes)


def _key_bias(model: PreTrainedModel, recipe: Recipe) -> float:
    """Return the largest bias of a key's channel over the median deviation of channels.

    0 where no recipe packs keys in few bits per token, or a step between two codes is smaller than
    that deviation. A layer's input is normalized, so the deviation is the norm of a row of weights.
    """
    keys = (store.quantized.get("keys") for store in recipe.stores)
    bits = [
        fmt.bits for fmt in keys
        if fmt is not None and fmt.axis == "token" and not (fmt.smooth or fmt.reorder)
    ]  # fmt: skip
    modules, largest = dict(model.named_modules()) if bits else {}, 0.0
    for name, module in modules.items():
        is_key = name.rpartition(".")[2] == "k_proj" and type(module) is torch.nn.Linear
        if not is_key or module.bias is None or module.bias.is_meta:
            continue
        weight, bias = (shard.local(x).detach().float() for x in (module.weight, module.bias))
        norm = modules.get(f"{name.rpartition('.self_attn')[0]}.input_layernorm")
        if norm is not None and hasattr(norm, "weight"):
            weight = weight * shard.local(norm.weight).detach().float()
        deviation = weight.norm(dim=1).median().clamp_min(1e-12)
        largest = max(largest, float(bias.abs().max() / deviation))
    return largest if bits and largest > 2 ** min(bits) - 1 else 0.0


def _restore(owner: ModelRef, attached: Attached | None) -> None:
    """Give a model, if it still exists, what was attached before."""
    model = owner.get()
    if model is not None:
        set_attachment(model, attached)
