"""Records of a user's JSON lines: a file, or the .jsonl files of a folder."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from kvloom.errors import InputError

from ...workload.json_lines import Fields, Record, read_records


def data_records(path: str, fields: Fields) -> list[Record]:
    """Return the records of a file, or of the .jsonl files of a folder in the order of their names.

    fields: required ones, with their types. Raises `InputError` for a file that cannot be read or
    is empty, and for a damaged line, which it names.
    """
    given = Path(path)
    if not given.exists():
        raise InputError(f"there is no file or folder {path!r}; --data takes JSON lines")
    files = sorted(given.glob("*.jsonl")) if given.is_dir() else [given]
    records = [
        record for file in files for record in read_records(file, fields, "correct the line")
    ]
    if not records:
        raise InputError(f"{path!r} has no JSON lines; give a .jsonl file, or a folder of such")
    return records


def chosen(records: list[Record], samples: int, seed: int) -> list[Record]:
    """Return `samples` records drawn at random, in their order, or all if there are not more."""
    if len(records) <= samples:
        return records
    picks = np.random.default_rng([seed, len(records)]).choice(len(records), samples, replace=False)
    return [records[i] for i in sorted(picks)]
