"""Load a model and its tokenizer: the reference model, a local directory or a hub id.

Decides dtype and device; what can be done with the model is decided by `kvloom.hf`.
"""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import HfApi, try_to_load_from_cache
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from ..reference import reference_model, reference_tokenizer
from .errors import InputError

REFERENCE = "reference"
DTYPES = ("auto", "bfloat16", "float16", "float32")


def load(name: str = REFERENCE, dtype: str = "auto") -> tuple[PreTrainedModel, Any]:
    """Return (model, tokenizer), ready for inference, on the GPU if there is one.

    name: "reference", a directory with a config.json, or a hub id. dtype: "auto" is that of the
    weights. Raises `InputError` if it cannot be loaded.
    """
    if dtype not in DTYPES:
        raise InputError(f"dtype={dtype!r} is not one of {', '.join(DTYPES)}")
    wanted = None if dtype == "auto" else getattr(torch, dtype)
    if name == REFERENCE:
        model, tokenizer = reference_model(wanted), reference_tokenizer()
    else:
        model, tokenizer = _pretrained(name, wanted)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return model.to(device).eval(), tokenizer


def _pretrained(name: str, dtype: torch.dtype | None) -> tuple[PreTrainedModel, Any]:
    _check_exists(name)
    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
        return AutoModelForCausalLM.from_pretrained(name, dtype=dtype or "auto"), tokenizer
    except Exception as error:  # whatever the libraries that read its files raise
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
