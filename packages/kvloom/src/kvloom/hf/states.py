"""Bytes of the states that a model's layers hold beside keys and values, from its config alone.

The decoder reads a few tokens on torch's meta device, which holds no data, with the cache layers of
transformers. So the model's own code determines the shapes and dtypes.
"""

from __future__ import annotations

import copy
from weakref import WeakKeyDictionary

import torch
from transformers import PreTrainedModel

from . import compat, stock
from .routed_cache import RoutedCache

_TOKENS = 8  # a state has one size after any prompt

_COUNTED: WeakKeyDictionary[PreTrainedModel, dict[torch.dtype, list[int] | None]] = (
    WeakKeyDictionary()
)


def state_nbytes(model: PreTrainedModel) -> list[int] | None:
    """Return the bytes of the states of each layer, batch 1; 0 in layers without states.

    None: the model's code needs values, which the meta device does not have. Under tensor
    parallelism, the states of the whole model are counted.
    """
    counted = _COUNTED.setdefault(model, {})
    if model.dtype not in counted:
        counted[model.dtype] = _count(model)
    return counted[model.dtype]


def _count(model: PreTrainedModel) -> list[int] | None:
    layers = compat.stock_layers(model)
    if any(map(stock.has_states, layers)):
        decoder = compat.decoder(model)
        try:
            with torch.device("meta"), torch.no_grad():
                meta_decoder = type(decoder)._from_config(
                    copy.deepcopy(decoder.config), dtype=model.dtype, attn_implementation="eager",
                    experts_implementation="batched_mm",
                )  # fmt: skip
                meta_decoder.eval()(
                    input_ids=torch.zeros(1, _TOKENS, dtype=torch.long),
                    past_key_values=RoutedCache(layers, {}),
                    use_cache=not compat.refuses_caches(model),
                )
        except Exception:  # whatever operations on the meta device raise
            return None
    return [stock.state_nbytes(layer) for layer in layers]
