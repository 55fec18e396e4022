"""Compare `full` with the plain model, before a model of an untested class is used.

Decides which classes are tested: those that the sweep over the models of transformers found equal,
in this version of transformers and with these kinds of layers (`tested_models.json`). For others,
`admit` reads a short batch of random tokens twice and refuses a model whose logits differ.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import lru_cache
from importlib.resources import files
from typing import Any
from weakref import WeakKeyDictionary

import torch
import transformers
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

from ..errors import KvloomError, UnsupportedModel
from ..kernels import dispatch
from ..recipe.resolve import resolve
from ..recipe.spec import Recipe
from . import compat
from .implementation import FIELD, other_attention
from .routed_cache import RoutedCache
from .routing import Attached, attachment_restored

_PROMPT, _PADDING, _STEPS = 24, 7, 4
_LONGEST_WINDOW = 512  # a longer sliding window is not exceeded: the check would take too long
_TOLERANCE = {torch.float64: 1e-4, torch.float32: 2e-3}
_HALF_TOLERANCE = 0.05

_ADMITTED: WeakKeyDictionary[PreTrainedModel, Any] = WeakKeyDictionary()
"""By model, the `other_attention` with which it was admitted."""


def is_tested(model: PreTrainedModel) -> bool:
    """Return whether the sweep found this class equal, with this transformers and these layers."""
    kinds = _tested_classes().get(type(model).__name__)
    if kinds is None or other_attention(compat.decoder_config(model)) is not None:
        return False
    return compat.layer_kinds(model) <= set(kinds)


def admit(
    model: PreTrainedModel,
    new_cache: Callable[[PreTrainedModel, Recipe], Any],
    check: bool = True,
) -> None:
    """Refuse a model whose logits under `full` are not those of the plain model, unless admitted.

    Models of tested classes, on the meta device, or admitted before with the same attention are not
    run; with check=False, none is. new_cache: makes a cache of a recipe. Raises `UnsupportedModel`.
    """
    attention = other_attention(compat.decoder_config(model))
    if _ADMITTED.get(model, False) == attention:
        return
    _ADMITTED[model] = attention  # for the caches that the check makes, too
    if not check or is_tested(model) or _is_meta(model):
        return
    try:
        _compare(model, new_cache)
    except BaseException:
        _ADMITTED.pop(model, None)
        raise


def _compare(model: PreTrainedModel, new_cache: Callable[[PreTrainedModel, Recipe], Any]) -> None:
    """Raise `UnsupportedModel` if the model cannot run `full`, or its logits differ."""
    name = type(model).__name__
    try:
        sample = sample_batch(model)
        with routed_trial(model, None):
            plain = generate_sample(model, sample)
    except Exception as error:
        raise UnsupportedModel(
            f"{name} cannot be verified: without kvloom, generate() raises {_format_error(error)} "
            "for random tokens; check=False skips this check"
        ) from error
    try:
        with routed_trial(model, new_cache), dispatch.use("ref"):  # kernels take seconds to compile
            routed = generate_sample(model, sample)
    except Exception as error:
        raise UnsupportedModel(
            f"{name} cannot be used with kvloom: {_format_error(error)}"
        ) from error
    if not isinstance(routed.past_key_values, RoutedCache):
        raise UnsupportedModel(
            f"{name} cannot be used with kvloom: its generate() makes a cache of its own, a "
            f"{type(routed.past_key_values).__name__}; use that"
        )
    if not routed.past_key_values.get_seq_length():
        raise UnsupportedModel(
            f"{name} cannot be used with kvloom: its generate() stores no token in a cache; "
            "use the model without kvloom"
        )
    measured = logits_difference(plain, routed)
    if measured > least_tolerance(model) and (
        measured > (allowed := rounding_tolerance(model, sample, plain))
    ):
        raise UnsupportedModel(
            f"{name} cannot be used with kvloom: the logits after {sample['input_ids'].shape[1]} "
            f"random tokens differ by {measured:.2g} of their spread from those of the plain "
            f"model, where rounding explains {allowed:.2g}; use transformers' own cache, and "
            "report the model"
        )


def routed_trial(
    model: PreTrainedModel, new_cache: Callable[[PreTrainedModel, Recipe], Any] | None
) -> AbstractContextManager[None]:
    """Give the model caches of `full` (None: those of transformers), then restore it."""
    return attachment_restored(model, Attached(resolve("full"), new_cache))


def sample_batch(model: PreTrainedModel, tokens: int = _PROMPT) -> dict[str, Tensor]:
    """Return two rows of random tokens, one of them left-padded: input_ids and attention_mask.

    They have `tokens` tokens, and those of a sliding window of at most 512 tokens. A model with
    fewer positions gets fewer.
    """
    config = compat.decoder_config(model)
    window = getattr(config, "sliding_window", None) or 0
    tokens += window if window <= _LONGEST_WINDOW else 0
    limit = compat.max_positions(model) or tokens + _STEPS
    tokens = max(_PADDING + 2, min(tokens, limit - _STEPS))
    device = model.get_input_embeddings().weight.device
    ids = torch.tensor(_plain_ids(model), device="cpu")
    drawn = torch.randint(len(ids), (2, tokens), generator=torch.Generator().manual_seed(0))
    mask = torch.ones(2, tokens, dtype=torch.long)
    mask[1, :_PADDING] = 0
    return {"input_ids": ids[drawn].to(device), "attention_mask": mask.to(device)}


def generate_sample(
    model: PreTrainedModel, sample: dict[str, Tensor], past_key_values: Any = None, **settings: Any
) -> Any:
    """Return what `generate()` does: sequences, and the logits of a few steps.

    settings: fields of the generation config; without any, generation is greedy.
    """
    config = GenerationConfig(**{
        "max_new_tokens": _STEPS, "min_new_tokens": _STEPS, "do_sample": False, "pad_token_id": 0,
        "eos_token_id": 0, "return_dict_in_generate": True, "output_logits": True, **settings,
    })  # fmt: skip
    cache = {} if past_key_values is None else {"past_key_values": past_key_values}
    with compat.evaluating(model):
        return model.generate(**sample, **cache, generation_config=config)


def logits_difference(plain: Any, other: Any) -> float:
    """Return the largest difference of logits, relative to the spread of the plain ones.

    Each row is compared up to the first step where the tokens before it differ.
    """
    largest = 0.0
    equal = torch.ones(plain.logits[0].shape[0], dtype=torch.bool, device=plain.logits[0].device)
    for plain_logits, other_logits in zip(plain.logits, other.logits, strict=True):
        plain_logits, other_logits = plain_logits.float(), other_logits.float()
        spread = (plain_logits - plain_logits.mean(dim=-1, keepdim=True)).norm(dim=-1)
        error = (other_logits - plain_logits).norm(dim=-1) / spread
        if equal.any():
            largest = max(largest, float(error.nan_to_num(torch.inf)[equal].max()))
        equal &= plain_logits.argmax(dim=-1) == other_logits.argmax(dim=-1)
    return largest


def least_tolerance(model: PreTrainedModel) -> float:
    """Return the difference of logits that is allowed in the model's dtype."""
    return _TOLERANCE.get(model.dtype, _HALF_TOLERANCE)


