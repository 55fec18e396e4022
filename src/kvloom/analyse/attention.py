"""How attention is spread over tokens, layer by layer, and how a recipe changes it.

One pass answers all: a prompt attends exactly under every recipe, so its queries and keys are those
of the plain model; the steps after it read the recipe's cache. Decides what each figure means:

- sparsity (Keyformer, arXiv:2403.09054, figure 3a, which does not state its threshold): the share
  of attention weights below 1% of the largest of their query row, among the weights that causality
  lets be, over all query heads and rows of the prompt.
- cdf (figure 3b): the share of a query head's attention, summed over the prompt's rows, that its
  best tokens take, as a function of how many of the tokens these are; the mean over query heads.
- variance (MiniKV, arXiv:2411.18077, figure 7): the variance over tokens (N - 1 below) of the
  attention summed over the prompt's rows and over the query heads that share a key/value head; the
  mean over key/value heads. Budgets by variance divide by it.
- before, after (Keyformer, figure 4, equations 2 and 3): a token's score is the attention it gets,
  averaged over the queries after the prompt, for every query head. Before: the softmax runs over
  all tokens. After: over those that the cache held, by the same logits, so dropped tokens' shares
  fall to the others. Exact keys on both sides: packing is not looked at here.

Works through blocks of rows: memory grows with the tokens, not with their square.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..cache.layer import LayerCache
from ..hf import attach
from ..hf.cache import Cache
from ..hf.observe import Observation, observe
from ..hf.routed import RoutedLayer
from ..kernels import ops
from ..recipe.spec import Recipe
from ..workload.step import Progress, step

THRESHOLD = 0.01
GRID = [i / 100 for i in range(101)]
"""Fractions of the tokens at which the cdf is told."""
EDGES = [i / 4 - 8 for i in range(33)]
"""Edges of the bins of scores, as powers of ten; what lies outside is counted at the end."""

# Weights of one block of query rows: about this many numbers (16 MiB in fp32) or one row.
_BLOCK_NUMEL = 1 << 22


@dataclass(frozen=True)
class LayerAttention:
    """The figures of one layer, as the module says.

    number: of the layer in the model. most: the fraction of tokens that takes 90% of the attention,
    read from the cdf. held_tokens: tokens a head holds after the prompt. kept: the share of the
    later queries' attention that fell on tokens the cache held, the mean over queries and heads.
    before: share of the prompt's tokens in each bin of scores; after: the same for those that are
    held before the last query, so it sums to their share.
    """

    number: int
    sparsity: float
    cdf: list[float]
    most: float
    variance: float
    held_tokens: int
    kept: float
    before: list[float]
    after: list[float]


def measure(
    model: PreTrainedModel,
    ids: Tensor,
    *,
    context: int,
    recipe: Recipe | str = "h2o",
    progress: Progress | None = None,
) -> list[LayerAttention]:
    """Read ids [1, tokens], the first `context` at once and the others (one at least) one by one.

    Returns one `LayerAttention` for each layer that kvloom holds; the model is left as it was.
    progress is called with units that sum to tokens - context + 1. Raises what `Cache` and `watch`
    raise.
    """
    tell = progress or (lambda what, units: None)
    routed_before = getattr(model, "_kvloom", None) is not None
    cache = Cache(model, recipe)
    numbers = [i for i, layer in enumerate(cache.layers) if isinstance(layer, RoutedLayer)]
    layers = [_Layer(number) for number in numbers]
    text = ids.to(model.device)
    try:
        observe(cache, lambda look: layers[look.place].look(look))
        with torch.inference_mode():
            for lo, hi in [(0, context), *((i, i + 1) for i in range(context, ids.shape[1]))]:
                tell("reading the prompt" if lo == 0 else "reading on", 0)
                step(model, text[:, lo:hi], cache)
                for layer, routed in zip(layers, cache.routed, strict=True):
                    layer.note(routed.cache)
                tell("reading on", 1)
    finally:
        if not routed_before:
            attach.detach(model)
    return [layer.figures() for layer in layers]


def cdf(mass: Tensor) -> np.ndarray:
    """Share of mass [heads, N] on the best tokens at the fractions `GRID`; the mean over heads."""
    best = mass.double().sort(dim=-1, descending=True).values.cumsum(dim=-1).cpu().numpy()
    at = np.arange(1 + best.shape[1]) / best.shape[1]
    return np.mean([np.interp(GRID, at, [0.0, *(b / b[-1])]) for b in best], axis=0)


def variance(mass: Tensor, groups: int) -> float:
    """Variance over tokens of mass [Hq, N] summed over the heads of a group, averaged."""
    return mass.view(groups, -1, mass.shape[-1]).sum(dim=1).var(dim=-1).mean().item()


def blocks(
    q: Tensor, k: Tensor, scale: float, softcap: float | None, bias: Tensor | None = None
) -> Iterator[Tensor]:
    """Attention weights of blocks of rows of q [Hq, T, D] over k [Hk, T, D], causally.

    bias: fp32 [Hq, T], added to the logits. Yields fp32 [Hq, rows, N], N the keys that the block's
    last row sees; later keys weigh 0.
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
        ahead = torch.ones(hi - lo, hi, dtype=torch.bool, device=q.device).triu_(lo + 1)
        yield logits.masked_fill_(ahead, -torch.inf).softmax(dim=-1)


