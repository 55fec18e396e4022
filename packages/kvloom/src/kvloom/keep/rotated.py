"""A score by the prompt's own queries, as if its tokens were repeated.

Decides the score alone: of one prompt, whose queries are all at hand.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import RecipeError
from ..kernels.attend.reference import softcapped
from ..registry.fields import check_fields, check_whole
from .chunks import chunks, longest, query_shift
from .reconstruction import Reconstruction
from .scorer import Scorer, Step

_PRECISE = 1e-3  # of a query's weights; less than this is not computed as 1 - the rest
_AT_ONCE = 64  # queries
SHARE = 6
"""Tokens of a prompt for each example; shorter prompts gain nothing by them."""


@dataclass(frozen=True)
class Rotated(Scorer):
    """The largest attention weight that the prompt's own queries would pay after the prompt.

    KVzip (arXiv:2505.23416) lets the model read the prompt again. The queries of a repeated token
    are nearly those of the token itself, at a later position. So this score rotates the queries of
    a chunk to the first positions after the prompt instead; less far, where the model has fewer
    positions. There, a query attends to the sinks and to its whole chunk. The softmax denominator
    also includes the query's logits for tokens of the chunk up to itself at their original
    distance: they stand for the tokens that a repetition would have read.

    A weight alone does not say what a token adds to the residual stream. With `contribution`, the
    score is multiplied by the norm of the token's value and divided by the mean norm of the layer's
    input. So the scores of layers and heads that compete for a budget can be compared.

    Attributes:
        chunk: The most tokens of a chunk; in a model, at most half of its positions. Chunks are
            equally long.
        contribution: Whether a token counts by what it adds. In models whose layers do not take
            hidden states [B, T, D] as their first argument, only the norm of its value counts.
        examples: First tokens of the prompt that the model reads three times, before the prompt.
            They show how a repetition changes queries; those of all tokens are then changed
            likewise (`QueryPredictor`). 0 (or a prompt of less than six times as many tokens, one
            with images, a layer that runs without its model, or `compress_after`): the queries
            stay as they are. Otherwise 16 or more.
        neighbors: The share of both neighbors' scores that is added to a score: tokens often belong
            together, as the digits of a number.
    """

    chunk: int = 2048
    contribution: bool = True
    examples: int = 0
    neighbors: float = 0.0
    kind: ClassVar[str] = "rotated"
    needs_rope: ClassVar[bool] = True
    rotates_queries: ClassVar[bool] = True
    of_prompt: ClassVar[bool] = True
    supports_alibi: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_fields(self, "contribution", "neighbors")
        check_whole("chunk", self.chunk, 1)
        if self.examples != 0:
            check_whole("examples", self.examples, 16, ", or 0")
        if not 0 <= self.neighbors <= 1:
            raise RecipeError(f"neighbors={self.neighbors} must be a number from 0 to 1; use 0.1")

    def least_shift(self, tokens: int) -> int:
        """Return by how many positions queries of a prompt of `tokens` tokens rotate, at least."""
        return longest(tokens, self.chunk)

    @property
    def least_prompt(self) -> int:
        """The tokens of the shortest prompt that has examples."""
        return SHARE * self.examples

    @property
    def uses_input_norms(self) -> bool:
        """Whether it reads `Step.norms`."""
        return self.contribution

    @property
    def without_rotation(self) -> Reconstruction:
        """The score that it stands for: the model repeats the prompt."""
        return Reconstruction(self.chunk)

    def __call__(self, step: Step) -> Tensor:
        """Return fp32 [B, Hk, N]; 0 for tokens of a chunk without queries."""
        scores = self._weights(step)
        if self.contribution:
            scores = scores * _contributions(step)
        if self.neighbors:
            around = F.pad(scores, (1, 1))
            scores = scores + self.neighbors * (around[..., :-2] + around[..., 2:])
        return scores

    def _weights(self, step: Step) -> Tensor:
        """Return the largest weights fp32 [B, Hk, N]."""
        step = replace(step, products=None, later_seen=None)  # as a repetition is read
        n = step.k.shape[2]
        if step.visible is not None and n > self.chunk:
            return self._of_padded(step)
        sinks = step.sink_mask
        scores = [self._of_chunk(step, sinks, lo, hi) for lo, hi in chunks(n, self.chunk)]
        return torch.cat(scores, dim=-1)

    def _of_padded(self, step: Step) -> Tensor:
        """Return the scores fp32 [B, Hk, N] of padded rows, each cut into chunks of its own.

        The scores of padding are 0.
        """
        scores = step.k.new_zeros(step.k.shape[:3], dtype=torch.float32)
        before = step.k.shape[2] - step.q.shape[2]  # tokens without a query
        for row, real in step.rows_alike():
            queries = real[real >= before] - before
            if len(queries):
                alone = replace(
                    step,
                    q=step.q[row, :, queries],
                    k=step.k[row, :, real],
                    v=step.v[row, :, real],
                    index=torch.arange(len(real), device=real.device).view(1, 1, -1),
                    visible=None,
                    visible_queries=None,
                    lse=None,
                    repeated=None if step.repeated is None else step.repeated[row, :, queries],
                )
                scores[row, :, real] = self._weights(alone)
        return scores

    def _of_chunk(self, step: Step, sinks: Tensor, lo: int, hi: int) -> Tensor:
        """Return the scores fp32 [B, Hk, hi - lo]; sinks: bool [B or 1, 1 or Hk, N]."""
        keys, own_sinks = step.k[:, :, lo:hi], sinks[..., lo:hi]
        before = step.k.shape[2] - step.q.shape[2]  # tokens without a query
        if hi <= before:
            return keys.new_zeros(keys.shape[:3], dtype=torch.float32)
        seen = torch.ones_like(own_sinks) if step.visible is None else step.visible[..., lo:hi]
        chunk = slice(max(0, lo - before), hi - before)
        own = replace(
            step,
            q=step.q[:, :, chunk],
            k=keys,
            visible=None if step.visible is None else seen,
            lse=step.lse if chunk == slice(0, step.k.shape[2]) else None,
        )
        repeated, n = keys, step.k.shape[2]
        if lo and step.sinks:
            slots, sink_keys = _sinks_of(step, sinks)
            repeated = torch.cat([sink_keys, keys], dim=2)
            seen = torch.cat([sinks.gather(-1, slots) & (slots < lo), seen], dim=-1)
        if step.rope is not None:  # turning keys back turns queries further
            by: Tensor | int = query_shift(lo, hi, n, step.rope)
            if step.visible is not None:
                by = seen.sum(-1, keepdim=True)
            repeated = step.rope.rotate(repeated, -by)
        q, real_queries = step.q if step.repeated is None else step.repeated, step.visible_queries
        again = replace(
            step,
            q=q[:, :, chunk],
            k=repeated,
            visible=None if step.visible is None and not lo else seen,
            visible_queries=None if real_queries is None else real_queries[:, :, chunk],
        )
        return again.mass(reduce_max=True, other_lse=_own_lse(own, own_sinks))[..., lo - hi :]


def _own_lse(step: Step, sinks: Tensor) -> Tensor:
    """Return the log-sum-exp of each query's logits but those of sinks, fp32 [B, Hq, T].

    step: of a chunk; its T queries are the last of its N tokens. sinks: bool [B or 1, 1 or Hk, N].
    """
    (b, hk, n, _), t = step.k.shape, step.q.shape[2]
    visible, lse, others = step.visible, step.lse, ~sinks
    if visible is not None:
        visible = visible.expand(b, -1, -1)
        others = others & visible
    if lse is None:
        lse = step.attend(step.q, step.k, step.k, visible, causal=True).lse
    lse = lse.unflatten(1, (hk, -1))
    if step.sinks:
        slots, sink_keys = _sinks_of(step, sinks)
        queries = step.q.float().unflatten(1, (hk, -1))  # [B, Hk, R, T, D]
        logits = queries @ sink_keys.float().unsqueeze(2).mT * step.scale
        logits = softcapped(logits, step.softcap)
        hidden = ~sinks.gather(-1, slots)[:, :, None, None]  # a row may have fewer sinks
        share = (logits.masked_fill(hidden, -torch.inf) - lse[..., None]).exp()
        rest = 1 - share.sum(dim=-1)
        lse = lse + torch.log(rest.clamp(min=0.0))
        imprecise = (rest < _PRECISE).flatten(0, 2).any(dim=0).nonzero().flatten()
        keys, tokens = step.k.float().unsqueeze(2), torch.arange(n, device=lse.device)
        for rows in imprecise.split(_AT_ONCE):
            logits = softcapped(queries[..., rows, :] @ keys.mT * step.scale, step.softcap)
            seen = others[:, :, None, None] & (tokens <= rows[:, None] + n - t)
            lse[..., rows] = logits.masked_fill(~seen, -torch.inf).logsumexp(dim=-1)
    sees_none = others.cumsum(dim=-1)[:, :, None, n - t :] == 0
    return lse.masked_fill(sees_none, -torch.inf).flatten(1, 2)


def _sinks_of(step: Step, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Return the slots of the sinks, int64 [B or 1, 1 or Hk, sinks], and their keys, [B, Hk, …, D].

    sinks: bool [B or 1, 1 or Hk, N]. A row with fewer sinks has other tokens after them.
    """
    b, hk, _, d = step.k.shape
    slots = (~sinks).byte().argsort(dim=-1, stable=True)[..., : step.sinks]
    return slots, step.k.gather(2, slots[..., None].expand(b, hk, -1, d))


def _contributions(step: Step) -> Tensor:
    """Return the norm of each value over the mean norm of the layer's input, fp32 [B, Hk, N]."""
    values = step.v.float().norm(dim=-1)
    if step.norms is None:
        return values
    mean = step.norms.mean(dim=1)
    if step.visible_queries is not None:
        real = step.visible_queries[:, 0]
        mean = (step.norms * real).sum(dim=1) / real.sum(dim=1)
    return values / mean[:, None, None]
