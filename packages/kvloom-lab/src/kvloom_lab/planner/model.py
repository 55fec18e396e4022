"""What the planner knows of a model: its layers, weights, positions and activations.

Everything comes from the config. The model is built on torch's meta device, which allocates no
weights. So the model's own code determines what is counted. The activations of a prompt are the
tensors that are alive at once in the model's own forward pass there. A function that returns an
output of the right shape replaces the attention of layers that kvloom compresses, and SDPA. Models
of which kvloom cannot count everything raise `UnsupportedModel`.
"""

from __future__ import annotations

import inspect
import sys
import weakref
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoConfig,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kvloom.errors import InputError, UnsupportedModel
from kvloom.hf import geometry, has_adapter, state_nbytes, stock_kinds, supported_model
from kvloom.recipe import Geometry

from ..models import located, max_positions, model_without_weights
from .weights import Weights, count_weights

_NAME = "kvloom_planner"
_CROSS = "cross_attention"  # which stores images alone
_TOKENS = 256  # with them, activations are those without windows
_BY_MASKS = "eager", "sdpa"  # attention that takes masks of all pairs of tokens


@dataclass(frozen=True)
class Activations:
    """Bytes of the activations of a prompt, at the widest place of a forward pass.

    Without sliding windows they are proportional to the tokens. Layers with windows attend as in
    transformers: by a mask of all pairs of tokens, or by all logits.

    points: (tokens, bytes of one row) where they were traced, ascending.
    """

    points: tuple[tuple[int, int], ...]

    def nbytes(self, tokens: int, batch: int) -> int:
        """Return the bytes of a prompt: a T + b T^2 between two points, with T tokens."""
        first, least = self.points[0]
        if tokens <= first or len(self.points) == 1:
            return batch * -(-tokens * least // first)
        after = min(bisect_left(self.points, (tokens,)), len(self.points) - 1)
        (t1, bytes1), (t2, bytes2) = self.points[after - 1 : after + 1]
        b = (bytes2 / t2 - bytes1 / t1) / (t2 - t1)
        return batch * round((bytes1 / t1 + b * (tokens - t1)) * tokens)


def trace_activations(model: PreTrainedModel, shape: Geometry) -> Activations | None:
    """Return the activations; None where the model's attention has its own code.

    model: on the meta device. Logits count for the last position only, where the model can leave
    out the others, as in `generate()`.
    """
    if has_adapter(model):
        return None
    own = model.config._attn_implementation
    AttentionInterface.register(_NAME, partial(_attention, own, shape.layer_indices))
    AttentionMaskInterface.register(_NAME, partial(_mask, own))
    windows = {layer.window for layer in shape.sliding}
    tokens = {_TOKENS} | {n for w in windows for n in (w, w + 1, 4 * w, 64 * w) if n > _TOKENS}
    try:
        model.set_attn_implementation(_NAME)
        return Activations(tuple((n, _trace(model, n)) for n in sorted(tokens)))
    except Exception:  # an operation that needs values, which the meta device does not have
        return None
    finally:
        model.set_attn_implementation(own)


def _trace(model: PreTrainedModel, tokens: int) -> int:
    row = torch.zeros(1, tokens, dtype=torch.long, device="meta")
    inputs: dict[str, Any] = {"input_ids": row, "use_cache": False}
    optional = {"position_ids": row, "attention_mask": row, "logits_to_keep": 1}
    accepted = inspect.signature(type(model).forward).parameters
    inputs |= {name: value for name, value in optional.items() if name in accepted}
    live = _Live([*model.parameters(), *model.buffers()])
    with live, _FusedAttention(), torch.no_grad():
        model(**inputs)
    return live.most


def _attention(
    own: str, layer_indices: Sequence[int], module: Any, q: Tensor, *args: Any, **kwargs: Any
) -> tuple[Tensor, Any]:
    """Return an output [B, T, Hq, D] that depends on nothing; of other layers, the model's own."""
    if own not in _BY_MASKS or getattr(module, "layer_idx", None) in layer_indices:
        return torch.empty_like(q).transpose(1, 2).contiguous(), None
    eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    return ALL_ATTENTION_FUNCTIONS.get_interface(own, eager)(module, q, *args, **kwargs)


def _mask(own: str, *args: Any, local_size: int | None = None, **kwargs: Any) -> Any:
    """Return what layers with windows get; kvloom reads padding alone."""
    if own not in _BY_MASKS or local_size is None:
        return None
    return ALL_MASK_ATTENTION_FUNCTIONS[own](*args, local_size=local_size, **kwargs)


class _FusedAttention(TorchFunctionMode):
    """Lets SDPA allocate what its kernels do: a mask in the dtype of the queries, and the output.

    Tensors without data would take the path of separate operations, with all logits.
    """

    def __torch_function__(self, fn: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if fn is not F.scaled_dot_product_attention:
            return fn(*args, **(kwargs or {}))
        q, _, v = args[:3]
        mask = (kwargs or {}).get("attn_mask")
        made = None if mask is None else torch.empty_like(mask, dtype=q.dtype)
        out = q.new_empty(*q.shape[:3], v.shape[3])
        del made  # lives as long as the output is computed
        return out


class _Live(TorchDispatchMode):
    """Adds up the storages that operations make, while they live. most: the largest sum."""

    def __init__(self, weights: list[Tensor]) -> None:
        super().__init__()
        self.sizes = {x.untyped_storage()._cdata: 0 for x in weights}
        self.now = self.most = 0

    def __torch_dispatch__(self, fn: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if fn is torch.ops.aten._local_scalar_dense.default and args[0].dtype == torch.bool:
            return True  # as for a mask without padding
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


@dataclass(frozen=True)
class ModelFacts:
    """What a model needs in addition to its cache.

    geometry: the layers that kvloom caches, and those with a sliding window. states: bytes of the
    states of each layer with some, such as linear attention, batch 1. activations: None where they
    cannot be traced. layers: all decoder layers. dtype_stated: whether the config states the dtype
    of the weights; if not, float32 is counted. image_token: bytes of a token of an image in layers
    that attend to nothing else (Mllama), batch 1.
    """

    name: str
    architecture: str
    geometry: Geometry
    states: tuple[int, ...]
    weights: Weights
    activations: Activations | None
    layers: int
    positions: int | None
    dtype_stated: bool
    image_token: int = 0


def read_model(model: str | Path | PreTrainedConfig) -> ModelFacts:
    """Return the facts of a model.

    model: a folder with config.json, a config file, a hub id, "reference", "smollm2", or a config.
    Reads no weights; uses the network for a hub id alone. Raises `InputError` if there is no config
    to read, and `UnsupportedModel` for an architecture or a quantization of weights that cannot be
    counted.
    """
    if isinstance(model, PreTrainedConfig):
        config, name = model, model.model_type
    elif isinstance(model, str | Path):
        config, name = _read_config(str(model)), _short_name(str(model))
    else:
        raise InputError(
            f"a {type(model).__name__} is no model to plan for; give its config, folder or hub id"
        )
    stated = any(c.dtype is not None for c in (config, config.get_text_config(decoder=True)))
    meta_model = _build(config, name)
    kinds = stock_kinds(supported_model(meta_model))
    states = state_nbytes(meta_model)
    _refuse_other_layers(meta_model, kinds, states is not None)
    shape = geometry(meta_model)
    return ModelFacts(
        name,
        type(meta_model).__name__,
        shape,
        tuple(filter(None, states or ())),
        count_weights(meta_model),
        trace_activations(meta_model, shape),
        len(kinds),
        max_positions(meta_model),
        stated,
        kinds.count(_CROSS) * shape.layer_token_nbytes(),
    )


def _read_config(model: str) -> PreTrainedConfig:
    """Return the config of a folder, a file, a hub id, or a model that comes with kvloom."""
    path = Path(model)
    if path.is_file() and path.suffix != ".json":
        raise InputError(
            f"{model!r} is not a config; give a folder with config.json, that file, or a hub id"
        )
    source = model if path.is_file() else located(model)
    try:
        return AutoConfig.from_pretrained(source, trust_remote_code=False)
    except Exception as error:  # whatever the readers of configs raise
        reason = " ".join(str(error).split()) or type(error).__name__
        raise InputError(
            f"the config of {model!r} cannot be read ({reason}); give a folder with config.json, "
            "that file, or a hub id"
        ) from error


def _short_name(model: str) -> str:
    """Return a model's name in results: its hub id, or the name of its folder."""
    path = Path(model)
    if path.is_file():
        path = path.absolute().parent if path.name == "config.json" else path
    return path.name or model if path.exists() else model


def _build(config: PreTrainedConfig, name: str) -> PreTrainedModel:
    """Return the model on the meta device; raises `UnsupportedModel` if transformers has none."""
    if config.is_encoder_decoder:
        raise UnsupportedModel(
            f"{name} cannot be planned: encoder-decoder models are not supported"
        )
    layers = getattr(config.get_text_config(decoder=True), "num_hidden_layers", 1)
    if layers < 1:
        raise UnsupportedModel(
            f"{name} cannot be planned: its config has {layers} layers; give one with 1 or more"
        )
    try:
        return model_without_weights(config)
    except Exception as error:  # no such class, or a config that its class refuses
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UnsupportedModel(
            f"{name} cannot be planned: transformers builds no decoder from its config "
            f"({reason[:200]})"
        ) from error


def _refuse_other_layers(model: Any, kinds: list[str], counts_states: bool) -> None:
    """Raise `UnsupportedModel` for layers whose bytes are not known."""
    counted = ["full_attention", "sliding_attention", _CROSS]
    counted.append("DummyLayer")  # which stores nothing
    if counts_states:
        counted.append("LinearAttentionLayer")
    others = sorted({kind for kind in kinds if kind not in counted})
    if others:
        uncounted = [i for i, kind in enumerate(kinds) if kind in others]
        raise UnsupportedModel(
            f"{type(model).__name__} cannot be planned: kvloom cannot count what layers "
            f"{uncounted} store ({', '.join(others)}); attach the model itself and read its report"
        )
