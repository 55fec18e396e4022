"""Text that ships with CPython: the library's sources and the help topics of `pydoc`.

Decides which files belong to the corpus and which of them are held out from training. Knows nothing
of tokens. Nothing is downloaded and nothing is copied into the package. Some distributions package
the library's `test` folder separately; without it, the corpus is smaller.
"""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

HELD_OUT_PERCENT = 3
SKIPPED_FOLDERS = {"site-packages", "dist-packages", "__pycache__", "encodings", "pydoc_data"}
MAX_FILE_BYTES = 400_000  # longer files are tables of data


@dataclass(frozen=True)
class Document:
    """One file or help topic. name: the same on every machine; text: its content."""

    name: str
    text: str


def documents() -> Iterator[Document]:
    """Yield every document in a fixed order: help topics first, then the sources by path."""
    yield from _topics()
    yield from _sources(Path(sysconfig.get_path("stdlib")))


def is_held_out(name: str) -> bool:
    """Return whether a document is held out from training, by a hash of its name."""
    digest = hashlib.sha256(name.encode()).digest()
    return int.from_bytes(digest[:4], "big") % 100 < HELD_OUT_PERCENT


@lru_cache(maxsize=1)
def held_out_documents() -> tuple[Document, ...]:
    """Return the documents that the reference model was not trained on."""
    return tuple(d for d in documents() if is_held_out(d.name))


def train_documents() -> Iterator[Document]:
    """Yield the documents that the reference model was trained on."""
    return (d for d in documents() if not is_held_out(d.name))


def held_out_text() -> str:
    """Return all held-out documents as one text."""
    return "\n\n".join(d.text for d in held_out_documents())


def calibration_text() -> str:
    """Return every 15th training document as one text (about 2 MB)."""
    return "\n\n".join(d.text for i, d in enumerate(train_documents()) if i % 15 == 0)


def _topics() -> Iterator[Document]:
    try:
        from pydoc_data.topics import topics
    except ImportError:  # a CPython built without its documentation
        return
    for name in sorted(topics):
        yield Document(f"topic/{name}", topics[name].strip("\n") + "\n")


def _sources(root: Path) -> Iterator[Document]:
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if SKIPPED_FOLDERS.intersection(name.parts) or path.stat().st_size > MAX_FILE_BYTES:
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except (UnicodeDecodeError, OSError):  # deliberately broken test files
            continue
        if text.strip() and "\0" not in text:
            yield Document(name.as_posix(), text)
