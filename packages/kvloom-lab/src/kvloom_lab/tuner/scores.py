"""The scores of a model: KL divergences by text, layer and choice, as JSON lines in a folder.

An interrupted pass is continued.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvloom.errors import InputError

from ..workload.files import append_lines, cache_folder, finished_lines
from .candidates import Choice, Scored

FORMAT = 2


class Scores:
    """KL divergences in nats of the choices of one layer at a time.

    scored: the choices. about: what the scores depend on: the model, the text and the settings.
    folder: where they are; None: in kvloom's cache folder, under a name that `about` determines.
    Raises `InputError` if they belong to something else, or cannot be written.
    """

    def __init__(self, scored: Scored, about: dict[str, Any], folder: Path | None = None) -> None:
        self.scored = scored
        self.choices = {"formats": scored.formats, "kept": scored.kept}
        self.names = {group: list(map(str, x)) for group, x in self.choices.items()}
        others = {"others": str(scored.others)}
        about = {"format": FORMAT, "choices": self.names | others, **about}
        spelled = json.dumps(about, indent=2, sort_keys=True)
        name = hashlib.sha256(spelled.encode()).hexdigest()[:16]
        self.folder = folder or cache_folder() / "tune" / name
        self.lines: dict[tuple[int, int], dict[str, list[list[float]]]] = {}
        """By text and layer: of each list of choices, divergences [choices, T]."""
        header = self.folder / "about.json"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            if not header.exists():
                header.write_text(spelled, encoding="utf-8")
        except OSError as error:
            raise InputError(
                f"cannot write to {str(self.folder)!r}: {error.strerror}; give another folder"
            ) from error
        if header.read_text(encoding="utf-8") != spelled:
            raise InputError(
                f"{str(self.folder)!r} has the scores of another model, text or settings; give "
                "another folder"
            )
        self._file = self.folder / "scores.jsonl"
        for record in finished_lines(self._file):
            line = record.value
            try:
                self.lines[line["text"], line["layer"]] = {
                    group: [line[group][name] for name in names]
                    for group, names in self.names.items()
                }
            except (KeyError, TypeError):
                raise record.problem("is not a line of scores") from None

    def __contains__(self, place: tuple[int, int]) -> bool:
        return place in self.lines

    def add(self, text: int, layer: int, divergences: dict[str, Tensor]) -> None:
        """Store and write the divergences fp32 [choices, T] of a layer (the model's number).

        divergences: of the choices `formats` and `kept`.
        """
        rows = {
            group: [[float(f"{x:.4g}") for x in row] for row in kl.tolist()]
            for group, kl in divergences.items()
        }
        named = {group: dict(zip(self.names[group], kl, strict=True)) for group, kl in rows.items()}
        line = {"text": text, "layer": layer, **named}
        append_lines(self._file, [line], "the finished scores")
        self.lines[text, layer] = rows

    def costs(self, layer: int) -> dict[Choice, float]:
        """Return how much larger the mean divergence is with each choice than with the exact one.

        An exact layer among others that evict has a divergence, too, so some costs are negative.
        """
        costs: dict[Choice, float] = {}
        for group, choices in self.choices.items():
            lines = [x for (_, i), x in self.lines.items() if i == layer]
            means = torch.cat([torch.tensor(x[group]) for x in lines], dim=1).mean(dim=1)
            costs |= dict(zip(choices, (means - means[0]).tolist(), strict=True))
        return costs
