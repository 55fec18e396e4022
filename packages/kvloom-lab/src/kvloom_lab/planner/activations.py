"""Bytes of activations that a prompt needs at the widest place of a forward pass.

Runs the model's own forward pass on the meta device and adds up the tensors that are alive at once;
nothing is computed. Attention is replaced by a function that returns an output of the right shape,
as kvloom's attention stores no weights of attention.
"""

from __future__ import annotations

import inspect
import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from kvloom.hf import has_adapter

_NAME = "kvloom_planner"
_TOKENS = 256  # activations are proportional to the tokens


def working_bytes(model: PreTrainedModel) -> int | None:
    """Return the bytes per prompt token; None where the model's attention has its own code.

    model: on the meta device. Logits count for the last position only, where the model can leave
    out the others, as in `generate()`.
    """
    if has_adapter(model):
        return None
    AttentionInterface.register(_NAME, _attention)
    AttentionMaskInterface.register(_NAME, lambda *args, **kwargs: None)
    before = model.config._attn_implementation
    try:
        model.set_attn_implementation(_NAME)
        return _trace(model)
    except Exception:  # an operation that needs values, which the meta device does not have
        return None
    finally:
        model.set_attn_implementation(before)


def _trace(model: PreTrainedModel) -> int:
    row = torch.zeros(1, _TOKENS, dtype=torch.long, device="meta")
    inputs: dict[str, Any] = {"input_ids": row, "use_cache": False}
    optional = {"position_ids": row, "attention_mask": row, "logits_to_keep": 1}
    accepted = inspect.signature(type(model).forward).parameters
    inputs |= {name: value for name, value in optional.items() if name in accepted}
    live = _Live([*model.parameters(), *model.buffers()])
    with live, torch.no_grad():
        model(**inputs)
    return -(-live.most // _TOKENS)


def _attention(module: Any, q: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
    """Return an output [B, T, Hq, D] that depends on nothing."""
    return torch.empty_like(q).transpose(1, 2).contiguous(), None


class _Live(TorchDispatchMode):
    """Adds up the storages that operations make, while they live. most: the largest sum."""

    def __init__(self, weights: list[Tensor]) -> None:
        super().__init__()
        self.sizes = {x.untyped_storage()._cdata: 0 for x in weights}
        self.now = self.most = 0

    def __torch_dispatch__(self, fn: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = fn(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, Tensor):
                self._add(x.untyped_storage())
        return out

    def _add(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self.sizes:
            return
        self.sizes[key] = storage.nbytes()
        self.now += storage.nbytes()
        self.most = max(self.most, self.now)
        weakref.finalize(storage, self._remove, key)

    def _remove(self, key: int) -> None:
        self.now -= self.sizes.pop(key)
