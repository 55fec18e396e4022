"""Write a file of kvloom's cache folder completely or not at all."""

from __future__ import annotations

import os
from pathlib import Path


def write(target: Path, text: str) -> None:
    """Write text in UTF-8; makes the folders, and replaces a former file. Raises `OSError`."""
    unfinished = target.with_name(f"{target.name}.{os.getpid()}")
    target.parent.mkdir(parents=True, exist_ok=True)
    unfinished.write_text(text, encoding="utf-8")
    unfinished.replace(target)
