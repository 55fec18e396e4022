"""Make a recipe the default of a model, and undo it.

Decides what is changed on a model: its attention (the implementation, or for some the modules, see
`adapters`), the hook that builds a cache for direct calls, `_prepare_cache_for_generation`, and
use_cache where it is off. All of it is kept in one place, `model._kvloom`, and restored by
`detach`.
"""

from __future__ import annotations

import types
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from ..errors import CacheMisuse
from ..recipe import Recipe
from ..recipes import resolve
from ..shapes import Geometry
from . import adapters, attention, compat, rotary
from .cache import Cache
from .known import known

_TOKENS = 32768  # the prompt for which a report states sizes


@dataclass
class _Routing:
    """What `detach` restores, and the recipe of fresh caches (None: route only).

    config: the decoder's, which says where its attention goes; None where its modules are adapted.
    """

    config: Any
    changed: list[tuple[Any, str, Any]]  # object, attribute, what it was
    hooks: list[Any]
    recipe: Recipe | None = None


@dataclass(frozen=True)
class Report:
    """What `attach` did: printable, and plain data.

    nbytes: bytes the compressed layers will hold after a prompt of 32,768 tokens; full_nbytes:
    those of an exact cache.
    """

    model: str
    recipe: Recipe
    geometry: Geometry
    compressed: tuple[int, ...]
    skipped: dict[int, str]
    full_nbytes: int
    nbytes: int

    def __str__(self) -> str:
        total = len(self.compressed) + len(self.skipped)
        lines = [
            f"kvloom: {self.recipe.name} on {self.model}: {len(self.compressed)} of {total} layers "
            f"compressed ({_ranges(self.compressed)})"
        ]
        for reason in dict.fromkeys(self.skipped.values()):
            which = tuple(i for i, r in self.skipped.items() if r == reason)
            lines.append(f"  not compressed: layers {_ranges(which)}: {reason}")
        if self.compressed:
            lines.append(
                f"  {self.nbytes / 2**20:,.1f} MiB at 32k tokens instead of "
                f"{self.full_nbytes / 2**20:,.1f} ({self.full_nbytes / self.nbytes:.1f}x smaller)"
            )
        return "\n".join(lines)

    __repr__ = __str__


def route(model: PreTrainedModel) -> None:
    """Send the model's attention through kvloom; caches that are not kvloom's notice nothing.

    A model whose default is use_cache=False (MPT) would use no cache, not even one it is given: it
    becomes True.
    """
    if getattr(model, "_kvloom", None) is not None:
        _check_implementation(model)
        return
    hooks = [
        model.register_forward_pre_hook(_before_forward, with_kwargs=True),
        model.register_forward_hook(_after_forward, with_kwargs=True),
    ]
    model._prepare_cache_for_generation = types.MethodType(_prepare_cache, model)
    adapted, decoder = compat.adapted(model), compat.decoder_config(model)
    model._kvloom = _Routing(None if adapted else decoder, [], hooks)
    for config in (decoder, model.generation_config):
        if getattr(config, "use_cache", True) is False:
            model._kvloom.changed.append((config, "use_cache", False))
            config.use_cache = True
    if adapted:
        hooks += adapters.install(model)
    else:
        attention.register()
        model._kvloom.changed += _implementations(model)
        model.set_attn_implementation(attention.NAME)


def attach(model: PreTrainedModel, recipe: Recipe | str = "kivi") -> Report:
    """Give every later `generate()` or call of this model a fresh cache of `recipe`.

    A cache passed by the caller, use_cache=False and cache_implementation keep their meaning.
    Returns a `Report` of which layers are compressed. Raises `UnsupportedModel`, `RecipeError` or
    `IncompatibleRecipe` before anything is changed, `CacheMisuse` if a recipe is attached already.
    """
    compat.refuse_unsupported(model)
    routing = getattr(model, "_kvloom", None)
    if routing is not None and routing.recipe is not None:
        raise CacheMisuse(
            f"recipe {routing.recipe.name!r} is attached to this model already; "
            "call kvloom.detach(model) first"
        )
    recipe = resolve(recipe)
    recipe.check(compat.geometry(model))
    known(model, recipe)
    rotary.mover(model, recipe)
    report = _report(model, recipe)
    route(model)
    model._kvloom.recipe = recipe
    return report


def detach(model: PreTrainedModel) -> None:
    """Restore the model as it was before `attach` or `Cache` touched it."""
    routing = getattr(model, "_kvloom", None)
    if routing is None:
        raise CacheMisuse("nothing is attached to this model")
    for hook in routing.hooks:
        hook.remove()
    for config, attribute, was in routing.changed:
        setattr(config, attribute, was)
    if compat.adapted(model):
        adapters.uninstall(model)
    del model._prepare_cache_for_generation
    del model._kvloom


def _implementations(model: PreTrainedModel) -> list[tuple[Any, str, Any]]:
    """The attention implementation of every config in the model."""
    configs = {id(m.config): m.config for m in model.modules() if isinstance(m, PreTrainedModel)}
    text = compat.decoder_config(model)
    configs[id(text)] = text
    name = "_attn_implementation_internal"
    return [(config, name, config._attn_implementation) for config in configs.values()]


