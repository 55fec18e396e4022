"""Magnitudes of keys and values by channel and token, and by calibrated group.

KIVI (arXiv:2402.02750), figure 2: keys have a few channels with large values, values do not. SKVQ
(arXiv:2405.06219), figure 2: channels reordered so that similar channels share a group. The plain
model reads one context; nothing is quantized. Figures of a layer and kind:

- outliers: the largest magnitude of a channel over that of the median channel.
- spread: the range of a channel's group (maximum minus minimum in one token), averaged over
  channels and tokens, in units of the mean magnitude. A quantizer's step is proportional to it.
  Computed for groups of consecutive channels of all heads, and for calibrated groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvloom.calibrate import AttentionInputs, record
from kvloom.errors import UnsupportedModel
from kvloom.hf import (
    attachment_restored,
    geometry,
    layer_ropes,
    load_layer_facts,
    supported_model,
)
from kvloom.recipe import Recipe
from kvloom.store import LayerFacts

KINDS = {"keys": "keys", "raw_keys": "keys before RoPE", "values": "values"}


@dataclass(frozen=True)
class Distribution:
    """One layer's keys or values, with the channels of all key/value heads as rows.

    kind: a key of `KINDS`. x: fp32 [channels, tokens]. group: channels in a plain group. group_of:
    int64 [channels], the calibrated group of each channel; None if this kind is not calibrated.
    """

    layer: int
    kind: str
    x: Tensor
    group: int
    group_of: Tensor | None

    @property
    def order(self) -> Tensor | None:
        """Channels sorted by calibrated group, and by magnitude within a group."""
        if self.group_of is None:
            return None
        magnitude = self.x.abs().amax(dim=1)
        by_magnitude = magnitude.argsort()
        return by_magnitude[self.group_of[by_magnitude].argsort(stable=True)]

    @property
    def outliers(self) -> float:
        """The largest channel's magnitude over the median channel's."""
        largest = self.x.abs().amax(dim=1)
        return (largest.max() / largest.quantile(0.5).clamp_min(1e-30)).item()

    def spread(self, group_of: Tensor) -> float:
        """Return the mean range of a channel's group in a token, over the mean magnitude."""
        groups = int(group_of.max()) + 1
        index = group_of[:, None].expand_as(self.x)
        empty = self.x.new_full((groups, self.x.shape[1]), torch.inf)
        low = empty.scatter_reduce(0, index, self.x, "amin")
        high = (-empty).scatter_reduce(0, index, self.x, "amax")
        ranges = (high - low)[group_of]  # [channels, tokens]: of each channel's group
        return (ranges.mean() / self.x.abs().mean().clamp_min(1e-30)).item()

    @property
    def before(self) -> float:
        """The spread in groups of consecutive channels."""
        return self.spread(torch.arange(len(self.x)) // self.group)

    @property
    def after(self) -> float | None:
        """The spread in calibrated groups; None without calibration."""
        return None if self.group_of is None else self.spread(self.group_of)


def measure(
    model: PreTrainedModel, ids: Tensor, recipe: Recipe, layer_indices: Sequence[int] | None = None
) -> list[Distribution]:
    """Return keys, keys before RoPE if the model has RoPE, and values, of these layers.

    ids: int64 [1, T]. recipe: gives the group size and, if it is calibrated, the calibrated groups.
    layer_indices: None for all layers. The model is left as it was. Raises
    `IncompatibleRecipe` without a calibration, `UnsupportedModel` for a layer that kvloom does not
    compress.
    """
    shape = geometry(supported_model(model, all_heads_for="an analysis"))
    recipe.check(shape)
    group = max((fmt.group for fmt in recipe.store.quantized.values()), default=0) or 32
    distributions: list[Distribution] = []
    with attachment_restored(model):
        available = list(shape.layer_indices)
        chosen = available if layer_indices is None else list(layer_indices)
        if not set(chosen) <= set(available):
            raise UnsupportedModel(
                f"kvloom does not compress layers {sorted(set(chosen) - set(available))}; "
                f"choose from {available}"
            )
        facts = dict(zip(available, load_layer_facts(model, recipe), strict=True))
        try:
            ropes = dict(zip(available, layer_ropes(model), strict=True))
        except UnsupportedModel:
            ropes = {}

        def add(layer_index: int, inputs: AttentionInputs) -> None:
            if layer_index not in chosen:
                return
            plain = recipe.for_layer(layer_index, available)
            tensors = {"keys": inputs.k, "values": inputs.v}
            rope = ropes.get(layer_index)
            if rope is not None:
                undo = -torch.arange(inputs.k.shape[2], device=inputs.k.device).view(1, 1, -1)
                tensors["raw_keys"] = rope.rotate(inputs.k.float(), undo)
            for kind in KINDS:
                if kind in tensors:
                    groups = _calibrated_groups(plain, facts[layer_index], kind)
                    x = tensors[kind][0].float().transpose(1, 2).flatten(0, 1).cpu()
                    distributions.append(Distribution(layer_index, kind, x, group, groups))

        record(model, ids[:1], add)
    return distributions


def to_data(distributions: Sequence[Distribution], environment: dict[str, Any]) -> dict[str, Any]:
    """Return plain data, one row a distribution.

    channels: largest magnitude of each channel. order: channels by calibrated group.
    """
    rows = [
        {
            "layer": d.layer,
            "kind": d.kind,
            "outliers": d.outliers,
            "group": d.group,
            "spread": d.before,
            "spread_reordered": d.after,
            "channels": [round(x, 5) for x in d.x.abs().amax(dim=1).tolist()],
            "order": None if d.order is None else d.order.tolist(),
        }
        for d in distributions
    ]
    return {"environment": environment, "rows": rows}


def _calibrated_groups(recipe: Recipe, layer: LayerFacts, kind: str) -> Tensor | None:
    """Return the calibrated group of each channel of all heads; None without calibration."""
    of_keys = "raw_keys" if recipe.store.pre_rope else "keys"
    sides = {of_keys: "keys", "values": "values"}
    encoding = getattr(layer, sides[kind]) if kind in sides else None
    return None if encoding is None else encoding.group_of.flatten().cpu()
