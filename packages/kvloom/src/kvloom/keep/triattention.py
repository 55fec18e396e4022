"""TriAttention's score: the logits of mean queries at later positions, and lengths of keys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..positions.rope import Rope
from ..registry.fields import check_whole
from .scorer import Scorer, Step


@dataclass(frozen=True)
class TriAttention(Scorer):
    """The mean query's logit at later positions, and the lengths of a key (arXiv:2604.04921).

    RoPE rotates pairs of channels f. The score of a query head is the sum of two terms:

        k . mean over d of RoPE(E q, seen - 1 + d),  d = 1, 2, 4, .. up to `furthest`
        sum over f of (E |q_f| - |E q_f|) |k_f|

    E is the mean over the step's queries before RoPE, but for sinks. The first term is a sum of
    cosines of the distance. The second one counts where queries differ, so that their mean is
    short. Each query head's scores are standardized before a group is combined. Sinks take no part,
    and get the largest score.

    Attributes:
        furthest: The furthest later position.
    """

    furthest: int = 65536
    kind: ClassVar[str] = "triattention"
    needs_rope: ClassVar[bool] = True
    supports_alibi: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_whole("furthest", self.furthest, 1)

    def __call__(self, step: Step) -> Tensor:
        """Return fp32 [B, Hk, N]."""
        b, hk, n, d = step.k.shape
        sinks = step.sink_mask
        mean, lengths = _of_queries(step, ~sinks[..., n - step.q.shape[2] :])
        k = step.k.float()
        if step.rope is not None:
            later = 2 ** torch.arange(self.furthest.bit_length()) + step.seen - 1
            mean = step.rope.rotate_mean(mean, later)
        scores = mean.view(b, hk, -1, d) @ k.transpose(-1, -2)  # [B, Hk, R, N]
        if step.rope is not None:
            scores += lengths.view(b, hk, scores.shape[2], -1) @ _lengths(step.rope, k).transpose(
                -1, -2
            )
        hidden = sinks if step.visible is None else sinks | ~step.visible
        scores = step.join_query_heads(_standardized(scores, ~hidden[:, :, None]))
        best = scores.masked_fill(hidden, -torch.inf).amax(dim=-1, keepdim=True)
        return torch.where(sinks, best.clamp_min(0.0), scores)


def _of_queries(step: Step, counted: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean query before RoPE, fp32 [B, Hq, D], and E |q_f| - |E q_f| [B, Hq, F].

    counted: bool [B or 1, 1 or Hk, T], the queries that are averaged.
    """
    q, t = step.q.float(), step.q.shape[2]
    if step.visible_queries is not None:
        counted = counted & step.visible_queries
    weight = counted[:, :1, :, None].float()  # [B or 1, 1, T, 1]
    weight = weight / weight.sum(dim=2, keepdim=True).clamp_min(1.0)
    if step.rope is None:
        return (q * weight).sum(dim=2), q.new_zeros(0)
    raw = step.rope.rotate(q, -torch.arange(step.seen - t, step.seen).expand(1, 1, -1))
    mean = (raw * weight).sum(dim=2)
    lengths = (_lengths(step.rope, q) * weight).sum(dim=2)
    return mean, lengths - _lengths(step.rope, mean)


def _lengths(rope: Rope, x: Tensor) -> Tensor:
    """Return the length of each pair that RoPE rotates, [..., dims / 2], of x [..., D]."""
    rotary = x[..., : 2 * len(rope.inv_freq)]
    shape = (-1, 2) if rope.interleaved else (2, -1)
    return rotary.unflatten(-1, shape).norm(dim=-1 if rope.interleaved else -2)


def _standardized(scores: Tensor, counted: Tensor) -> Tensor:
    """Return scores with mean 0 and variance 1 over the counted tokens, 0 for all others.

    scores: [B, Hk, R, N]. counted: bool [B or 1, 1 or Hk, 1, N].
    """
    total = counted.sum(dim=-1, keepdim=True).clamp_min(1)
    centered = (scores - (scores * counted).sum(dim=-1, keepdim=True) / total) * counted
    deviation = (centered.square().sum(dim=-1, keepdim=True) / total).sqrt()
    return centered / deviation.clamp_min(1e-6)
