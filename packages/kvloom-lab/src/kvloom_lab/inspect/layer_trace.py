"""Record, step by step, which tokens each head of a layer has in its cache, and in which format.

An evicted or packed token stays so. Hence one number for each token, the step of the change,
describes all steps. The tokens that a step of recall reads change from step to step, so they are
stored as a list by step, as runs of consecutive tokens.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from kvloom.cache import LayerCache, LayerContents, layer_contents
from kvloom.hf import ObservedStep

NEVER = -1


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
        self.contents: LayerContents | None = None
        # With recall: what each step read, and each token's place in the index.
        self.index = None if layer.recipe.recall is None else layer.recipe.recall.index.kind
        self.read: list[Tensor] = []  # by step, bool [Hk, seen]
        self.read_mass: list[Tensor] = []  # by step, [Hk]
        self.indexed, self.parts = self.gone.clone(), self.gone.clone()

    def before_attention(self, step: ObservedStep) -> None:
        """Compute the exact attention mass of a step."""
        heads, n = step.keys.shape[1:3]
        self.step_mass = step.mass()[0].view(heads, -1, n).sum(dim=1).cpu()

    def after_step(self, step: int) -> None:
        """Record the content of the cache after a step."""
        contents, before = layer_contents(self.layer), self.contents
        kept, seen = contents.kept, self.layer.seen
        gone = self.gone[:, :seen]
        assert not (kept & (gone != NEVER)).any(), "an evicted token is in the cache again"
        gone[~kept & (gone == NEVER)] = step
        self.held.append(round(kept.sum().item() / len(kept)))
        self.mass.append(self._share(kept))
        for side, packed in self.packed.items():
            packed[:, :seen][contents.packed[side] & (packed[:, :seen] == NEVER)] = step
        if self.index is not None:
            self._record_recall(step, contents, before)
        if contents.scores is not None and (
            before is None or contents.scores is not before.scores
        ):  # an eviction in this step
            index, scores = (x[0].cpu() for x in contents.scores)
            self.last_scores.scatter_(1, index, scores)
            if step == 0:
                self.first_scores.scatter_(1, index, scores)
        self.contents = contents

    def _record_recall(
        self, step: int, contents: LayerContents, before: LayerContents | None
    ) -> None:
        """Record what a step read: all tokens but those that it could leave out and did."""
        read = contents.kept.clone()
        if contents.recalled is not None:
            if before is not None:
                tokens = before.selectable.shape[1]
                read[:, :tokens] &= ~before.selectable
            read |= contents.recalled
        self.read.append(read)
        self.read_mass.append(self._share(read))
        indexed = self.indexed[:, : self.layer.seen]
        indexed[contents.indexed & (indexed == NEVER)] = step
        parts = self.parts[:, : self.layer.seen]
        parts[contents.indexed] = contents.parts[contents.indexed]

    def _share(self, tokens: Tensor) -> Tensor:
        """Return the share of the step's attention mass on tokens, bool [Hk, N]; fp32 [Hk]."""
        return (self.step_mass * tokens).sum(dim=1) / self.step_mass.sum(dim=1)

    def plain(self, tokens: int) -> dict[str, Any]:
        """Return the record of the first `tokens` tokens as plain data; see `trace_recipe`."""
        contents = self.contents
        assert contents is not None
        return {
            "number": self.number,
            "budget": contents.budget_tokens,
            "index": self.index,
            "held": self.held,
            "heads": [
                {
                    "gone": self.gone[h, :tokens].tolist(),
                    "mass": [round(m[h].item(), 6) for m in self.mass],
                    "scores": {
                        "first": _plain_scores(self.first_scores[h, :tokens]),
                        "last": _plain_scores(self.last_scores[h, :tokens]),
                    }
                    if contents.sums_scores
                    else None,
                    "packed": {side: x[h, :tokens].tolist() for side, x in self.packed.items()}
                    or None,
                    **self._plain_recall(h, tokens),
                }
                for h in range(len(self.gone))
            ],
        }

    def _plain_recall(self, head: int, tokens: int) -> dict[str, Any]:
        """Return what recall read for a head; None for one that reads its whole cache."""
        if self.index is None:
            return dict.fromkeys(("read", "read_mass", "indexed", "parts"))
        return {
            "read": [runs(read[head]) for read in self.read],
            "read_mass": [round(mass[head].item(), 6) for mass in self.read_mass],
            "indexed": self.indexed[head, :tokens].tolist(),
            "parts": None if self.index == "topk" else self.parts[head, :tokens].tolist(),
        }


def runs(marks: Tensor) -> list[int]:
    """Return the runs of True in bool marks [N]: [first, length, first, length, ...]."""
    padded = torch.cat([marks.new_zeros(1), marks, marks.new_zeros(1)]).int()
    begins, ends = ((padded.diff() == sign).nonzero().flatten() for sign in (1, -1))
    return torch.stack([begins, ends - begins], dim=1).flatten().tolist()


def _plain_scores(scores: Tensor) -> list[float | str | None]:
    def plain(x: float) -> float | str | None:
        return None if math.isnan(x) else "inf" if x == math.inf else float(f"{x:.4g}")

    return [plain(x) for x in scores.tolist()]
