"""Load a model and its tokenizer: the reference model, a local directory or a hub id.

Decides dtype and device; what can be done with the model is decided by `kvloom.hf`.
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
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
)

from ..errors import InputError
from ..reference import WEIGHTS, reference_model, reference_tokenizer

REFERENCE = "reference"
DTYPES = ("auto", "bfloat16", "float16", "float32")


def load(name: str = REFERENCE, dtype: str = "auto") -> tuple[PreTrainedModel, Any]:
    """Return (model, tokenizer), ready for inference, on the GPU if there is one.

    name: "reference", a directory with a config.json, or a hub id. dtype: "auto" is that of the
    weights. Raises `InputError` if it cannot be loaded.
    """
    _, tokenizer = load_small(name, dtype)
    return load_model(name, dtype), tokenizer


def load_small(name: str = REFERENCE, dtype: str = "auto") -> tuple[Any, Any]:
    """Return (config, tokenizer) of a model, without its weights; arguments as for `load`."""
    _torch_dtype(dtype)
    if name == REFERENCE:
        return AutoConfig.from_pretrained(WEIGHTS), reference_tokenizer()
    _check_exists(name)
    with _loading(name):
        config = AutoConfig.from_pretrained(name)
        if config.is_encoder_decoder:
            raise ValueError("it is an encoder-decoder model; give a decoder, such as a Llama")
        return config, AutoTokenizer.from_pretrained(name)


def load_model(name: str = REFERENCE, dtype: str = "auto") -> PreTrainedModel:
    """Return a model ready for inference, on the GPU if there is one; arguments as for `load`."""
    wanted = _torch_dtype(dtype)
    if name == REFERENCE:
        model = reference_model(wanted)
    else:
        with _loading(name):
            model = AutoModelForCausalLM.from_pretrained(name, dtype=wanted or "auto")
    return model.to("cuda" if torch.cuda.is_available() else "cpu").eval()


def positions(model: PreTrainedModel | PreTrainedConfig) -> int | None:
    """Return the tokens that a model, or its config, has positions for; None if it has no limit."""
    config = getattr(model, "config", model).get_text_config(decoder=True)
    return getattr(config, "max_position_embeddings", None)


def check_room(model: PreTrainedModel | PreTrainedConfig, tokens: int, new_tokens: int) -> None:
    """Raise `InputError` if the model lacks positions for a text and the tokens after it."""
    most = positions(model)
    if most is not None and tokens + new_tokens > most:
        raise InputError(
            f"{tokens} tokens of text and {new_tokens} after them take {tokens + new_tokens} "
            f"positions and the model has {most}; give less text, or fewer new tokens"
        )


def _torch_dtype(dtype: str) -> torch.dtype | None:
    if dtype not in DTYPES:
        raise InputError(f"dtype={dtype!r} is not one of {', '.join(DTYPES)}")
    return None if dtype == "auto" else getattr(torch, dtype)


@contextmanager
def _loading(name: str) -> Iterator[None]:
    """Raise whatever the libraries that read a model's files raise as an `InputError`."""
    try:
        yield
    except Exception as error:
        why = textwrap.shorten(str(error) or type(error).__name__, 400)
        raise InputError(f"model {name!r} cannot be loaded: {why}") from error


def _check_exists(name: str) -> None:
    """Ask once whether there is such a model: loading would try again and again for a minute."""
    folder = Path(name)
    if folder.is_dir():
        if not (folder / "config.json").exists():
            raise InputError(f"{name!r} is a folder without config.json; give a saved model's")
        return
    try:
        if try_to_load_from_cache(name, "config.json") is None:
            HfApi().model_info(name, timeout=10)
    except Exception as error:  # whatever its HTTP library raises
        raise InputError(
            f"there is no model {name!r}: it is not a folder here, and the Hugging Face hub does "
            "not have it or cannot be reached; give a folder with config.json, or a hub id"
        ) from error
