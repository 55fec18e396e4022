"""The extra pass of recipes that learn from examples how queries change in a repetition.

Decides what the model reads, before the prompt itself: the first tokens of the prompt, twice. The
second time they have the positions to which `Rotated` rotates the prompt's queries. Nothing of the
pass is stored.
"""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..keep import Examples, Rotated
from . import compat
from .masks import padding_mask
from .recording import AttentionInputs, record_layers
from .routed_cache import RoutedCache

_OF_TOKENS = "input_ids", "inputs_embeds", "token_type_ids"
"""Arguments [B, N, ...] of which the pass reads some tokens."""
_OF_CALL = "attention_mask", "position_ids", "cache_position", "logits_to_keep", "labels"
"""Tensors that change nothing in the pass, or that it makes itself."""


class ExamplePass(NamedTuple):
    """The columns of the pass: padding, the first tokens of a row, and the same again.

    Attributes:
        tokens: int64 [B, 2 E], which token of the prompt a column has.
        visible: bool [B, 2 E], False for padding.
        position_ids: int64 [B, 2 E].
        first: int64 [B, E], the column of each example; any column where a row has fewer.
        again: int64 [B, E], the column of its repetition.
        distance: int64 [B, 1], the positions between the two.
        real: bool [B, E], False where a row has fewer.
    """

    tokens: Tensor
    visible: Tensor
    position_ids: Tensor
    first: Tensor
    again: Tensor
    distance: Tensor
    real: Tensor

    @classmethod
    def of(cls, visible: Tensor, count: int, furthest: int) -> ExamplePass:
        """Return the pass of at most `count` examples of each row of a prompt.

        visible: bool [B, N], False for padding. furthest: the greatest distance.
        """
        columns = torch.arange(2 * count, device=visible.device)
        tokens = visible.sum(dim=-1, keepdim=True)
        own, distance = tokens.clamp(max=count), tokens.clamp(max=furthest)
        padding = 2 * (count - own)
        place = columns - padding
        index = place.clamp(min=0) % own.clamp(min=1)
        order = (~visible).byte().argsort(dim=-1, stable=True)
        first = (columns[:count] + padding).clamp(max=2 * count - 1)
        return cls(
            order.gather(1, index), place >= 0, index + (place >= own) * distance, first,
            (first + own).clamp(max=2 * count - 1), distance, columns[:count] < own,
        )  # fmt: skip

    def read(self, x: Tensor) -> Tensor:
        """Return what the pass reads of an argument [B, N, ...]."""
        index = self.tokens.to(x.device).view(*self.tokens.shape, *(1,) * (x.dim() - 2))
        return x.gather(1, index.expand(-1, -1, *x.shape[2:]))

    def seen(self, inputs: AttentionInputs) -> Examples:
        """Return the examples as a layer has seen them."""
        first, again, distance, real = (
            x.to(inputs.q.device) for x in (self.first, self.again, self.distance, self.real)
        )
        return Examples(
            _columns(inputs.q, first), _columns(inputs.k, first), _columns(inputs.q, again),
            distance, real,
        )  # fmt: skip


def learn(model: PreTrainedModel, cache: RoutedCache, kwargs: dict[str, Any]) -> None:
    """Give layers what they learn from the first tokens of a prompt, for the call that follows.

    kwargs: the arguments of that call. Nothing is learned from a prompt with images.
    """
    inputs = {name: x for name in _OF_TOKENS if (x := kwargs.get(name)) is not None}
    others = kwargs.keys() - {*_OF_TOKENS, *_OF_CALL}
    if not inputs or any(isinstance(kwargs[name], Tensor) for name in others):
        return
    tokens = next(iter(inputs.values())).shape[1]
    learning: dict[Rotated, set[int]] = {}
    for layer_index, layer in cache.by_index.items():
        if layer.cache.learns_from(tokens):
            keep = layer.cache.recipe.keep
            assert keep is not None
            assert isinstance(keep.scorer, Rotated)
            learning.setdefault(keep.scorer, set()).add(layer_index)
    for scorer, layer_indices in learning.items():
        _run(model, cache, scorer, layer_indices, inputs, kwargs.get("attention_mask"))


@torch.no_grad()
def _run(
    model: PreTrainedModel,
    cache: RoutedCache,
    scorer: Rotated,
    layer_indices: set[int],
    inputs: dict[str, Tensor],
    mask: Tensor | None,
) -> None:
    """Run the pass of the layers with one scorer."""
    decoder = compat.decoder(model)
    rows, tokens = next(iter(inputs.values())).shape[:2]
    limit = getattr(compat.decoder_config(model), "max_position_embeddings", None) or 2 * tokens
    count = min(scorer.examples, tokens, limit // 2)
    visible = torch.ones(rows, tokens, dtype=torch.bool)
    if mask is not None:
        visible = padding_mask(mask, tokens)
    examples = ExamplePass.of(visible, count, min(scorer.chunk, limit - count))
    arguments = {name: examples.read(x) for name, x in inputs.items()}
    device = next(iter(inputs.values())).device
    if mask is not None:
        arguments["attention_mask"] = examples.visible.to(device, torch.long)
    if "position_ids" in inspect.signature(decoder.forward).parameters:
        arguments["position_ids"] = examples.position_ids.to(device)

    def note(layer_index: int, seen: AttentionInputs) -> None:
        if layer_index in layer_indices:
            layer = cache.by_index[layer_index]
            layer.predictor = layer.cache.predictor(examples.seen(seen))

    stock_layers = [layer for _, layer in compat.new_stock_layers(model)]
    recorder = RoutedCache(stock_layers, cache.fingerprint)
    record_layers(recorder, cache, note)
    with recorder.guard.step():
        decoder(past_key_values=recorder, use_cache=True, **arguments)


def _columns(x: Tensor, columns: Tensor) -> Tensor:
    """Return the columns int64 [B, E] of x [B, H, T, D]."""
    return x.gather(2, columns[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3]))
