"""The protocol of a run: everything that its figures depend on, frozen before the first of them.

It is `protocol.json` in the folder of the samples, and stands beside the published figures.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import record
from kvloom.recipe import Recipe
from kvloom_lab.eval.sample import Batch, Sample
from kvloom_lab.workload.files import write_whole

PASSAGE = 32  # words: texts with a common passage of twice as many certainly share a chunk


def protocol_of(
    texts: Mapping[str, list[Batch]], recipes: Iterable[Recipe], **more: Any
) -> dict[str, Any]:
    """Return the environment, whether the commit's tree is clean, hashes of texts, and recipes.

    texts: the samples of each task. more: seeds, sizes and refused samples.
    """
    changed = record.git("status", "--porcelain", "--", ":/", ":(top,exclude)benchmarks/results")
    return {
        "clean": changed == "",
        **record.environment(**more),
        "texts": {
            task: sha256(*(text_sha256(x) for batch in batches for x in batch.samples))
            for task, batches in texts.items()
        },
        "recipes": {recipe.name: recipe.to_toml() for recipe in recipes},
    }


def freeze(protocol: dict[str, Any], folder: Path) -> None:
    """Write and print the protocol of a folder; refuse a folder with another one."""
    file = folder / "protocol.json"
    if not file.exists():
        write_whole(file, json.dumps(protocol, indent=2))
    before = json.loads(file.read_text())
    other = [name for name in {**before, **protocol} if before.get(name) != protocol.get(name)]
    if other:
        sys.exit(
            f"{folder} has another protocol ({', '.join(other)} differ); give another --folder"
        )
    print("".join(f"{name}: {value}\n" for name, value in protocol.items() if name != "recipes"))
    for recipe in protocol["recipes"].values():
        print(recipe)


class UsedText:
    """A text that recipes were calibrated or tuned on, as hashes of its chunks."""

    def __init__(self, text: str) -> None:
        words = text.split()
        starts = range(0, len(words) - PASSAGE + 1, PASSAGE)
        self._chunks = {hash(" ".join(words[i : i + PASSAGE])) for i in starts}

    def passage_in(self, sample: Sample) -> str | None:
        """Return the start of a passage that a sample shares with the text; None without one."""
        words = f"{sample.context} {sample.reference}".split()
        for i in range(len(words) - PASSAGE + 1):
            if hash(" ".join(words[i : i + PASSAGE])) in self._chunks:
                return " ".join(words[i : i + 8])
        return None

    def without(self, batches: list[Batch]) -> tuple[list[Batch], list[str]]:
        """Return the batches that share no passage; the samples for which others are refused."""
        kept, refused = [], []
        for batch in batches:
            shared = [x.name for x in batch.samples if self.passage_in(x) is not None]
            refused += shared
            if not shared:
                kept.append(batch)
        return kept, refused


def text_sha256(sample: Sample) -> str:
    """Return a hash of the texts of a sample."""
    return sha256(sample.name, sample.context, sample.question, sample.reference)


def sha256(*parts: str) -> str:
    """Return a hash of texts in their order."""
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()
