"""The extra pass of recipes that learn from examples how queries change in a repetition.

Decides what the model reads, before the prompt itself: the first tokens of the prompt, the same
again, and the same a third time, at least a chunk of `Rotated` later. Nothing of the pass is
stored.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..keep import Rotated
from ..keep.query_predictor import Examples
from ..keep.rotated import SHARE
from ..kernels.select.reference import gather
from . import compat
from .masks import padding_mask
from .recording import AttentionInputs, record_layers
from .routed_cache import RoutedCache

_OF_TOKENS = "input_ids", "inputs_embeds", "token_type_ids"
"""Arguments [B, N, ...] of which the pass reads some tokens."""
_OF_CALL = (
    "attention_mask", "position_ids", "cache_position", "logits_to_keep", "labels",
    "mm_token_type_ids", "moe_mm_token_type_ids",
)  # fmt: skip
"""Arguments that change nothing in the pass, or that it makes itself."""
_READ = 3  # how often the pass reads an example


class ExamplePass(NamedTuple):
    """The columns of the pass: padding, the first E tokens of a row, and the same twice again.

    Attributes:
        tokens: int64 [B, 3 E], which token of the prompt a column has.
        visible: bool [B, 3 E], False for padding.
        position_ids: int64 [B, 3 E].
        columns: int64 [B, 3, E], the columns of each example; any columns where a row has fewer.
        distances: int64 [B, 3], from an example to the same in each of the three.
        begin: int64 [B, 1], the position of each row's first token.
        real: bool [B, E], False where a row has fewer, or learns nothing.
    """

    tokens: Tensor
    visible: Tensor
    position_ids: Tensor
    columns: Tensor
    distances: Tensor
    begin: Tensor
    real: Tensor

    @classmethod
    def of(
        cls, visible: Tensor, positions: Tensor, count: int, third: Tensor, least: int
    ) -> ExamplePass:
        """Return the pass of `count` examples of each row.

        visible: bool [B, N], False for padding. positions: int64 [B, N]. third: int64 [B, 1],
        the distance of the third reading, which has at least the positions after the second. least:
        the tokens of the shortest row that learns; from shorter ones, the pass reads a part.
        """
        column = torch.arange(_READ * count, device=visible.device)
        tokens = visible.sum(dim=-1, keepdim=True)
        own = (tokens // SHARE).clamp(max=count)  # examples of the row
        far = torch.maximum(third, 2 * own)
        distances = torch.cat([torch.zeros_like(own), own, far], dim=-1)
        padding = _READ * (count - own)
        place = (column - padding).clamp(min=0)
        example, reading = place % own.clamp(min=1), place // own.clamp(min=1)
        order = (~visible).byte().argsort(dim=-1, stable=True)
        begin = positions.gather(1, order[:, :1])
        starts = padding + own * column[:_READ]
        return cls(
            order.gather(1, example),
            column >= padding,
            begin + example + distances.gather(1, reading.clamp(max=_READ - 1)),
            (starts[..., None] + column[:count]).clamp(max=_READ * count - 1),
            distances,
            begin,
            (column[:count] < own) & (tokens >= least),
        )

    def read(self, x: Tensor) -> Tensor:
        """Return what the pass reads of an argument [B, N, ...]."""
        index = self.tokens.to(x.device).view(*self.tokens.shape, *(1,) * (x.dim() - 2))
        return x.gather(1, index.expand(-1, -1, *x.shape[2:]))

    def examples(self, inputs: AttentionInputs) -> Examples:
        """Return the examples as a layer has seen them."""
        device = inputs.q.device
        first, *again = self.columns.to(device).unbind(dim=1)
        _, *distances = self.distances.to(device).split(1, dim=-1)
        return Examples(
            _at(inputs.q, first), _at(inputs.k, first), [_at(inputs.q, x) for x in again],
            distances, self.begin.to(device), self.real.to(device),
        )  # fmt: skip


def needed(cache: RoutedCache, tokens: int) -> bool:
    """Return whether a layer learns from examples of a prompt of `tokens` tokens."""
    return bool(_learning(cache, tokens))


def learn(model: PreTrainedModel, cache: RoutedCache, kwargs: dict[str, Any]) -> None:
    """Give layers what they learn from the first tokens of a prompt, for the call that follows.

    kwargs: the arguments of that call. Nothing is learned from a prompt with images, or from the
    tokens of a draft.
    """
    inputs = {name: x for name in _OF_TOKENS if (x := kwargs.get(name)) is not None}
    others = kwargs.keys() - {*_OF_TOKENS, *_OF_CALL}
    positions = kwargs.get("position_ids")
    if not inputs or any(compat.has_tensors(kwargs[name]) for name in others):
        return
    if positions is not None and positions.dim() == 3:
        if bool((positions[-3:] != positions[-1]).any()):  # of an image
            return
        positions = positions[-1]
    rows, tokens = next(iter(inputs.values())).shape[:2]
    tokens = min(tokens, cache.accepted_tokens or tokens)
    if not needed(cache, tokens):
        return
    visible, mask = torch.ones(rows, tokens, dtype=torch.bool), kwargs.get("attention_mask")
    if mask is not None:
        visible = padding_mask(mask, tokens)
    place = torch.arange(tokens, device=visible.device).expand(rows, -1)
    if positions is not None:
        place = positions[:, :tokens].expand(rows, -1).to(visible.device)
    inputs = {name: x[:, :tokens] for name, x in inputs.items()}
    learn_from(model, cache, inputs, visible, place, padded=mask is not None)


def learn_from(
    model: PreTrainedModel,
    cache: RoutedCache,
    inputs: dict[str, Tensor],
    visible: Tensor,
    positions: Tensor,
    padded: bool = False,
) -> None:
    """Give layers what they learn from a prompt of N tokens.

    inputs: of the decoder, [B, N / SHARE or more, ...]. visible: bool [B, N], False for
    padding. positions: int64 [B, N]. padded: whether the pass needs a mask.
    """
    tokens, row_tokens = visible.shape[1], visible.sum(dim=-1).tolist()
    limit = compat.max_positions(model)
    limit = _READ * tokens if limit is None else limit
    for scorer, layer_indices in _learning(cache, tokens).items():
        most = min(scorer.examples, scorer.chunk, limit // _READ)
        third = visible.new_tensor([[scorer.least_shift(n)] for n in row_tokens], dtype=torch.long)
        third = third.clamp(max=limit - most)
        examples = ExamplePass.of(visible, positions, most, third, scorer.least_prompt)
        _run(model, cache, layer_indices, examples, inputs, padded)


def _learning(cache: RoutedCache, tokens: int) -> dict[Rotated, set[int]]:
    """Return the scores that learn from a prompt of `tokens` tokens, and their layers."""
    found: dict[Rotated, set[int]] = {}
    for layer_index, layer in cache.by_index.items():
        recipe = layer.cache.recipe
        keep = recipe.keep
        if keep is not None and keep.needs_examples(tokens) and not recipe.compress_after:
            assert isinstance(keep.scorer, Rotated)
            found.setdefault(keep.scorer, set()).add(layer_index)
    return found


@torch.no_grad()
def _run(
    model: PreTrainedModel,
    cache: RoutedCache,
    layer_indices: set[int],
    examples: ExamplePass,
    inputs: dict[str, Tensor],
    padded: bool,
) -> None:
    """Run the pass for some layers."""
    decoder = compat.decoder(model)
    arguments = {name: examples.read(x) for name, x in inputs.items()}
    arguments["position_ids"] = examples.position_ids.to(model.device)
    arguments = {name: x for name, x in arguments.items() if compat.takes(decoder, name)}
    if padded:
        arguments["attention_mask"] = examples.visible.to(model.device, torch.long)

    def note(layer_index: int, inputs: AttentionInputs) -> None:
        if layer_index in layer_indices:
            layer = cache.by_index[layer_index]
            layer.predictor = layer.cache.fit_predictor(examples.examples(inputs))

    recorder = RoutedCache(compat.stock_layers(model), cache.config_key)
    record_layers(recorder, cache, note)
    with recorder.guard.step():
        decoder(past_key_values=recorder, use_cache=True, **arguments)


def _at(x: Tensor, columns: Tensor) -> Tensor:
    """Return the columns int64 [B, E] of x [B, H, T, D]."""
    return gather(x, columns.unsqueeze(1).expand(-1, x.shape[1], -1))
