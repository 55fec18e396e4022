"""Send a model's attention through kvloom, and undo it.

Decides what changes on a model: its forward and that of its decoder (`forward`), for some models
the attention modules (`adapters`), `_prepare_cache_for_generation`, and use_cache where it is off.
`model._kvloom` records all of it. Its attention implementation changes within steps only.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from ..errors import CacheMisuse
from ..recipe.spec import Recipe
from . import adapters, attention, compat
from .forward import RoutedForward, nothing_new
from .guard import CallRef
from .implementation import restore_stock
from .routed_cache import RoutedCache

if TYPE_CHECKING:
    from .recorded_steps import Graphs

_WHOLE = "attention_mask", "position_ids"
"""Arguments of `generate()` that are as long as the whole sequence."""


class Attached(NamedTuple):
    """How `generate()` gets a cache.

    recipe: of the cache. new_cache: makes it for the model; None: `generate()` gets no cache from
    kvloom. read_prompt: see `RoutedCache`.
    """

    recipe: Recipe | None = None
    new_cache: Callable[[PreTrainedModel, Recipe], RoutedCache] | None = None
    read_prompt: Callable[..., Any] | None = None


@dataclass
class Routing:
    """What `unroute` restores, and what is attached.

    configs: those of the modules that attend, or make masks, in a step with a kvloom cache.
    layer_count: the layers of the model. whole:
    the model is routed; False: an interrupt has stopped `route` or `unroute`. graphs: replay its
    steps within `kvloom.cuda_graphs`.
    """

    configs: list[Any]
    cached: list[Any]  # configs whose `use_cache` was False
    forwards: list[RoutedForward]
    layer_count: int
    attached: Attached = field(default_factory=Attached)
    whole: bool = False
    graphs: Graphs | None = None

    def __deepcopy__(self, memo: dict) -> Routing:
        """Copy together with the model that this belongs to."""
        memo[id(self)] = new = object.__new__(Routing)
        vars(new).update(copy.deepcopy(vars(self), memo))
        return new

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take the state out of a pickle: the model in it stays attached."""
        vars(self).update(state)
        attention.register()
        recipe = self.attached.recipe
        if recipe is not None:
            warnings.warn(
                f"the unpickled model has recipe {recipe.name!r} attached, as it had when it "
                "was pickled; call kvloom.detach(model) for the plain model",
                stacklevel=2,
            )


def route(model: PreTrainedModel) -> None:
    """Send the model's attention through kvloom; other caches work as before.

    A model whose default is use_cache=False (MPT) would ignore even a cache that it is given, so
    this becomes True. After an interrupt, `route` begins again, and `unroute` undoes what was done.
    """
    if attachment(model) is not None:
        if model._kvloom.whole:
            return
        unroute(model)
    if compat.has_adapter(model):
        adapters.check(model)
    modules = {id(module): module for module in (model, compat.decoder(model))}
    forwards = [RoutedForward(model, module) for module in modules.values()]
    attention.register()
    model._kvloom = Routing(attention_configs(model), [], forwards, compat.layer_count(model))
    model._prepare_cache_for_generation = partial(_prepare_cache, model)
    for config in (compat.decoder_config(model), model.generation_config):
        if getattr(config, "use_cache", True) is False:
            model._kvloom.cached.append(config)
            config.use_cache = True
    for forward in forwards:
        forward.install()
    if compat.has_adapter(model):
        adapters.install(model)
    model._kvloom.whole = True


def unroute(model: PreTrainedModel) -> None:
    """Restore the model as it was before `route`; raises `CacheMisuse` if it is not routed."""
    routing = getattr(model, "_kvloom", None)
    if routing is None:
        raise CacheMisuse("nothing is attached to this model; call kvloom.attach(model) first")
    routing.whole = False
    for forward in routing.forwards:
        forward.uninstall()
    for config in routing.cached:
        config.use_cache = False
    if compat.has_adapter(model):
        adapters.uninstall(model)
    restore_stock(routing.configs)
    vars(model).pop("_prepare_cache_for_generation", None)
    del model._kvloom


