"""Record what a layer with recall read at each step, and the cluster or page of each token.

The tokens that a step reads change from step to step, so they are stored as a list by step, as runs
of consecutive tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvloom.cache.layer import LayerCache

NEVER = -1
NO_RECALL = {"read": None, "read_mass": None, "indexed": None, "parts": None}
"""The record of a head that reads its whole cache."""


class RecallTrace:
    """The record of one layer with recall; it must be observed (`LayerCache.observe`)."""

    def __init__(self, layer: LayerCache, heads: int, tokens: int) -> None:
        """Allocate the record for the tokens of the whole run."""
        assert layer.state.retriever is not None
        self.layer, self.retriever = layer, layer.state.retriever
        self.kind = self.retriever.recall.index.kind
        self.indexed = torch.full((heads, tokens), NEVER)
        self.parts = self.indexed.clone()
        self.end = 0  # the number of pinned and indexed tokens of the segment
        self.read: list[Tensor] = []  # by step, bool [Hk, seen]
        self.mass: list[Tensor] = []  # by step, [Hk]

    def after_step(self, step: int, cached: Tensor, body: Tensor, mass: Tensor) -> None:
        """Record a step.

        cached: bool [Hk, N], tokens in the cache. body: int64 [Hk, M], the tokens of the cache's
        body. mass: fp32 [Hk, N], exact attention mass of the step.
        """
        trace = self.layer.state.trace
        assert trace is not None
        read, chosen = cached.clone(), trace.recalled
        if chosen is not None:
            slots = chosen[0].reshape(len(cached), -1).cpu()
            read.scatter_(1, body[:, : self.end], False)
            read.scatter_(1, body.gather(1, slots), True)
        self.read.append(read)
        self.mass.append((mass * read).sum(dim=1) / mass.sum(dim=1))
        prefix, indexed_tokens = self.layer.recipe.pinned_prefix, self.retriever.finder.tokens
        self.end = prefix + indexed_tokens if indexed_tokens else 0
        inside = body[:, prefix : self.end]
        before = self.indexed.gather(1, inside)
        self.indexed.scatter_(1, inside, torch.where(before == NEVER, step, before))
        parts = self.retriever.finder.parts() if indexed_tokens else None
        if parts is not None:
            self.parts.scatter_(1, inside, parts[0].cpu())

    def plain(self, head: int, tokens: int) -> dict[str, Any]:
        """Return the record of a head and the first `tokens` tokens as plain data."""
        return {
            "read": [runs(read[head]) for read in self.read],
            "read_mass": [round(mass[head].item(), 6) for mass in self.mass],
            "indexed": self.indexed[head, :tokens].tolist(),
            "parts": None if self.kind == "topk" else self.parts[head, :tokens].tolist(),
        }


def runs(marks: Tensor) -> list[int]:
    """Return the runs of True in bool marks [N]: [first, length, first, length, ...]."""
    padded = torch.cat([marks.new_zeros(1), marks, marks.new_zeros(1)]).int()
    begins, ends = ((padded.diff() == sign).nonzero().flatten() for sign in (1, -1))
    return torch.stack([begins, ends - begins], dim=1).flatten().tolist()
