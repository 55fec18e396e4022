"""Record, step by step, which tokens each head of a layer has in its cache, and in which format.

An evicted or packed token stays so. Hence one number for each token, the step of the change,
describes all steps.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from kvloom.cache.layer import LayerCache
from kvloom.cache.reading import marked
from kvloom.cache.segment import Segment
from kvloom.hf.observe import ObservedStep
from kvloom.kernels import ops

from .recall_trace import NEVER, NO_RECALL, RecallTrace


class LayerTrace:
    """The record of one layer: int64 gone and packed [Hk, N], fp32 scores [Hk, N]."""

    def __init__(self, number: int, layer: LayerCache, heads: int, tokens: int) -> None:
        """Allocate the record for the tokens of the whole run."""
        self.number, self.layer = number, layer
        self.gone = torch.full((heads, tokens), NEVER)
        packs = () if layer.recipe.store.exact else ("keys", "values")
        self.packed = {side: self.gone.clone() for side in packs}
        self.first_scores = torch.full((heads, tokens), math.nan)
        self.last_scores = self.first_scores.clone()
        self.held: list[int] = []  # by step, tokens in the cache of a head, on average
        self.mass: list[Tensor] = []  # by step, [Hk]
        self.step_mass = torch.empty(0)  # exact attention mass of the current step, [Hk, N]
        self.choice: Any = None
        self.recall: RecallTrace | None = None
        if layer.state.retriever is not None:
            self.recall = RecallTrace(layer, heads, tokens)

    def before_attention(self, look: ObservedStep) -> None:
        """Compute the exact attention mass of a step."""
        mass = ops.column_mass(look.q, look.keys, look.scale, softcap=look.softcap, bias=look.bias)
        heads, n = look.keys.shape[1], look.keys.shape[2]
        self.step_mass = mass[0].view(heads, -1, n).sum(dim=1).cpu()

    def after_step(self, step: int) -> None:
        """Record the content of the cache after a step."""
        seen, index = self.layer.seen, self.layer.logical()[0].cpu()
        cached = marked(index, seen)
        gone = self.gone[:, :seen]
        assert not (cached & (gone != NEVER)).any(), "an evicted token is in the cache again"
        gone[~cached & (gone == NEVER)] = step
        self.held.append(round(cached.sum().item() / len(cached)))
        self.mass.append((self.step_mass * cached).sum(dim=1) / self.step_mass.sum(dim=1))
        sinks = self.layer.state.sinks
        begin = 0 if sinks is None else sinks.count
        if self.recall is not None:
            self.recall.after_step(step, cached, index[:, begin:], self.step_mass)
        self._record_packed(step, cached, index, begin)
        self._record_scores(step)

    def plain(self, tokens: int) -> dict[str, Any]:
        """Return the record of the first `tokens` tokens as plain data; see `trace_recipe`."""
        evictor = self.layer.state.evictor
        scored = evictor is not None and not evictor.keep.by_age
        return {
            "number": self.number,
            "budget": None if evictor is None else evictor.budget_tokens,
            "index": None if self.recall is None else self.recall.kind,
            "held": self.held,
            "heads": [
                {
                    "gone": self.gone[h, :tokens].tolist(),
                    "mass": [round(m[h].item(), 6) for m in self.mass],
                    "scores": {
                        "first": _plain_scores(self.first_scores[h, :tokens]),
                        "last": _plain_scores(self.last_scores[h, :tokens]),
                    }
                    if scored
                    else None,
                    "packed": {side: x[h, :tokens].tolist() for side, x in self.packed.items()}
                    or None,
                    **(NO_RECALL if self.recall is None else self.recall.plain(h, tokens)),
                }
                for h in range(len(self.gone))
            ],
        }

    def _record_packed(self, step: int, cached: Tensor, index: Tensor, begin: int) -> None:
        """Record the tokens that are packed now; `begin` is the first token of the segment."""
        state = self.layer.state
        tokens = state.storage
        if not isinstance(tokens, Segment):
            return
        for name, side in (("keys", tokens.keys), ("values", tokens.values)):
            if name not in self.packed:
                continue
            packed = self.packed[name][:, : self.layer.seen]
            offloaded = 0 if side.packed is None else tokens.offloaded
            packed_indices = [index[:, begin : begin + offloaded + side.packed_count]]
            ragged = None if state.evictor is None else state.evictor.ragged
            if side.packed is not None and ragged is not None:
                packed_indices.append(index[:, begin + len(tokens) :])  # all packed at once
            is_packed = marked(torch.cat(packed_indices, dim=1), cached.shape[1])
            packed[is_packed & (packed == NEVER)] = step

    def _record_scores(self, step: int) -> None:
        """Record the scores of the last eviction, if there was one at this step."""
        trace = self.layer.state.trace
        choice = None if trace is None else trace.scored
        if choice is None or choice is self.choice:
            return
        self.choice = choice
        index, scores = (x[0].cpu() for x in choice)
        self.last_scores.scatter_(1, index, scores)
        if step == 0:
            self.first_scores.scatter_(1, index, scores)


def _plain_scores(scores: Tensor) -> list[float | str | None]:
    def plain(x: float) -> float | str | None:
        return None if math.isnan(x) else "inf" if x == math.inf else float(f"{x:.4g}")

    return [plain(x) for x in scores.tolist()]
