"""SKVQ's Table 2, simulated: quantizers that no recipe has, on one forward pass.

The outputs of `k_proj` and `v_proj`, before RoPE, are replaced by their quantized values, those of
the first tokens excepted, so a prompt attends to quantized tokens, as in SKVQ's harness. Nothing is
packed. A quantizer takes x fp32 [T, channels] and returns it quantized.

- `symmetric`: RTN, scale = max|x| / (2^(b-1) - 1) for each token and group.
- `asymmetric`: of any groups of channels, clipped by a factor: RTN, or SKVQ with its groups.
- `Levels`: after KVQuant (arXiv:2401.18079, nuq with 1% outliers): the 1% largest and smallest
  values stay exact; the others of a channel (keys) or token (values) are scaled to [-1, 1] and
  rounded to levels of the layer, found by k-means on another text. KVQuant weights this k-means by
  the sensitivity of the loss, and fixes a channel's range on that text; here all values weigh the
  same, and ranges are those of the text that is read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

Quantizer = Callable[[Tensor], Tensor]
SINKS = 5
OUTLIERS = 0.01


def symmetric(x: Tensor, bits: int, group: int) -> Tensor:
    """Return x rounded by one scale for each token and group of consecutive channels."""
    groups = x.unflatten(-1, (-1, group))
    most = 2 ** (bits - 1) - 1
    scale = groups.abs().amax(dim=-1, keepdim=True).clamp_min(1e-8) / most
    return ((groups / scale).round().clamp(-most - 1, most) * scale).flatten(-2)


def asymmetric(x: Tensor, bits: int, group_of: Tensor, clip: float = 1.0) -> Tensor:
    """Return x rounded between the clipped ends of each token's groups.

    group_of: int64 [channels]. Scale and zero are rounded to fp8 (e4m3).
    """
    index = group_of.expand_as(x)
    low, high = (
        x.new_zeros(len(x), int(group_of.max()) + 1).scatter_reduce(
            1, index, x, how, include_self=False
        )
        for how in ("amin", "amax")
    )
    low, scale = clip * low, clip * (high - low) / (2**bits - 1)
    low, scale = (y.to(torch.float8_e4m3fn).float().gather(1, index) for y in (low, scale))
    codes = ((x - low) / scale.clamp_min(2**-9)).round().clamp(0, 2**bits - 1)
    return codes * scale + low


@dataclass(frozen=True)
class Levels:
    """Rounds to the levels of a layer, fp32 [2^bits], ascending; dim: of a range (0: channels)."""

    levels: Tensor
    dim: int

    def __call__(self, x: Tensor) -> Tensor:
        """Return x with outliers exact and all other values rounded."""
        scaled, center, half, inner = _normalized(x, self.dim)
        nearest = torch.bucketize(scaled, (self.levels[1:] + self.levels[:-1]) / 2)
        return torch.where(inner, self.levels[nearest] * half + center, x)

    @classmethod
    def fit(cls, x: Tensor, bits: int, dim: int, rounds: int = 20) -> Levels:
        """Return the levels of k-means on values of x [T, channels], from quantiles on."""
        scaled, _, _, inner = _normalized(x, dim)
        values = scaled[inner][:: max(1, int(inner.sum()) // 50_000)].contiguous()
        levels = values.quantile((torch.arange(2**bits) + 0.5) / 2**bits)
        for _ in range(rounds):
            nearest = torch.bucketize(values, (levels[1:] + levels[:-1]) / 2)
            sums = torch.zeros_like(levels).index_add_(0, nearest, values)
            counts = nearest.bincount(minlength=len(levels))
            levels = torch.where(counts > 0, sums / counts.clamp_min(1), levels)
        return cls(levels, dim)


def _normalized(x: Tensor, dim: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return x scaled to [-1, 1] along a dimension, center, half range, and what is no outlier."""
    low = x.quantile(OUTLIERS / 2, dim=dim, keepdim=True)
    high = x.quantile(1 - OUTLIERS / 2, dim=dim, keepdim=True)
    center, half = (high + low) / 2, ((high - low) / 2).clamp_min(1e-8)
    return (x - center) / half, center, half, (x >= low) & (x <= high)


def projections(model: PreTrainedModel) -> dict[tuple[int, str], nn.Module]:
    """Return the modules named `k_proj` and `v_proj`, by layer and side."""
    found: dict[tuple[int, str], nn.Module] = {}
    for side, name in (("keys", "k_proj"), ("values", "v_proj")):
        modules = [m for path, m in model.named_modules() if path.endswith(f".{name}")]
        found |= {(layer, side): module for layer, module in enumerate(modules)}
    return found


@contextmanager
def replaced(model: PreTrainedModel, quantizers: Mapping[Any, Quantizer]) -> Iterator[None]:
    """Quantize the outputs of `projections`, those of the first tokens excepted."""

    def hook(quantizer: Quantizer, module: Any, inputs: Any, x: Tensor) -> Tensor:
        rest = torch.stack([quantizer(row) for row in x[:, SINKS:].float()]).to(x.dtype)
        return torch.cat([x[:, :SINKS], rest], dim=1)

    modules = projections(model)
    handles = [
        modules[key].register_forward_hook(partial(hook, quantizer))
        for key, quantizer in quantizers.items()
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@torch.inference_mode()
def outputs(model: PreTrainedModel, ids: Tensor) -> dict[tuple[int, str], Tensor]:
    """Return the keys and values of ids [1, T] before RoPE, fp32 [T, channels]."""
    seen: dict[tuple[int, str], Tensor] = {}

    def keep(key: tuple[int, str], x: Tensor) -> Tensor:
        seen[key] = x
        return x

    with replaced(model, {key: partial(keep, key) for key in projections(model)}):
        model.base_model(input_ids=ids, use_cache=False)
    return seen


@torch.inference_mode()
def losses(model: PreTrainedModel, ids: Tensor, quantizers: Mapping[Any, Quantizer]) -> list[float]:
    """Return the nats per token of each text of ids [rows, T]."""
    found = []
    with replaced(model, quantizers):
        for row in ids:
            logits = model(input_ids=row[None], use_cache=False).logits[0, :-1]
            found.append(F.cross_entropy(logits.float(), row[1:]).item())
    return found
