"""Examples of prompts in continuous batching: layers learn from them as those of a cache do.

Decides when the extra pass runs: before the step with which enough of a prompt's tokens are known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel

from ...keep.rotated import SHARE
from .. import examples
from ..routed_cache import RoutedCache
from .head_pages import EvictingAllocator
from .prompt_eviction import PromptChoice


@contextmanager
def learning(
    model: PreTrainedModel,
    cache: RoutedCache,
    blocks: EvictingAllocator,
    outside_pages: Callable[[], AbstractContextManager[None]],
) -> Iterator[None]:
    """Run the extra pass of each prompt that needs one, within the block.

    cache: an empty one of the model and the recipe, whose layers learn. outside_pages: in what it
    returns, the model runs with caches of kvloom.
    """

    def before_step(_: Any, args: tuple, kwargs: dict[str, Any]) -> None:
        pages = getattr(kwargs.get("cache"), "cache_allocators", {})
        if blocks not in pages.values():  # a call of another thread
            return
        for request_id, row, _ in blocks.rows:
            choice = blocks.choices.get(request_id)
            if choice is None or choice.predictors or not examples.needed(cache, choice.tokens):
                continue
            new_ids = kwargs["input_ids"][:, row.batch_begin : row.batch_end]
            choice.ids.append(new_ids.clone())  # transformers writes over them
            if sum(ids.shape[1] for ids in choice.ids) >= choice.tokens // SHARE:
                with outside_pages():
                    _learn(model, cache, blocks.layer_indices, choice)

    hook = model.register_forward_pre_hook(before_step, with_kwargs=True)
    try:
        yield
    finally:
        hook.remove()


def _learn(
    model: PreTrainedModel, cache: RoutedCache, layer_indices: list[int], choice: PromptChoice
) -> None:
    """Let the layers learn from a prompt whose first tokens are known."""
    inputs = {"input_ids": torch.cat(choice.ids, dim=1)}
    place = torch.arange(choice.tokens)[None]
    examples.learn_from(model, cache, inputs, torch.ones_like(place, dtype=torch.bool), place)
    for i, layer_index in enumerate(layer_indices):
        layer = cache.by_index[layer_index]
        if layer.predictor is not None:
            choice.predictors[i], layer.predictor = layer.predictor, None
    choice.ids.clear()
