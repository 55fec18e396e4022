"""KVzip's score: the attention that a token receives while the model repeats the prompt.

Decides the score alone. `hf.repetition` runs the model, `cache.scoring` collects the scores.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..errors import RecipeError
from ..registry.fields import check_fields
from .scorer import Scorer, Step

# Weights of one block of query rows hold about this many numbers (4 MiB in fp32), or one row.
_BLOCK_NUMEL = 1 << 20


@dataclass(frozen=True)
class Reconstruction(Scorer):
    """The largest attention weight while the model repeats the prompt (KVzip, arXiv:2505.23416).

    Section 3.2: after the prompt, the model reads it again in chunks, each behind the instruction.
    A repeated token attends to the sinks, to its chunk in the prompt and to the repeated tokens up
    to itself.

    Attributes:
        chunk: Tokens of a chunk.
        instruction: Token ids, separated by spaces, or "none".
    """

    chunk: int = 2048
    instruction: str = "none"
    kind: ClassVar[str] = "reconstruction"
    repeats: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_fields(self, "chunk", "instruction")
        if self.chunk < 1:
            raise RecipeError(f"chunk={self.chunk} must be 1 token or more")
        ids = self.instruction.split()
        if self.instruction != "none" and not (ids and all(map(_is_id, ids))):
            raise RecipeError(
                f"instruction={self.instruction!r} must be token ids separated by spaces, such as "
                '"198 41736", or "none"; encode the text by the tokenizer of the model'
            )

    @property
    def instruction_ids(self) -> list[int]:
        """The token ids of the instruction."""
        return [] if self.instruction == "none" else [int(x) for x in self.instruction.split()]

    def __call__(self, step: Step) -> Tensor:
        """Return each token's largest weight in any row of queries: fp32 [B, Hk, N]."""
        b, hk, n, d = step.k.shape
        t = step.q.shape[2]
        rows = step.q.float().reshape(b, hk, -1, t, d) * step.scale
        keys = step.k.float().transpose(-1, -2)
        largest = step.q.new_zeros(b, hk, rows.shape[2], n, dtype=torch.float32)
        at_once = max(1, _BLOCK_NUMEL // (b * step.q.shape[1] * n))
        for lo in range(0, t, at_once):
            hi = min(t, lo + at_once)
            end = n - t + hi  # no row of this block sees further
            weights = _weights(step, rows[:, :, :, lo:hi], keys[..., :end], lo)
            block = largest[..., :end]
            torch.maximum(block, weights.amax(dim=3), out=block)
        return step.grouped(largest)


def _is_id(text: str) -> bool:
    return text.isascii() and text.isdigit()


def _weights(step: Step, rows: Tensor, keys: Tensor, lo: int) -> Tensor:
    """Return the attention weights [B, Hk, R, T, N] of rows [B, Hk, R, T, D], the first being lo.

    rows: scaled queries. keys: [B, Hk, D, N]; the last row's own key is the last.
    """
    b, hk, r, t, d = rows.shape
    n = keys.shape[-1]
    logits = (rows.reshape(b, hk, r * t, d) @ keys).view(b, hk, r, t, n)
    if step.softcap is not None:
        logits = torch.tanh(logits / step.softcap) * step.softcap
    if step.bias is not None:
        logits += step.bias.view(-1, hk, r, 1, step.bias.shape[-1])[..., :n]
    later = torch.ones(t, t, dtype=torch.bool, device=rows.device).triu_(1)
    logits[..., n - t :].masked_fill_(later, -torch.inf)
    if step.visible is not None:
        logits.masked_fill_(~step.visible[:, :, None, None, :n], -torch.inf)
    weights = logits.softmax(dim=-1)
    if step.visible is not None:
        weights = weights.nan_to_num(0.0)  # a row that sees nothing
    if step.visible_queries is not None:
        weights = weights * step.visible_queries[:, :, None, lo : lo + t, None]
    return weights