def attachment(model: PreTrainedModel) -> Attached | None:
    """Return what is attached to a routed model; None: it is not routed."""
    routing = getattr(model, "_kvloom", None)
    return None if routing is None else routing.attached


def set_attachment(model: PreTrainedModel, attached: Attached | None) -> None:
    """Route the model with what is attached to it; None: undo its routing."""
    if attached is not None:
        route(model)
        model._kvloom.attached = attached
    elif attachment(model) is not None:
        unroute(model)


@contextmanager
def attachment_restored(model: PreTrainedModel, attached: Attached | None = None) -> Iterator[None]:
    """Attach this (None: nothing new) to the model; in the end it has what it had before."""
    before = attachment(model)
    try:
        if attached is not None:
            set_attachment(model, attached)
        yield
    finally:
        set_attachment(model, before)


def attention_configs(model: PreTrainedModel) -> list[Any]:
    """Return the configs of the decoder's modules and of the models around it, but no others.

    The towers of images or sound keep their own attention.
    """
    decoder = compat.decoder(model)
    path = next(name for name, module in model.named_modules() if module is decoder).split(".")
    outer_modules = [model.get_submodule(".".join(path[:i])) for i in range(len(path))]
    configs = [getattr(module, "config", None) for module in (*outer_modules, *decoder.modules())]
    configs.append(compat.decoder_config(model))
    by_id = {id(x): x for x in configs if isinstance(x, PreTrainedConfig)}
    return list(by_id.values())


def _prepare_cache(
    model: PreTrainedModel,
    generation_config: Any,
    model_kwargs: dict,
    generation_mode: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Build a kvloom cache where transformers would build its default one."""
    attached, cache = model._kvloom.attached, model_kwargs.get("past_key_values")
    assists = bool(generation_config.is_assistant)
    uses_cache = generation_config.use_cache is not False
    uses_cache = uses_cache and generation_config.cache_implementation is None
    if assists and compat.layer_count(model) != model._kvloom.layer_count:
        uses_cache = False  # the first layers alone draft (early exit), from transformers' cache
    if cache is None and uses_cache and attached.new_cache is not None:
        cache = model_kwargs["past_key_values"] = attached.new_cache(model, attached.recipe)
        cache.read_prompt = attached.read_prompt
        if assists:  # transformers has its own new caches record, too
            cache.activate_past_recording()
    if isinstance(cache, RoutedCache):
        tokens = _sequence_length(generation_config, model_kwargs)
        if tokens and tokens <= cache.get_seq_length():
            raise nothing_new(cache, tokens)
        records = assists or compat.is_recording_mode(generation_mode)
        # transformers takes back an assistant's newest token, though it was given
        accepted_tokens = max(0, tokens - assists) if records else 0
        cache.record(CallRef(generation_config) if records else None, accepted_tokens)
        if records and tokens and all(model_kwargs.get(name) is None for name in _WHOLE):
            # by the mask, the first step shows whether it has the whole sequence
            model_kwargs["attention_mask"] = torch.ones(
                1, tokens, dtype=torch.long, device=model.device
            )
    return type(model)._prepare_cache_for_generation(
        model, generation_config, model_kwargs, generation_mode, *args, **kwargs
    )


def _sequence_length(generation_config: Any, model_kwargs: dict) -> int:
    """Return the tokens that `generate()` was given in all; 0: unknown.

    transformers drops a mask without padding, and notes its length.
    """
    if model_kwargs.get("inputs_embeds") is not None:
        return int(model_kwargs["inputs_embeds"].shape[1])
    for name in _WHOLE:
        if model_kwargs.get(name) is not None:
            return int(model_kwargs[name].shape[-1])
    return getattr(generation_config, "_mask_length", None) or 0