def rounding_tolerance(model: PreTrainedModel, sample: dict[str, Tensor], plain: Any) -> float:
    """Return the difference of logits that rounding explains in the model's dtype.

    plain: what `generate` returned for the sample without kvloom. In half precision the plain model
    differs from itself without a cache, and with another attention of transformers; twice the
    larger difference is allowed.
    """
    if model.dtype in _TOLERANCE:
        return _TOLERANCE[model.dtype]
    with routed_trial(model, None):
        others = [generate_sample(model, sample, use_cache=False)]
        with suppress(Exception), _other_implementation(model):  # a model may have one alone
            others.append(generate_sample(model, sample))
    return max(_HALF_TOLERANCE, *(2 * logits_difference(plain, other) for other in others))


@contextmanager
def _other_implementation(model: PreTrainedModel) -> Iterator[None]:
    """Let a routed model attend by transformers' eager attention, or by sdpa if it does already."""
    configs = [vars(config) for config in model._kvloom.configs]
    before = [config[FIELD] for config in configs]
    for config in configs:
        config[FIELD] = "sdpa" if config[FIELD] == "eager" else "eager"
    try:
        yield
    finally:
        for config, name in zip(configs, before, strict=True):
            config[FIELD] = name


def _plain_ids(model: PreTrainedModel) -> list[int]:
    """Return the ids of tokens that no config gives a meaning (image tokens, for example)."""
    vocabulary = model.get_input_embeddings().weight.shape[0]
    meant = {0, 1, 2}
    for config in (model.config, compat.decoder_config(model)):
        for name, x in config.to_dict().items():
            if isinstance(x, int) and ("token_id" in name or "token_index" in name):
                meant.add(x)
    return [i for i in range(vocabulary) if i not in meant]


def _is_meta(model: PreTrainedModel) -> bool:
    return any(weight.is_meta for weight in model.parameters())


def _format_error(error: Exception) -> str:
    is_ours = isinstance(error, KvloomError)
    return str(error) if is_ours else f"{type(error).__name__}: {error}"


@lru_cache
def _tested_classes() -> dict[str, list[str]]:
    """Return the kinds of layers of each tested class, in this version of transformers."""
    text = (files("kvloom.hf") / "tested_models.json").read_text()
    classes: dict[str, list[str]] = json.loads(text).get(transformers.__version__, {})
    return classes
