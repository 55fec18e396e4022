"""Real text as rows of token ids: from files, or from the library that ships with CPython.

Decides which text is read and where rows start in it. Knows nothing of caches.
"""

from __future__ import annotations

from collections.abc import Iterable
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


def library_text() -> str:
    """Return the documents of CPython's library that the reference model was not trained on."""
    from . import corpus

    return corpus.held_out_text()


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
