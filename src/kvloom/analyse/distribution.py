"""Magnitudes of keys and values by channel and token, in calibrated order too.

KIVI (arXiv:2402.02750), figure 2: keys have a few channels with large values, values do not. SKVQ
(arXiv:2405.06219), figure 2: channels reordered so that those of one group are alike. One pass of
the plain model over one context; nothing is packed. Figures of a layer and kind:

- outliers: the largest magnitude of a channel over that of the median channel.
- spread: the range of a channel's group (maximum minus minimum in one token), averaged over
  channels and tokens, in units of the mean magnitude: what the step of a quantizer is proportional
  to. Groups of consecutive channels of all heads, and groups as calibrated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..calibrate import record
from ..errors import UnsupportedModel
from ..hf import attach, compat, rotary
from ..hf.metadata import load_layer_metadata
from ..recipe.spec import Recipe
from ..store import LayerMetadata

KINDS = {"keys": "keys", "raw_keys": "keys before RoPE", "values": "values"}


@dataclass(frozen=True)
class Distribution:
    """One layer's keys or values, all key/value heads side by side.

    kind: of `KINDS`. x: fp32 [channels, tokens]. group_of: int64 [channels], the calibrated group
    of each channel, None where calibration says nothing of this kind.
    """

    layer: int
    kind: str
    x: Tensor
    group: int
    group_of: Tensor | None

    @property
    def order(self) -> Tensor | None:
        """Channels by calibrated group, those of one group by magnitude."""
        if self.group_of is None:
            return None
        magnitude = self.x.abs().amax(dim=1)
        by_magnitude = magnitude.argsort()
        return by_magnitude[self.group_of[by_magnitude].argsort(stable=True)]

    @property
    def outliers(self) -> float:
        """The largest channel's magnitude over the median channel's."""
        largest = self.x.abs().amax(dim=1)
        return (largest.max() / largest.median().clamp_min(1e-30)).item()

    def spread(self, group_of: Tensor) -> float:
        """Mean range of a channel's group in a token, in units of the mean magnitude."""
        groups = int(group_of.max()) + 1
        index = group_of[:, None].expand_as(self.x)
        empty = self.x.new_full((groups, self.x.shape[1]), torch.inf)
        low = empty.scatter_reduce(0, index, self.x, "amin")
        high = (-empty).scatter_reduce(0, index, self.x, "amax")
        ranges = (high - low)[group_of]  # what each channel shares
        return (ranges.mean() / self.x.abs().mean().clamp_min(1e-30)).item()

    @property
    def before(self) -> float:
        """The spread in groups of consecutive channels."""
        return self.spread(torch.arange(len(self.x)) // self.group)

    @property
    def after(self) -> float | None:
        """The spread in calibrated groups."""
        return None if self.group_of is None else self.spread(self.group_of)


def measure(
    model: PreTrainedModel, ids: Tensor, recipe: Recipe, numbers: Sequence[int] | None = None
) -> list[Distribution]:
    """Keys, keys before RoPE where the model has one, and values of each layer of `numbers`.

    ids: int64 [1, T]. recipe: whose calibrated groups and group size are taken; one that needs no
    calibration has none. numbers: None for all layers. The model is left as it was. Raises
    `IncompatibleRecipe` without a calibration, `UnsupportedModel` for a layer that is not held.
    """
    compat.refuse_unsupported(model)
    recipe.check(compat.geometry(model))
    routed_before = getattr(model, "_kvloom", None) is not None
    found: list[Distribution] = []
    try:
        held = record.layers(model)
        chosen = held if numbers is None else list(numbers)
        if not set(chosen) <= set(held):
            raise UnsupportedModel(
                f"layers {sorted(set(chosen) - set(held))} are not among those that kvloom holds; "
                f"choose from {held}"
            )
        told = dict(zip(held, load_layer_metadata(model, recipe), strict=True))
        try:
            rope = rotary.rope(model)
        except UnsupportedModel:
            rope = None

        def see(number: int, seen: record.Seen) -> None:
            if number not in chosen:
                return
            parts = {"keys": seen.k, "values": seen.v}
            if rope is not None:
                back = -torch.arange(seen.k.shape[2], device=seen.k.device).view(1, 1, -1)
                parts["raw_keys"] = rope.rotate(seen.k.float(), back)
            for kind in KINDS:
                if kind in parts:
                    groups = _groups(recipe, told[number], kind)
                    x = parts[kind][0].float().transpose(1, 2).flatten(0, 1).cpu()
                    found.append(Distribution(number, kind, x, _size(recipe), groups))

        record.read(model, ids[:1], see)
    finally:
        if not routed_before and getattr(model, "_kvloom", None) is not None:
            attach.detach(model)
    return found


def _groups(recipe: Recipe, layer: LayerMetadata, kind: str) -> Tensor | None:
    """The calibrated group of each channel of all heads; None where the recipe has none."""
    of_keys = "raw_keys" if recipe.store.pre_rope else "keys"
    channels = {of_keys: layer.keys, "values": layer.values}.get(kind)
    if channels is None or channels.group_of is None:
        return None
    return channels.group_of.flatten().cpu()


def _size(recipe: Recipe) -> int:
    """Channels of a group."""
    return max((fmt.group for fmt in recipe.store.quantized.values()), default=0) or 32
