"""The extra forward passes of recipes that score a prompt while the model repeats it (KVzip).

Decides what the model reads again, chunk by chunk, and at which positions. The passes belong to the
step of the prompt: their tokens are not stored, and a failure undoes the whole step. Where the
decoder has read embeddings, as of an image, it reads these again; causally, as any repetition.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..errors import CacheMisuse
from ..keep import Keep, Reconstruction
from . import compat, stock
from .guard import note_inputs, outside_inference_mode
from .masks import padding_mask
from .routed_cache import RoutedCache

# A chunk follows this many tokens before it, so that the model can find its place.
_LEAD = 8
# Where the model lacks positions, chunks become smaller down to this many tokens: each is a pass.
_LEAST_CHUNK = 32
_IMAGES, _LAYER_IMAGES = "visual_pos_masks", "deepstack_visual_embeds"
"""Arguments of Qwen3-VL's decoder: which tokens are of images, and what layers add to these."""
_OF_TOKENS = "inputs_embeds", "per_layer_inputs", "token_type_ids", _IMAGES
"""Arguments of a decoder [B, P, ...] that it reads again."""
_OF_CALL = "input_ids", "attention_mask", "position_ids", "cache_position", "past_key_values"


class Repetition:
    """The passes that repeat a prompt of an empty cache, once it is stored.

    prompt: token ids int64 [B, P], or embeddings [B, P, hidden]. mask: the padding mask of the
    call, [B, P]; positions: its position ids. None: not given. keeps: of the layers that score by
    the repetition, with equal scorers. chunk: tokens repeated at a time, the scorer's or as many as
    the model has positions for. given: what the decoder has read, by its argument; tokens of images
    have the numbers 1, 2, ... in `visual_pos_masks`. layer_images: what layers add to these, each
    [tokens of images, hidden]. problem: why it cannot be repeated.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        cache: RoutedCache,
        prompt: Tensor,
        mask: Tensor | None,
        positions: Tensor | None,
        keeps: Sequence[Keep],
    ) -> None:
        scorer = keeps[0].scorer
        assert isinstance(scorer, Reconstruction)
        self.model, self.cache, self.prompt = model, cache, prompt
        self.rows, self.tokens = prompt.shape[:2]
        self.given: dict[str, Tensor] | None = None  # before the decoder has read the prompt
        self.layer_images: list[Tensor] = []
        self.problem: str | None = None
        self.mask, self.positions = mask, positions
        self.instruction = scorer.instruction_ids
        self.chunk, self.least = scorer.chunk, min(scorer.chunk, _LEAST_CHUNK)
        limit = compat.max_positions(model)
        if limit is not None and not compat.has_alibi(compat.decoder_config(model)):
            room = limit - self.tokens - len(self.instruction) - _LEAD
            self.chunk = min(self.chunk, room)
        self.budget = min(keep.budget.resolve(self.tokens) for keep in keeps)

    @property
    def needed(self) -> bool:
        """Whether some layer evicts: a prompt within the budget is not repeated."""
        return self.budget < self.tokens

    def check(self) -> None:
        """Raise `CacheMisuse` if the model lacks positions, or a token of the instruction."""
        vocabulary = self.model.get_input_embeddings().weight.shape[0]
        if any(token >= vocabulary for token in self.instruction):
            raise CacheMisuse(
                f"instruction={' '.join(map(str, self.instruction))!r} has a token that the model "
                f"lacks; use ids below {vocabulary}"
            )
        if self.needed and self.chunk < self.least:
            prompt = self.tokens
            longest = prompt + self.chunk - self.least
            remedy = f"a prompt of at most {longest} tokens, or " if longest > 0 else ""
            raise CacheMisuse(
                f"the recipe repeats the prompt, and after its {prompt} tokens the model has no "
                f"positions for {self.least} more and {_LEAD + len(self.instruction)} before them; "
                f"use {remedy}another recipe, such as snapkv"
            )

    @property
    def rule(self) -> tuple[Any, ...]:
        """What, besides the prompt, decides the scores: of every layer, None where none is scored.

        Two caches with equal rules get equal scores.
        """
        scores = (layer.cache.repetition for layer in self.cache.full_layers)
        return tuple(None if x is None else x.rule for x in scores)

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Note what the decoder reads in the call of the prompt within the block."""
        hook = note_inputs(compat.decoder(self.model), self._note)
        try:
            yield
        finally:
            hook.remove()

    def _note(self, args: tuple, kwargs: dict[str, Any]) -> None:
        if self.given is not None:
            return  # it reads a repetition
        arguments = {name: x for name, x in kwargs.items() if x is not None}
        self.given = {name: arguments[name] for name in _OF_TOKENS if name in arguments}
        self.positions = arguments.get("position_ids", self.positions)
        if (images := self.given.get(_IMAGES)) is not None:
            numbers = images.flatten().cumsum(dim=0).view(images.shape)
            self.given[_IMAGES] = numbers * images
            self.layer_images = list(arguments.get(_LAYER_IMAGES, ()))
        others = arguments.keys() - {*_OF_TOKENS, *_OF_CALL, _LAYER_IMAGES}
        unknown = sorted(name for name in others if compat.has_tensors(arguments[name]))
        if unknown:
            self.problem = f"the model gives its decoder {unknown[0]!r}, which kvloom cannot repeat"
        elif "per_layer_inputs" in arguments and self.instruction:
            self.problem = "the model makes no per_layer_inputs of its instruction"
        elif any(x.shape[:2] != (self.rows, self.tokens) for x in self.given.values()):
            self.problem = "the decoder reads other tokens than the call was given"

    def take_scores(self, repetition: Repetition) -> None:
        """Take the scores of another cache with an equal rule, instead of `score`."""
        if not self.needed:
            return
        for layer, source in zip(self.cache.full_layers, repetition.cache.full_layers, strict=True):
            scores, given = layer.cache.repetition, source.cache.repetition
            if scores is not None and given is not None:
                scores.copy_scores(given.scores)

    def evict(self) -> None:
        """Evict in every layer that waits for scores."""
        for layer in self.cache.full_layers:
            outside_inference_mode(layer.cache.end_repetition)()
        self.given, self.layer_images = {}, []

    @torch.no_grad()
    def score(self) -> None:
        """Repeat the prompt if it is needed; every layer notes the scores.

        Raises `CacheMisuse` where the decoder has read what cannot be repeated.
        """
        if self.needed and self.problem is not None:
            raise CacheMisuse(
                f"the recipe repeats the prompt, and {self.problem}; use another recipe, such as "
                "snapkv"
            )
        decoder = compat.decoder(self.model)
        layers = self.cache.compressed
        try:
            for begin, lo, hi in self._chunks() if self.needed else ():
                for layer in layers:
                    layer.repeated = lo, hi
                restore_stock = stock.remember(self.cache.stock_layers)
                decoder(
                    past_key_values=self.cache, use_cache=True, **self._inputs(decoder, begin, hi)
                )
                restore_stock()
        finally:
            for layer in layers:
                layer.repeated = None

    def _chunks(self) -> Sequence[tuple[int, int, int]]:
        """Return (first token read, first token scored, end) of each chunk of the prompt."""
        prompt = self.tokens
        ends = [*range(0, prompt, self.chunk), prompt]
        return [(max(0, lo - _LEAD), lo, hi) for lo, hi in pairwise(ends)]

    def _inputs(self, decoder: torch.nn.Module, begin: int, end: int) -> dict[str, Any]:
        """Return the arguments of the call that reads the instruction and the tokens begin to end.

        Masks and positions are given where the call of the prompt gave them.
        """
        device = self.prompt.device
        instruction = torch.tensor(self.instruction, dtype=torch.long, device=device)
        instruction = instruction.expand(self.rows, -1)
        inputs: dict[str, Any] = dict(self.given or {})
        if "inputs_embeds" not in inputs:
            inputs["input_ids"] = self.prompt
        for name, x in inputs.items():
            inputs[name] = x = x[:, begin:end]
            if self.instruction:
                inputs[name] = torch.cat([self._before(name, instruction), x], dim=1)
        length = len(self.instruction) + end - begin
        new = torch.ones(self.rows, length, dtype=torch.long, device=device)
        if self.mask is not None:
            mask = padding_mask(self.mask, self.tokens).to(device, torch.long)
            new = torch.cat([torch.ones_like(instruction), mask[:, begin:end]], dim=1)
            new, order = new.sort(dim=1, descending=True, stable=True)  # padding goes last
            for name, x in inputs.items():
                places = order.view(*order.shape, *(1,) * (x.dim() - 2)).expand(x.shape)
                inputs[name] = x.gather(1, places)
            inputs["attention_mask"] = torch.cat([mask, new], dim=1)
        if (numbers := inputs.get(_IMAGES)) is not None:
            inputs[_IMAGES] = numbers > 0
            rows = numbers[numbers > 0] - 1
            inputs[_LAYER_IMAGES] = [x[rows] for x in self.layer_images]
        if self.positions is not None and compat.takes(decoder, "position_ids"):
            last = self.positions.amax(dim=-1, keepdim=True)
            inputs["position_ids"] = last + new.cumsum(dim=-1)
        return inputs

    def _before(self, name: str, instruction: Tensor) -> Tensor:
        """Return an argument of the decoder for the instruction int64 [B, I]."""
        if name == "inputs_embeds":
            embedded: Tensor = self.model.get_input_embeddings()(instruction)
            return embedded
        return instruction if name == "input_ids" else torch.zeros_like(instruction)


def of_prompt(
    model: PreTrainedModel, cache: RoutedCache, kwargs: dict[str, Any]
) -> Repetition | None:
    """Return the repetition of the prompt in a call's arguments; None if no layer needs one.

    Raises `CacheMisuse` where the prompt cannot be repeated.
    """
    layers = [layer.cache for layer in cache.full_layers]
    waiting = [layer for layer in layers if not layer.seen and layer.repetition is not None]
    keeps = [keep for layer in waiting if (keep := layer.recipe.keep) is not None]
    if not keeps:
        return None
    if any(keep.scorer != keeps[0].scorer for keep in keeps):
        raise CacheMisuse(
            "layers of one recipe repeat the prompt in different chunks or by different "
            "instructions; give all of them the same"
        )
    prompt = kwargs.get("input_ids")
    prompt = kwargs.get("inputs_embeds") if prompt is None else prompt
    if prompt is None:
        return None  # the model's own error names what is missing
    mask, positions = kwargs.get("attention_mask"), kwargs.get("position_ids")
    repetition = Repetition(model, cache, prompt, mask, positions, keeps)
    repetition.check()
    return repetition
