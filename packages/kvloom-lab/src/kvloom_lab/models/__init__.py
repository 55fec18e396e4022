"""Load a model and its tokenizer: the reference model, SmolLM2, a local folder or a hub id.

A model is loaded in its dtype, on the GPU if there is one.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import HfApi, try_to_load_from_cache
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from kvloom.errors import InputError
from kvloom.hf import state_nbytes

from ..workload import layers
from . import smollm2

REFERENCE = "reference"
WEIGHTS = Path(__file__).parent / "weights"
"""The reference model: a Llama with 4.6 million parameters; its README is the model card."""
_EXTRA_POSITIONS = 4096  # of `random_llama`, after the longest context
DTYPES: dict[str, torch.dtype | None] = {"auto": None, **layers.DTYPES}


def load(name: str = REFERENCE, dtype: str = "auto") -> tuple[PreTrainedModel, Any]:
    """Return (model, tokenizer), ready for inference, on the GPU if there is one.

    name: "reference", "smollm2", a folder with a config.json, or a hub id. dtype: a name in
    `DTYPES`; "auto" keeps the dtype of the weights. Raises `InputError` if the model cannot be
    loaded.
    """
    _, tokenizer = load_config_and_tokenizer(name, dtype)
    return load_model(name, dtype), tokenizer


def load_config_and_tokenizer(name: str = REFERENCE, dtype: str = "auto") -> tuple[Any, Any]:
    """Return (config, tokenizer) of a model without its weights; arguments as for `load`."""
    _torch_dtype(dtype)
    folder = located(name)
    with _loading(name):
        config = AutoConfig.from_pretrained(folder)
        if config.is_encoder_decoder:
            raise ValueError(
                "it is an encoder-decoder model; give a decoder model, such as a Llama"
            )
        if name == REFERENCE:
            return config, reference_tokenizer()
        return config, AutoTokenizer.from_pretrained(folder)


def device() -> str:
    """Return where models are loaded: the GPU, if there is one."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def load_model(name: str = REFERENCE, dtype: str = "auto") -> PreTrainedModel:
    """Return a model ready for inference, on the GPU if there is one; arguments as for `load`."""
    torch_dtype = _torch_dtype(dtype)
    folder = located(name)
    with _loading(name):
        loader = model_class(AutoConfig.from_pretrained(folder))
        model = loader.from_pretrained(folder, dtype=torch_dtype or "auto")
    return model.to(device()).eval()


def model_without_weights(config: PreTrainedConfig, dtype: str = "auto") -> PreTrainedModel:
    """Return a model on torch's meta device, which allocates nothing; dtype as for `load`."""
    torch_dtype = _torch_dtype(dtype)
    with torch.device("meta"):
        return (
            model_class(config)
            .from_config(config, **({} if torch_dtype is None else {"dtype": torch_dtype}))
            .eval()
        )


def states_nbytes(model: PreTrainedModel) -> int:
    """Return the bytes of the states beside keys and values, batch 1; raises `InputError`.

    model: with weights, or on torch's meta device.
    """
    states = state_nbytes(model)
    if states is None:
        raise InputError(
            "the bytes of this model's states cannot be counted, so a share of the exact cache "
            "cannot be found; give a budget, or a bound of another kind"
        )
    return sum(states)


def model_class(config: PreTrainedConfig) -> Any:
    """Return transformers' class that builds a model: causal, or else of images and text."""
    causal = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING
    return AutoModelForCausalLM if causal else AutoModelForImageTextToText


def max_positions(model: PreTrainedModel | PreTrainedConfig) -> int | None:
    """Return the number of positions of a model or config; None if it has no limit."""
    config = getattr(model, "config", model).get_text_config(decoder=True)
    return getattr(config, "max_position_embeddings", None)


def check_positions(
    model: PreTrainedModel | PreTrainedConfig, tokens: int, new_tokens: int
) -> None:
    """Raise `InputError` if text and new tokens together need more positions than the model has."""
    available = max_positions(model)
    if available is not None and tokens + new_tokens > available:
        raise InputError(
            f"{tokens} tokens of text and {new_tokens} new tokens need {tokens + new_tokens} "
            f"positions and the model has {available}; give less text, or fewer new tokens"
        )


def _torch_dtype(dtype: str) -> torch.dtype | None:
    if dtype not in DTYPES:
        raise InputError(f"dtype={dtype!r} is unknown; use one of {', '.join(DTYPES)}")
    return DTYPES[dtype]


@contextmanager
def _loading(name: str) -> Iterator[None]:
    """Convert any error of the libraries that read a model's files to an `InputError`."""
    try:
        yield
    except Exception as error:
        reason = textwrap.shorten(str(error) or type(error).__name__, 400)
        raise InputError(
            f"model {name!r} cannot be loaded: {reason}; give a hub id or the folder of a model"
        ) from error


def located(name: str) -> str:
    """Return a model's folder or hub id; raise `InputError` if it does not exist.

    Asks the hub once: loading would repeat its requests for a minute.
    """
    if name == REFERENCE:
        return str(WEIGHTS)
    if name == smollm2.NAME:
        return str(smollm2.folder())
    folder = Path(name)
    if folder.is_dir():
        if not (folder / "config.json").exists():
            raise InputError(
                f"{name!r} is a folder without config.json; give the folder of a saved model"
            )
        return name
    try:
        if try_to_load_from_cache(name, "config.json") is None:
            HfApi().model_info(name, timeout=10)
    except Exception as error:  # the HTTP library raises its own types
        raise InputError(
            f"there is no model {name!r}: it is not a local folder, and the Hugging Face hub does "
            "not have it or cannot be reached; give a folder with config.json, or a hub id"
        ) from error
    return name


def reference_model(dtype: Any = None) -> Any:
    """Return the reference model, a `LlamaForCausalLM` in evaluation mode.

    Args:
        dtype: A torch dtype; None: bfloat16, the dtype of the stored weights.
    """
    return LlamaForCausalLM.from_pretrained(WEIGHTS, dtype=dtype or "auto").eval()


def reference_tokenizer() -> Any:
    """Return its tokenizer: it adds `<s>` by default, has one token a digit, and pads left."""
    return PreTrainedTokenizerFast.from_pretrained(WEIGHTS)


def random_llama(shape: layers.ModelShape, longest: int) -> LlamaForCausalLM:
    """Return a model on torch's default device, for contexts of up to `longest` tokens."""
    config = LlamaConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.q_heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=longest + _EXTRA_POSITIONS,
        attn_implementation="sdpa",
        dtype=shape.dtype,
    )
    model: LlamaForCausalLM = LlamaForCausalLM._from_config(config)
    return model.eval()
