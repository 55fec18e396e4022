"""The versions, the hardware and the weights that figures depend on."""

from __future__ import annotations

import hashlib
import platform
from contextlib import suppress
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


def reset_peak() -> None:
    """Let `peak_since_reset` count from the memory that this process has now."""
    with suppress(OSError):  # not Linux, or not permitted
        Path("/proc/self/clear_refs").write_text("5")
    _resident[:] = [_status("VmRSS")]


def peak_since_reset() -> int | None:
    """Return the most bytes above those at `reset_peak`; None if the system does not tell."""
    peak = _status("VmHWM")
    return None if peak is None or _resident[0] is None else max(0, peak - _resident[0])


_resident: list[int | None] = [None]


def _status(name: str) -> int | None:
    """Return a size of this process in bytes."""
    file = Path("/proc/self/status")
    lines = file.read_text().splitlines() if file.exists() else []
    return next((int(x.split()[1]) << 10 for x in lines if x.startswith(f"{name}:")), None)
