"""Adapters of models whose attention bypasses transformers' interface, one file a lineage.

An adapter computes attention in place of the model's attention modules, during a step with a kvloom
cache, and says what else its model type does in its own way. `..adapters` installs it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple

from transformers import PreTrainedModel

from ...errors import RecipeError
from ...positions.rope import Rope
from ...registry import Registry

ADAPTED = {
    "big_bird": ("bert", "BigBirdSelfAttention"),
    "bloom": ("bloom", "BloomAttention"),
    "codegen": ("gptj", "CodeGenAttention"),
    "diffllama": ("diffllama", "DiffLlamaAttention"),
    "falcon": ("falcon", "FalconAttention"),
    "gpt_neo": ("gpt_neo", "GPTNeoSelfAttention"),
    "gpt_neox_japanese": ("gpt_neox_japanese", "GPTNeoXJapaneseAttention"),
    "gptj": ("gptj", "GPTJAttention"),
    "jetmoe": ("jetmoe", "JetMoeAttention"),
    "megatron-bert": ("bert", "MegatronBertSelfAttention"),
    "mpt": ("mpt", "MptAttention"),
    "mvp": ("bart", "MvpAttention"),
    "rembert": ("bert", "RemBertSelfAttention"),
    "roformer": ("bert", "RoFormerSelfAttention"),
    "trocr": ("bart", "TrOCRAttention"),
    "xglm": ("bart", "XGLMAttention"),
}
"""By model type: the file here with its `attend`, and the class of its attention modules."""


class Adapter(NamedTuple):
    """How to route one model type, and what its config does not say in the usual way.

    Attributes:
        attention: The class of the model's attention modules.
        attend: Replaces their forward. Called with the module, its `RoutedLayer` and the arguments
            of the forward, whose result it returns. It attends through `adapters.attend`.
        alibi: Called with the config; returns whether the model has ALiBi instead of positions.
            None: the config has a true `alibi`, or the model has none.
        heads: Called with the config; returns the query heads and the key/value heads of a layer.
            None: the config's `num_attention_heads` and `num_key_value_heads`.
        head_dim: Called with the config; returns the size of a key/value head. None: the config's
            `head_dim`, or its hidden size divided by the query heads.
        rope: Called with the config; returns how the model rotates keys, or None if it does not.
            None: kvloom finds it in the model's modules.
        windows: Called with the config; returns each layer's sliding window, or None for a layer
            that attends to all tokens. None: the layers that the config names.
        problem: Called with the model; returns why it cannot be routed and a remedy, or None.
    """

    attention: type
    attend: Callable[..., tuple]
    alibi: Callable[[Any], bool] | None = None
    heads: Callable[[Any], tuple[int, int]] | None = None
    head_dim: Callable[[Any], int] | None = None
    rope: Callable[[Any], Rope | None] | None = None
    windows: Callable[[Any], list[int | None]] | None = None
    problem: Callable[[PreTrainedModel], str | None] | None = None


def _built_in(model_type: str) -> Adapter:
    file, attention = ADAPTED[model_type]
    module = import_module(f".{file}", __package__)
    folder = model_type.replace("-", "_")
    modeling = import_module(f"transformers.models.{folder}.modeling_{folder}")
    optional = {name: getattr(module, name, None) for name in Adapter._fields[2:]}
    return Adapter(getattr(modeling, attention), module.attend, **optional)


ADAPTERS: Registry[Callable[[], Adapter]] = Registry(
    "model adapter", {model_type: partial(_built_in, model_type) for model_type in ADAPTED}
)


def register_adapter(
    model_type: str, attention: type, **options: Any
) -> Callable[[Callable[..., tuple]], Callable[..., tuple]]:
    """Register a function as the attention of a model type; a decorator.

    Args:
        model_type: As in the model's config.
        attention: The class of the model's attention modules.
        **options: The attributes of `Adapter` from `alibi` on.

    Returns:
        The decorator. It takes the function that `Adapter` calls `attend`, and returns it.

    Raises:
        RecipeError: The model type has an adapter already, or an adapter has no such option.
    """
    unknown = sorted(options.keys() - set(Adapter._fields[2:]))
    if unknown:
        raise RecipeError(
            f"{unknown[0]!r} is not an option of a model adapter; use one of "
            f"{', '.join(Adapter._fields[2:])}"
        )

    def decorate(attend: Callable[..., tuple]) -> Callable[..., tuple]:
        adapter = Adapter(attention, attend, **options)
        ADAPTERS.register(lambda: adapter, name=model_type)
        return attend

    return decorate


def adapter_of(config: Any) -> Adapter | None:
    """Return the adapter of a decoder's config; None if its model type has none."""
    new_adapter = ADAPTERS.get(config.model_type)
    return None if new_adapter is None else new_adapter()
