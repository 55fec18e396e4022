"""How attention is distributed over tokens, layer by layer, and how a recipe changes it.

One pass measures everything: a prompt attends exactly under every recipe, so its queries and keys
are those of the plain model; the steps after it attend to the recipe's cache. `LayerAttention`
defines the figures. Quantization is not measured here.

An attention matrix is computed in blocks of rows: memory grows with the number of tokens, not with
its square.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvloom import Cache
from kvloom.cache import LayerCache, layer_contents
from kvloom.hf import ObservedStep, attachment_restored, observe_steps, read_tokens, supported_model
from kvloom.progress import Progress
from kvloom.recipe import Recipe

THRESHOLD = 0.01
"""A weight is negligible below this share of the largest weight of its row."""
GRID = [i / 100 for i in range(101)]
"""Fractions of the tokens at which `mass_curve` is evaluated."""
EDGES = [i / 4 - 8 for i in range(33)]
"""Edges of the bins of scores, as powers of ten; the outermost bins include all scores outside."""

# Numbers in one block of attention weights: about this many (16 MiB in fp32), or one row.
_BLOCK_NUMEL = 1 << 22


def weight_blocks(
    q: Tensor,
    k: Tensor,
    scale: float,
    softcap: float | None,
    bias: Tensor | None = None,
    sink_logits: Tensor | None = None,
) -> Iterator[Tensor]:
    """Yield causal attention weights of q [Hq, T, D] over k [Hk, T, D] in blocks of rows.

    bias: fp32 [Hq, T], added to the logits. sink_logits: fp32 [Hq], of sinks that take a share. A
    block is fp32 [Hq, rows, N], where N is the number of keys that its last row attends to; the
    weight of a later key is 0.
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
        logits.masked_fill_(future, -torch.inf)
        if sink_logits is not None:
            sinks = sink_logits[:, None, None].expand(-1, hi - lo, 1)
            logits = torch.cat([logits, sinks], dim=-1)
        yield logits.softmax(dim=-1)[..., :hi]


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


def score_histogram(scores: Tensor, counted: Tensor) -> list[float]:
    """Return the share of scores [Hq, N] in each bin of `EDGES`.

    counted: bool [Hq, N], the scores to count; shares are of all scores.
    """
    exponents = scores[counted].double().clamp_min(1e-300).log10().clamp(EDGES[0], EDGES[-1])
    counts, _ = np.histogram(exponents.cpu().numpy(), bins=EDGES)
    return (counts / scores.numel()).tolist()


