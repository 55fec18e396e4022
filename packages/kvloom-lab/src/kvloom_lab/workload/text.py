"""Real text as rows of token ids: from files, or from the library that ships with CPython.

The library has two parts: its sources, and the help topics of `pydoc`. The reference model was not
trained on some of its documents. Nothing is downloaded. Some distributions package the library's
`test` folder separately; without it, there is less text.
"""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvloom.errors import InputError

CHUNK_CHARS = 20_000  # characters tokenized at once: some tokenizers are slow on long texts


def read_files(paths: Iterable[str | Path]) -> str:
    """Return the texts of the files, joined by blank lines.

    Raises `InputError` for a file that is missing, empty or not UTF-8.
    """
    return "\n\n".join(_read(Path(path)) for path in paths)


def tokenize(tokenizer: Any, text: str) -> np.ndarray:
    """Return the ids of a text of any length, int64 [tokens], without special tokens."""
    chunks, size = [[""]], 0
    for line in text.splitlines(keepends=True):
        if size + len(line) > CHUNK_CHARS:
            chunks.append([])
            size = 0
        chunks[-1].append(line)
        size += len(line)
    joined = ["".join(chunk) for chunk in chunks]
    rows = tokenizer(joined, add_special_tokens=False, verbose=False)["input_ids"]
    return np.concatenate([np.asarray(row, dtype=np.int64) for row in rows])


def leading_ids(tokenizer: Any) -> list[int]:
    """Return the special ids that this tokenizer puts before a text: usually BOS, or none."""
    whole, bare = tokenizer.encode("a"), tokenizer.encode("a", add_special_tokens=False)
    return whole[: whole.index(bare[0])] if bare[0] in whole else []


def cut_rows(ids: np.ndarray, first: list[int], batch: int, tokens: int, seed: int) -> Tensor:
    """Cut `batch` rows of `tokens` ids from a text, int64 [batch, tokens].

    ids: int64 [N], the text. first: ids that each row starts with. The text is divided into `batch`
    parts; each row comes from one part, at a position drawn by `seed`. Parts overlap if the text is
    short. Raises `InputError` if it is shorter than one row.
    """
    need = tokens - len(first)
    if len(ids) < need:
        raise InputError(
            f"the text has {len(ids):,} tokens, and the context and the new tokens need {need:,}; "
            "give more text, a shorter context or fewer new tokens"
        )
    rng = np.random.default_rng([seed, batch, tokens])
    part = max(need, len(ids) // batch)
    starts = np.linspace(0, len(ids) - part, batch).astype(int)
    starts += rng.integers(0, part - need + 1, batch)
    return torch.from_numpy(np.stack([[*first, *ids[s : s + need]] for s in starts]))


def separate_rows(ids: np.ndarray, first: list[int], batch: int, tokens: int, seed: int) -> Tensor:
    """Cut rows as `cut_rows` does, of parts that share no token.

    Rows that share a passage would count as several samples of it. Raises `InputError` if the text
    is too short.
    """
    need = batch * (tokens - len(first))
    if len(ids) < need:
        raise InputError(
            f"the text has {len(ids):,} tokens, and {batch} separate contexts with the tokens "
            f"after them need {need:,}; give more text, a shorter context or fewer samples"
        )
    return cut_rows(ids, first, batch, tokens, seed)


def _read(path: Path) -> str:
    if not path.exists():
        raise InputError(f"there is no file {str(path)!r}; give text files")
    if path.is_dir():
        raise InputError(f"{str(path)!r} is a folder; give text files")
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"{str(path)!r} is not UTF-8 text; convert it first") from error
    except OSError as error:
        raise InputError(
            f"{str(path)!r} cannot be read ({error.strerror}); give another file"
        ) from error
    if not text.strip():
        raise InputError(f"{str(path)!r} is empty; give a file with text")
    return text


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


def library_text() -> str:
    """Return the documents of CPython's library that the reference model was not trained on."""
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