def _prepare_cache(
    model: PreTrainedModel,
    generation_config: Any,
    model_kwargs: dict,
    generation_mode: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Build our cache where transformers would have built its default one."""
    recipe, given = model._kvloom.recipe, model_kwargs.get("past_key_values")
    ours = given is None and recipe is not None and generation_config.use_cache is not False
    if ours and generation_config.cache_implementation is None:
        given = model_kwargs["past_key_values"] = Cache(model, recipe)
    if isinstance(given, Cache):
        records = generation_config.is_assistant or compat.is_recording_mode(generation_mode)
        for layer in given.routed:
            layer.record_past = bool(records)
    return type(model)._prepare_cache_for_generation(
        model, generation_config, model_kwargs, generation_mode, *args, **kwargs
    )


def _before_forward(
    model: PreTrainedModel, args: tuple, kwargs: dict[str, Any]
) -> tuple[tuple, dict[str, Any]] | None:
    """Give a direct call of the model our cache where transformers would have made its own."""
    given = kwargs.get("input_ids", args[0] if args else None)
    if given is not None and given.shape[-1] == 0:
        raise CacheMisuse("the prompt is empty: give at least one token")
    recipe, cache = model._kvloom.recipe, kwargs.get("past_key_values")
    if isinstance(cache, Cache):
        _check_implementation(model)
        new = kwargs.get("inputs_embeds") if given is None else given
        if new is None:
            return None  # the model says what is missing
        cache.check_batch(new.shape[0])
        if cache.learned:
            return args, {**kwargs, "position_ids": _closed_up(cache, new, kwargs)}
    if recipe is None or model.training or cache is not None:
        return None
    use = kwargs.get("use_cache")
    if use is None:
        use = getattr(compat.decoder_config(model), "use_cache", True)
    if not use or torch.compiler.is_compiling():
        return None
    return args, {**kwargs, "past_key_values": Cache(model, recipe), "use_cache": True}


def _closed_up(cache: Cache, new: torch.Tensor, kwargs: dict[str, Any]) -> torch.Tensor:
    """Position ids [B or 1, T] of new tokens [B, T, …], as if those dropped had never been."""
    tokens = new.shape[1]
    given, mask = kwargs.get("position_ids"), kwargs.get("attention_mask")
    padding: Any = 0
    if mask is not None and mask.dim() == 2:
        padding = (mask == 0).sum(dim=-1, keepdim=True)
        if given is None:
            given = (mask.long().cumsum(dim=-1) - 1).clamp(min=0)[:, -tokens:]
    if given is None:
        seen = cache.get_seq_length()
        given = torch.arange(seen, seen + tokens, device=new.device)[None]
    dropped = cache.routed[0].cache.dropped if cache.routed else 0
    gone = dropped - torch.as_tensor(padding, device=given.device)
    return given - gone.clamp(min=0)


def _after_forward(
    model: PreTrainedModel, args: tuple, kwargs: dict[str, Any], output: Any
) -> None:
    """Refuse an answer whose attention did not see the cache."""
    cache = kwargs.get("past_key_values")
    if isinstance(cache, Cache) and any(layer.armed for layer in cache.routed):
        missed = tuple(i for i, layer in enumerate(cache.layers) if getattr(layer, "armed", False))
        raise CacheMisuse(
            f"the attention of layers {_ranges(missed)} did not reach kvloom, so this step's "
            "answer is wrong; the model's attention was replaced: call kvloom.detach and "
            "kvloom.attach again, and start with a new cache"
        )


def _check_implementation(model: PreTrainedModel) -> None:
    config = model._kvloom.config
    found = attention.NAME if config is None else config._attn_implementation
    if found != attention.NAME:
        raise CacheMisuse(
            f"the model's attention implementation is {found!r} now and its attention would not "
            'reach kvloom; call model.set_attn_implementation("kvloom"), or kvloom.detach(model)'
        )


def _report(model: PreTrainedModel, recipe: Recipe) -> Report:
    kinds = [kind for kind, _ in compat.stock_layers(compat.decoder_config(model))]
    reasons = {
        compat.SLIDING: "its sliding window already bounds it; kept as transformers has it",
    }
    skipped = {
        i: reasons.get(kind, f"{kind} holds no ordinary keys and values")
        for i, kind in enumerate(kinds)
        if kind != compat.FULL
    }
    compressed = tuple(i for i in range(len(kinds)) if i not in skipped)
    geometry = compat.geometry(model)
    return Report(
        type(model).__name__,
        recipe,
        geometry,
        compressed,
        skipped,
        _TOKENS * geometry.token_nbytes(),
        recipe.nbytes(_TOKENS, geometry),
    )


def _ranges(numbers: tuple[int, ...]) -> str:
    """(0, 1, 2, 5) as "0-2, 5"."""
    parts: list[list[int]] = []
    for n in numbers:
        if parts and parts[-1][1] == n - 1:
            parts[-1][1] = n
        else:
            parts.append([n, n])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in parts) or "none"