def sparse(weights: Tensor) -> int:
    """How many of a block's weights [Hq, rows, N] are below `THRESHOLD` of their row's largest.

    Keys behind the row, of which the block's last row has none, do not count.
    """
    heads, rows, _ = weights.shape
    below = (weights < THRESHOLD * weights.amax(dim=-1, keepdim=True)).sum().item()
    return int(below) - heads * rows * (rows - 1) // 2


class _Layer:
    """What is known of one layer while the text is read."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.sparsity = self.kept = 0.0
        self.mass = self.before = self.after = self.held = self.last = torch.empty(0)
        self.groups = self.held_tokens = self.queries = 0

    def look(self, look: Observation) -> None:
        """Take in the prompt, or one step: before the layer attends."""
        q, k = look.q[0], look.keys[0]
        if look.cache.seen == 0:
            self._prompt(q, k, look)
            return
        weights = ops.column_mass(
            look.q, look.keys, look.scale, softcap=look.softcap, bias=look.bias
        )[0]
        own = self.held.new_ones(len(self.held), 1)
        self.held = torch.cat([self.held, own], dim=1)  # [Hk, N]
        left = weights * self.held.repeat_interleave(len(q) // len(k), dim=0)
        share = left.sum(dim=-1, keepdim=True)
        prompt = self.mass.shape[1]
        self.before += weights[:, :prompt]
        self.after += (left / share)[:, :prompt]
        self.kept += share.mean().item()
        self.queries += 1

    def note(self, cache: LayerCache) -> None:
        """Note which tokens the cache holds after a step."""
        index = cache.logical()[0]
        self.last = self.held
        self.held = torch.zeros(len(index), cache.seen, dtype=torch.bool, device=index.device)
        self.held.scatter_(1, index, True)
        if self.queries == 0:
            self.held_tokens = index.shape[1]

    def figures(self) -> LayerAttention:
        """Return the figures."""
        curve = cdf(self.mass)
        there = self.last[:, : self.mass.shape[1]]
        there = there.repeat_interleave(len(self.mass) // self.groups, dim=0)
        return LayerAttention(
            number=self.number,
            sparsity=self.sparsity,
            cdf=curve.tolist(),
            most=float(np.interp(0.9, curve, GRID)),
            variance=variance(self.mass, self.groups),
            held_tokens=self.held_tokens,
            kept=self.kept / self.queries,
            before=_bins(self.before / self.queries, torch.ones_like(there)),
            after=_bins(self.after / self.queries, there),
        )

    def _prompt(self, q: Tensor, k: Tensor, look: Observation) -> None:
        hq, t, _ = q.shape
        self.groups = len(k)
        self.mass = q.new_zeros(hq, t, dtype=torch.float32)
        below = 0
        bias = None if look.bias is None else look.bias[0]
        for weights in blocks(q, k, look.scale, look.softcap, bias):
            below += sparse(weights)
            self.mass[:, : weights.shape[-1]] += weights.sum(dim=1)
        self.sparsity = below / (hq * t * (t + 1) / 2)
        self.before, self.after = torch.zeros_like(self.mass), torch.zeros_like(self.mass)


def _bins(scores: Tensor, held: Tensor) -> list[float]:
    """Share of scores [Hq, N] that are held and fall between two `EDGES`."""
    exponents = scores[held].double().clamp_min(1e-300).log10().clamp(EDGES[0], EDGES[-1])
    counts, _ = np.histogram(exponents.cpu().numpy(), bins=EDGES)
    return (counts / scores.numel()).tolist()
