"""How heads that compete for tokens divide a budget (AdaKV, arXiv:2407.11550, section 3).

Each head is guaranteed the share `head_share` of its uniform budget, for its best tokens. All
other tokens go to the heads with the highest scores. Decides numbers and slots, not scores.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .select import PROTECTED


def shares(heavy: int, evicted: int, head_share: float, heads: int, unit: int) -> tuple[int, int]:
    """Return the tokens that each head keeps in any case, and those that `heads` heads compete for.

    heavy, evicted: tokens of a head that a uniform budget keeps by score, and that it drops. A head
    is guaranteed at least the share `head_share` of `heavy`. The contested tokens, those of all
    heads together, are whole units, and no more than the heads can win. Rounding leaves less than
    one token a head unused.
    """
    contested = math.floor(round(heavy * (1 - head_share), 6))
    units = min(heads * contested // unit, heads * ((contested + evicted) // unit))
    while units > heads * ((-(-units * unit // heads) + evicted) // unit):
        units -= 1  # rounding guarantees heads more tokens, and fewer are left to win
    return heavy - -(-units * unit // heads), units * unit


def whole_shares(granted: int, head_share: float, heads: int, unit: int) -> tuple[int, int]:
    """Divide `granted` tokens of all heads into guaranteed and contested tokens, in whole units.

    granted: whole units. The guaranteed tokens are of each head, the contested ones of all heads.
    """
    guaranteed = int(granted * head_share) // (heads * unit) * unit
    return guaranteed, granted - heads * guaranteed


def granted(wanted: float, heads: int, tokens: int, unit: int) -> int:
    """Return the tokens of a block that all heads keep together: whole units, of those wanted.

    tokens: of the block, in each of the heads.
    """
    return max(0, min(heads * (tokens // unit), int(wanted) // unit)) * unit


def divide(ranked: Tensor, tokens: int, unit: int) -> Tensor:
    """Return the tokens of each head, int64 [B, H]: multiples of `unit` that sum to B * `tokens`.

    ranked: fp32 [B, H, N], the scores of each head's tokens beside the guaranteed ones, descending.
    A head's tokens are cut into units in this order, and the median score of a unit decides; for
    unit=1 this is AdaKV's rule. Units with tokens that stay whatever their score come first. H * (N
    // unit) units exist, at least `tokens` // unit.
    """
    units = ranked.shape[-1] // unit
    medians, largest = (ranked[..., i::unit][..., :units] for i in (unit // 2, 0))
    medians = torch.where(largest >= PROTECTED, largest, medians)
    best = medians.flatten(1).topk(tokens // unit, dim=-1).indices
    won = torch.zeros(ranked.shape[:2], dtype=torch.long, device=ranked.device)
    return unit * won.scatter_add_(1, best // max(1, units), torch.ones_like(best))


def select(scores: Tensor, guaranteed: int, counts: Tensor) -> tuple[Tensor, Tensor]:
    """Return each head's `guaranteed` best tokens, and which tokens are the next best `counts`.

    scores: fp32 [B, Hk, N]; counts: int64 [B, Hk]. Returns slots int64 [B, Hk, guaranteed],
    ascending, and bool [B, Hk, N].
    """
    order = scores.argsort(dim=-1, descending=True, stable=True)
    rank = torch.arange(scores.shape[-1], device=scores.device)
    taken = (rank >= guaranteed) & (rank < guaranteed + counts[..., None])
    next_best = torch.zeros_like(taken).scatter_(2, order, taken)
    return order[..., :guaranteed].sort(dim=-1).values, next_best
