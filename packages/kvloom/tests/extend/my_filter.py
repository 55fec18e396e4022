"""A filter rule: tokens with some ids stay exact, such as punctuation; the others are packed."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

import kvloom
from kvloom.keep import Scorer, Step


@kvloom.register_score
@dataclass(frozen=True)
class TokenIds(Scorer):
    """Tokens with one of these ids, the newest first.

    ids: of the model's tokenizer.
    """

    ids: tuple[int, ...] = (16, 18)
    kind: ClassVar[str] = "token-ids"
    reads_ids: ClassVar[bool] = True

    def __call__(self, step: Step) -> Tensor:
        """Return fp32 [B, Hk, N]: a token's position where its id is one of `ids`, else 0."""
        found = torch.isin(step.ids, torch.tensor(self.ids, device=step.ids.device))
        score = found * (step.index[:, 0] + 1.0)
        return score[:, None].expand(step.k.shape[:3]).contiguous()