@dataclass(frozen=True)
class LayerAttention:
    """The figures of one layer.

    Attributes:
        number: Its index in the model.
        sparsity: The share of attention weights below 1% of the largest weight of their query row,
            among all causal weights of all query heads and rows of the prompt (Keyformer,
            arXiv:2403.09054, figure 3a, which does not state its threshold).
        cdf: The share of a query head's attention, summed over the prompt's rows, on its best
            tokens, as a function of the fraction of tokens. The mean over query heads (Keyformer,
            figure 3b).
        most: The fraction of tokens with 90% of the attention, read from the cdf.
        variance: The variance over tokens (divided by N - 1) of the attention summed over the
            prompt's rows and over the query heads that share a key/value head. The mean over
            key/value heads (MiniKV, arXiv:2411.18077, figure 7). Budgets by variance divide by it.
        held_tokens: Tokens in the cache of a head after the prompt.
        kept: The share of the later queries' attention to tokens that those in the cache have, the
            mean over queries and heads.
        before: Share of the prompt's tokens in each bin of scores (Keyformer, figure 4, equations 2
            and 3). A token's score is the attention that it receives, averaged over the queries
            after the prompt, for every query head; the softmax runs over all tokens, and sinks
            that the model has learned.
        after: The same for tokens still in the cache at the last query, with the softmax over these
            and the same logits. It sums to their share.
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
    """Prefill the first `context` of ids [1, tokens], then decode the others one by one.

    There must be at least one other token. Returns one `LayerAttention` for each layer that kvloom
    compresses; the model is left as it was. progress: called with units that sum to
    tokens - context + 1. Raises what `Cache` and `observe_steps` raise.
    """
    supported_model(model, all_heads_for="an analysis")
    on_step = progress or (lambda what, units: None)
    text = ids.to(model.device)
    with attachment_restored(model), torch.inference_mode():
        cache = Cache(model, recipe)
        layers = [_LayerObserver(number) for number in cache.geometry.layer_indices]
        observe_steps(cache, lambda observed: layers[observed.layer].before_attention(observed))
        for lo, hi in [(0, context), *((i, i + 1) for i in range(context, ids.shape[1]))]:
            on_step("reading the prompt" if lo == 0 else "decoding", 0)
            read_tokens(model, text[:, lo:hi], cache)
            for layer, routed in zip(layers, cache.full_layers, strict=True):
                layer.after_step(routed.cache)
            on_step("decoding", 1)
    return [layer.figures() for layer in layers]


def to_data(layers: Sequence[LayerAttention], environment: dict[str, Any]) -> dict[str, Any]:
    """Return the figures as plain data."""
    return {
        "environment": environment,
        "threshold": THRESHOLD,
        "grid": GRID,
        "edges": EDGES,
        "layers": [asdict(layer) for layer in layers],
    }


class _LayerObserver:
    """Accumulates the figures of one layer while the text is read."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.sparsity = self.kept = 0.0
        self.mass = self.before = self.after = torch.empty(0)  # fp32 [Hq, prompt tokens]
        self.cached = self.cached_before = torch.empty(0)  # bool [Hk, N]: tokens in the cache
        self.groups = self.cached_tokens = self.queries = 0

    def before_attention(self, look: ObservedStep) -> None:
        """Process the inputs of the prompt, or of one decode step."""
        q, k = look.q[0], look.keys[0]
        if look.cache.seen == 0:
            self._prompt(q, k, look)
            return
        weights = look.mass()[0]
        new_token = self.cached.new_ones(len(self.cached), 1)
        self.cached = torch.cat([self.cached, new_token], dim=1)
        in_cache = weights * self.cached.repeat_interleave(len(q) // len(k), dim=0)
        share, of_tokens = (x.sum(dim=-1, keepdim=True) for x in (in_cache, weights))
        sinks = 0.0 if look.sink_logits is None else 1.0 - of_tokens
        prompt = self.mass.shape[1]
        self.before += weights[:, :prompt]
        self.after += (in_cache / (share + sinks))[:, :prompt]
        self.kept += (share / of_tokens).mean().item()
        self.queries += 1

    def after_step(self, cache: LayerCache) -> None:
        """Record which tokens are in the cache after a step."""
        self.cached_before = self.cached
        self.cached = layer_contents(cache).kept.to(self.mass.device)
        if self.queries == 0:
            self.cached_tokens = round(self.cached.sum().item() / len(self.cached))

    def figures(self) -> LayerAttention:
        """Return the figures of the layer."""
        curve = mass_curve(self.mass)
        still_cached = self.cached_before[:, : self.mass.shape[1]]
        still_cached = still_cached.repeat_interleave(len(self.mass) // self.groups, dim=0)
        group_mass = self.mass.view(self.groups, -1, self.mass.shape[-1]).sum(dim=1)
        return LayerAttention(
            number=self.number,
            sparsity=self.sparsity,
            cdf=curve.tolist(),
            most=float(np.interp(0.9, curve, GRID)),
            variance=group_mass.var(dim=-1).mean().item(),
            held_tokens=self.cached_tokens,
            kept=self.kept / self.queries,
            before=score_histogram(self.before / self.queries, torch.ones_like(still_cached)),
            after=score_histogram(self.after / self.queries, still_cached),
        )

    def _prompt(self, q: Tensor, k: Tensor, look: ObservedStep) -> None:
        hq, t, _ = q.shape
        self.groups = len(k)
        self.mass = q.new_zeros(hq, t, dtype=torch.float32)
        negligible = 0
        bias = None if look.bias is None else look.bias[0]
        for weights in weight_blocks(q, k, look.scale, look.softcap, bias, look.sink_logits):
            negligible += count_negligible(weights)
            self.mass[:, : weights.shape[-1]] += weights.sum(dim=1)
        self.sparsity = negligible / (hq * t * (t + 1) / 2)
        self.before, self.after = torch.zeros_like(self.mass), torch.zeros_like(self.mass)
