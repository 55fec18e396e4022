"""A safetensors file, written whole or not at all. What is in it is its writer's matter."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from uuid import uuid4

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor


def write(
    path: Path, tensors: dict[str, Tensor], about: dict[str, str], refusal: type[Exception]
) -> None:
    """Write tensors, and texts about them, with the rights that the user's new files have.

    Raises `refusal` where that cannot be done; what was at `path` before is there still.
    """
    fresh = path.parent / f".{path.name}.{uuid4().hex}"
    try:
        fresh.touch()
        mode = fresh.stat().st_mode  # safetensors' own files are private
        save_file(tensors, fresh, about)
        fresh.chmod(mode)
        os.replace(fresh, path)
    except (OSError, SafetensorError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise refusal(f"{str(path)!r} cannot be written: {why}") from error
    finally:
        with suppress(OSError):
            fresh.unlink()
