"""Expected Attention's score: the attention that later queries are expected to pay to a token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..errors import RecipeError
from ..kernels.attend.reference import softcapped
from ..registry.fields import check_fields, check_whole
from .scorer import Scorer, Step


@dataclass(frozen=True)
class Expected(Scorer):
    """Expected attention of later queries, times the length of the value (arXiv:2510.00636).

    Section 3: later queries are Gaussian, with the mean and covariance of the step's queries before
    RoPE, both rotated to each of the next positions and averaged. The expected logit of a key is
    then k m + k C k / 2; softmax over the keys makes it a weight w, and the score is (w + epsilon)
    |v|. Sinks take part in neither, and get the largest score.

    Attributes:
        future: How many next positions.
        epsilon: See above.
    """

    future: int = 512
    epsilon: float = 0.0
    kind: ClassVar[str] = "expected"
    needs_rope: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_whole("future", self.future, 1, " of positions")
        check_fields(self, "epsilon")
        if self.epsilon < 0:
            raise RecipeError(f"epsilon={self.epsilon} must be 0 or more")

    def __call__(self, step: Step) -> Tensor:
        """Return fp32 [B, Hk, N]."""
        b, hk, n, d = step.k.shape
        first = step.sink_mask
        mean, covariance = self._queries(step, ~first[..., n - step.q.shape[2] :])
        mean, covariance = mean.view(b, hk, -1, d), covariance.view(b, hk, -1, d, d)
        k = step.k.float()
        logits = step.scale * (mean @ k.transpose(-1, -2))  # [B, Hk, R, N]
        keys = k[:, :, None]
        logits += step.scale**2 / 2 * ((keys @ covariance) * keys).sum(dim=-1)
        logits = softcapped(logits, step.softcap)
        if step.bias is not None:
            logits += step.bias.view(-1, hk, logits.shape[2], n)
        hidden = first if step.visible is None else first | ~step.visible
        weights = logits.masked_fill(hidden[:, :, None], -torch.inf).softmax(dim=-1).nan_to_num(0.0)
        scores = (step.join_query_heads(weights) + self.epsilon) * step.v.float().norm(dim=-1)
        return torch.where(first, scores.amax(dim=-1, keepdim=True), scores)

    def _queries(self, step: Step, counted: Tensor) -> tuple[Tensor, Tensor]:
        """Return the mean [B, Hq, D] and the covariance [B, Hq, D, D] of later queries, in fp32.

        counted: bool [B or 1, 1 or Hk, T], the step's queries that they are estimated from.
        """
        q, t = step.q.float(), step.q.shape[2]
        if step.visible_queries is not None:
            counted = counted & step.visible_queries
        weight = counted[:, :1, :, None].float()  # [B or 1, 1, T, 1]
        total = weight.sum(dim=2).clamp_min(1.0)
        if step.rope is not None:
            q = step.rope.rotate(q, -torch.arange(step.seen - t, step.seen).expand(1, 1, -1))
        mean = (q * weight).sum(dim=2) / total
        centered = (q - mean[:, :, None]) * weight
        covariance = centered.transpose(-1, -2) @ centered / total[..., None]
        if step.rope is not None:
            later = torch.arange(step.seen, step.seen + self.future)
            mean = step.rope.rotate_mean(mean, later)
            rotated = step.rope.rotate_mean(covariance, later).transpose(-1, -2)
            covariance = step.rope.rotate_mean(rotated, later).transpose(-1, -2)
        return mean, covariance
