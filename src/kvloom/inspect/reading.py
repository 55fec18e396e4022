"""What a layer that recalls read, step by step, and which cluster or page each token is in.

Decides how it is noted: what comes and goes from step to step is a list by step, of stretches.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..cache.layer import LayerCache

NEVER = -1
NOT_READ = {"read": None, "read_mass": None, "indexed": None, "parts": None}
"""Of a head that reads all it holds."""


class Reading:
    """Notes on one layer that recalls; its cache must `trace`."""

    def __init__(self, layer: LayerCache, heads: int, tokens: int) -> None:
        """Make room for the tokens of the whole run."""
        assert layer.retriever is not None
        self.layer, self.retriever = layer, layer.retriever
        self.kind = layer.retriever.recall.index.kind
        self.indexed = torch.full((heads, tokens), NEVER)
        self.parts = self.indexed.clone()
        self.end = 0  # tokens of the body that the index has to find, or that are always read
        self.read: list[Tensor] = []  # by step, bool [Hk, seen]
        self.mass: list[Tensor] = []  # by step, [Hk]

    def after(self, step: int, held: Tensor, body: Tensor, mass: Tensor) -> None:
        """Take in a step: what it held, bool [Hk, N], where the body lies, and its attention."""
        assert self.layer.trace is not None
        read, chosen = held.clone(), self.layer.trace.recalled
        if chosen is not None:
            slots = chosen[0].reshape(len(held), -1).cpu()
            read.scatter_(1, body[:, : self.end], False)
            read.scatter_(1, body.gather(1, slots), True)
        self.read.append(read)
        self.mass.append((mass * read).sum(dim=1) / mass.sum(dim=1))
        front, known = self.layer.recipe.pinned_prefix, self.retriever.finder.tokens
        self.end = front + known if known else 0
        inside = body[:, front : self.end]
        before = self.indexed.gather(1, inside)
        self.indexed.scatter_(1, inside, torch.where(before == NEVER, step, before))
        parts = self.retriever.finder.parts() if known else None
        if parts is not None:
            self.parts.scatter_(1, inside, parts[0].cpu())

    def plain(self, head: int, tokens: int) -> dict[str, Any]:
        """Return the notes on a head and the first `tokens` tokens as plain data."""
        return {
            "read": [stretches(read[head]) for read in self.read],
            "read_mass": [round(mass[head].item(), 6) for mass in self.mass],
            "indexed": self.indexed[head, :tokens].tolist(),
            "parts": None if self.kind == "topk" else self.parts[head, :tokens].tolist(),
        }


def stretches(marks: Tensor) -> list[int]:
    """Where bool marks [N] are True: [first, how many, first, how many, ...]."""
    padded = torch.cat([marks.new_zeros(1), marks, marks.new_zeros(1)]).int()
    begins, ends = ((padded.diff() == sign).nonzero().flatten() for sign in (1, -1))
    return torch.stack([begins, ends - begins], dim=1).flatten().tolist()
