"""Figures of an attention matrix, computed in blocks of rows.

Memory grows with the number of tokens, not with its square.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

THRESHOLD = 0.01
"""A weight is negligible below this share of the largest weight of its row."""
GRID = [i / 100 for i in range(101)]
"""Fractions of the tokens at which `mass_curve` is evaluated."""
EDGES = [i / 4 - 8 for i in range(33)]
"""Edges of the bins of scores, as powers of ten; the outermost bins include all scores outside."""

# Numbers in one block of attention weights: about this many (16 MiB in fp32), or one row.
_BLOCK_NUMEL = 1 << 22


def weight_blocks(
    q: Tensor, k: Tensor, scale: float, softcap: float | None, bias: Tensor | None = None
) -> Iterator[Tensor]:
    """Yield causal attention weights of q [Hq, T, D] over k [Hk, T, D] in blocks of rows.

    bias: fp32 [Hq, T], added to the logits. A block is fp32 [Hq, rows, N], where N is the number of
    keys that its last row attends to; the weight of a later key is 0.
    """
    hq, t, d = q.shape
    hk = k.shape[0]
    keys = k.float().transpose(-1, -2)
    size = max(1, _BLOCK_NUMEL // (hq * t))
    for lo in range(0, t, size):
        hi = min(t, lo + size)
        rows = q[:, lo:hi].float().reshape(hk, -1, d)
        logits = (rows @ keys[..., :hi]).mul_(scale).view(hq, hi - lo, hi)
        if softcap is not None:
            logits = torch.tanh(logits / softcap) * softcap
        if bias is not None:
            logits += bias[:, None, :hi]
        future = torch.ones(hi - lo, hi, dtype=torch.bool, device=q.device).triu_(lo + 1)
        yield logits.masked_fill_(future, -torch.inf).softmax(dim=-1)


def count_negligible(weights: Tensor) -> int:
    """Return how many weights of a block [Hq, rows, N] are below `THRESHOLD` of their row's max.

    Keys after a row's own token are not counted.
    """
    heads, rows, _ = weights.shape
    below = (weights < THRESHOLD * weights.amax(dim=-1, keepdim=True)).sum().item()
    return int(below) - heads * rows * (rows - 1) // 2


def mass_curve(mass: Tensor) -> np.ndarray:
    """Return the share of attention mass [heads, N] on the best tokens, the mean over heads.

    The result has one value for each fraction of the tokens in `GRID`.
    """
    best = mass.double().sort(dim=-1, descending=True).values.cumsum(dim=-1).cpu().numpy()
    fractions = np.arange(1 + best.shape[1]) / best.shape[1]
    return np.mean([np.interp(GRID, fractions, [0.0, *(b / b[-1])]) for b in best], axis=0)


def mass_variance(mass: Tensor, groups: int) -> float:
    """Return the variance over tokens of mass [Hq, N] summed over each group's heads; the mean."""
    return mass.view(groups, -1, mass.shape[-1]).sum(dim=1).var(dim=-1).mean().item()


def score_histogram(scores: Tensor, counted: Tensor) -> list[float]:
    """Return the share of scores [Hq, N] in each bin of `EDGES`.

    counted: bool [Hq, N], the scores to count; shares are of all scores.
    """
    exponents = scores[counted].double().clamp_min(1e-300).log10().clamp(EDGES[0], EDGES[-1])
    counts, _ = np.histogram(exponents.cpu().numpy(), bins=EDGES)
    return (counts / scores.numel()).tolist()
