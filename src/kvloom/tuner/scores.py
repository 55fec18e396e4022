"""The scores of a model: KL divergences by text, layer and choice, as JSON lines in a folder.

Decides the files, and that an interrupted pass is continued.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import InputError
from ..workload.smollm2 import cache_folder
from .candidates import Choice

FORMAT = 1


class Scores:
    """KL divergences in nats of each choice alone, all other layers being exact.

    choices: those of `candidates.single`. about: what the scores depend on: the model, the text and
    the settings. folder: where they are; None: in kvloom's cache folder, under a name that `about`
    determines. Raises `InputError` if they belong to something else, or cannot be written.
    """

    def __init__(
        self, choices: Sequence[Choice], about: dict[str, Any], folder: Path | None = None
    ) -> None:
        self.choices = choices
        about = {"format": FORMAT, "choices": list(map(str, choices)), **about}
        spelled = json.dumps(about, indent=2, sort_keys=True)
        name = hashlib.sha256(spelled.encode()).hexdigest()[:16]
        self.folder = folder or cache_folder() / "tune" / name
        self.lines: dict[tuple[int, int], list[list[float]]] = {}
        header = self.folder / "about.json"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            if not header.exists():
                header.write_text(spelled, encoding="utf-8")
        except OSError as error:
            raise InputError(f"cannot write to {str(self.folder)!r}: {error.strerror}") from error
        if header.read_text(encoding="utf-8") != spelled:
            raise InputError(
                f"{str(self.folder)!r} has the scores of another model, text or settings; give "
                "another folder"
            )
        self._read()

    def __contains__(self, place: tuple[int, int]) -> bool:
        return place in self.lines

    def add(self, text: int, layer: int, found: Tensor) -> None:
        """Note and write the divergences fp32 [choices, T] of a layer (the model's number)."""
        rows = [[float(f"{x:.4g}") for x in row] for row in found.tolist()]
        kl = dict(zip(map(str, self.choices), rows, strict=True))
        line = {"text": text, "layer": layer, "kl": kl}
        try:
            with self._file.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
        except OSError as error:
            raise InputError(
                f"cannot write to {str(self._file)!r}: {error.strerror}; what was scored is kept: "
                "free some space and run the same command again"
            ) from error
        self.lines[text, layer] = rows

    def costs(self, layer: int) -> dict[Choice, float]:
        """Return the mean divergence of each choice, without that of rounding.

        The exact choice shows what rounding alone makes; see `Prompt.one_layer`.
        """
        rows = [torch.tensor(kl) for (_, number), kl in self.lines.items() if number == layer]
        means = torch.cat(rows, dim=1).mean(dim=1)
        rounding = means[self.choices.index(Choice())]
        return dict(zip(self.choices, (means - rounding).clamp(min=0).tolist(), strict=True))

    @property
    def _file(self) -> Path:
        return self.folder / "scores.jsonl"

    def _read(self) -> None:
        """Read the finished lines; remove a last line that was written in part."""
        if not self._file.exists():
            return
        content = self._file.read_bytes()
        whole = content[: content.rfind(b"\n") + 1]
        if whole != content:
            os.truncate(self._file, len(whole))
        for number, text in enumerate(whole.decode().splitlines(), start=1):
            try:
                line = json.loads(text)
                rows = [line["kl"][str(choice)] for choice in self.choices]
                self.lines[line["text"], line["layer"]] = rows
            except (ValueError, KeyError, TypeError) as error:
                raise InputError(
                    f"line {number} of {str(self._file)!r} is damaged; remove the line"
                ) from error
