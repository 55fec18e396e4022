"""Real text as token rows: from files, or from what every CPython ships with.

Decides which text is read and where rows are cut from it; knows nothing of caches.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import InputError

PIECE_CHARS = 20_000  # tokenized at a time: some tokenizers are slow on long stretches


def read_files(paths: Iterable[str | Path]) -> str:
    """Return the files' texts, joined by blank lines; raises `InputError` naming a bad file."""
    return "\n\n".join(_read(Path(path)) for path in paths)


def library_text() -> str:
    """Return the documents of CPython's library that the reference model has not seen."""
    from ..reference import corpus

    return corpus.held_out_text()


def tokenize(tokenizer: Any, text: str) -> np.ndarray:
    """Return the ids of a text of any length, int64 `[tokens]`, without special tokens."""
    pieces, size = [[""]], 0
    for line in text.splitlines(keepends=True):
        if size + len(line) > PIECE_CHARS:
            pieces.append([])
            size = 0
        pieces[-1].append(line)
        size += len(line)
    joined = ["".join(piece) for piece in pieces]
    rows = tokenizer(joined, add_special_tokens=False, verbose=False)["input_ids"]
    return np.concatenate([np.asarray(row, dtype=np.int64) for row in rows])


def opening(tokenizer: Any) -> list[int]:
    """Return the special ids that this tokenizer puts in front of a text (mostly BOS, or none)."""
    whole, bare = tokenizer.encode("a"), tokenizer.encode("a", add_special_tokens=False)
    return whole[: whole.index(bare[0])] if bare[0] in whole else []


def rows(ids: np.ndarray, first: list[int], batch: int, tokens: int, seed: int) -> Tensor:
    """Cut `batch` rows of `tokens` ids from a text, int64 `[batch, tokens]`.

    Each row begins with the ids `first` and comes from its own part of the text, where `seed`
    chooses; the parts overlap if the text is short. Raises `InputError` if it is too short.
    """
    need = tokens - len(first)
    if len(ids) < need:
        raise InputError(
            f"the text has {len(ids):,} tokens, and the context and what follows it take {need:,}; "
            "give more text, a shorter context or fewer new tokens"
        )
    rng = np.random.default_rng([seed, batch, tokens])
    part = max(need, len(ids) // batch)
    begins = np.linspace(0, len(ids) - part, batch).astype(int)
    begins += rng.integers(0, part - need + 1, batch)
    return torch.from_numpy(np.stack([[*first, *ids[b : b + need]] for b in begins]))


def _read(path: Path) -> str:
    if not path.exists():
        raise InputError(f"there is no file {str(path)!r}")
    if path.is_dir():
        raise InputError(f"{str(path)!r} is a folder; give text files")
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"{str(path)!r} is not UTF-8 text; convert it first") from error
    except OSError as error:
        raise InputError(f"{str(path)!r} cannot be read: {error.strerror}") from error
    if not text.strip():
        raise InputError(f"{str(path)!r} is empty; give a file with text")
    return text
