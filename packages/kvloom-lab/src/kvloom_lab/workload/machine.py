"""The versions, the hardware and the weights that figures depend on."""

from __future__ import annotations

import hashlib
import platform
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

from kvloom import __version__
from kvloom.recipe import Geometry


def versions() -> dict[str, Any]:
    """Return versions, the processor, and torch's threads on it."""
    return {
        "python": platform.python_version(),
        "kvloom": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "cpu": cpu_name(),
        "threads": torch.get_num_threads(),
    }


def machine(model: PreTrainedModel | Tensor) -> dict[str, Any]:
    """Return `versions`, the GPU, the dtype of a model or tensor, and the time in UTC."""
    gpu = torch.cuda.get_device_name(model.device) if model.device.type == "cuda" else None
    return {
        **versions(),
        "gpu": gpu,
        "dtype": str(model.dtype).removeprefix("torch."),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def conditions(model: PreTrainedModel, name: str, text: str, **more: Any) -> dict[str, Any]:
    """Return the environment of results: `machine`, names of model and text, and more."""
    return {**machine(model), "model": name, "text": text, **more}


def model_facts(model: PreTrainedModel, name: str, geometry: Geometry) -> dict[str, Any]:
    """Return what identifies a model in results: its name, a hash of its weights, and its shape."""
    return {
        "name": name,
        "weights": weights_sha256(model),
        "layers": geometry.layers,
        "heads": geometry.q_heads,
        "kv_heads": geometry.kv_heads,
        "head_dim": geometry.head_dim,
    }


def weights_sha256(model: PreTrainedModel) -> str:
    """Return a hash of a model's weights, which does not depend on their file's format."""
    digest = hashlib.sha256()
    for name, weight in sorted(model.state_dict().items()):
        digest.update(f"{name} {weight.dtype} {tuple(weight.shape)}\n".encode())
        digest.update(weight.cpu().contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()


def cpu_name() -> str:
    """Return the processor's name as the operating system reports it."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
