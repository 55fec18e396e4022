"""The recipe of one engine, and the plan of each of its layers.

Decides which layer gets which plan, and checks the engine before any memory is allocated.
"""

from __future__ import annotations

import time
from typing import Any
from weakref import ref

import vllm
from torch import Tensor
from vllm.logger import init_logger
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

from kvloom import Recipe
from kvloom.paged import LayerPlan, PageLayout
from kvloom.recipe import Geometry
from kvloom.store import Calibration, LayerEncoding

from . import report, request, rotary
from .calibrated import load_calibration
from .refusal import (
    refuse_attention_layers,
    refuse_engine,
    refuse_other_layers,
    refuse_shared_indices,
    refuse_split_calibration,
    refuse_version,
)
from .rule import paged
from .tail import TailLayer

logger = init_logger("vllm.plugins.kvloom")


class Engine:
    """The recipe of an engine in one process."""

    def __init__(self, config: Any) -> None:
        recipe_text = request.recipe_text(config)
        if recipe_text is None:
            raise ValueError(
                "this process began with an engine with kvloom, and vLLM keeps that choice; start "
                "an engine without kvloom in a process of its own"
            )
        refuse_version(vllm.__version__)
        refuse_engine(config)
        self.recipe_text, self.began = recipe_text, time.time()  # before weights are loaded
        self.page: int = config.cache_config.block_size
        self.recipe: Recipe = paged(recipe_text, self.page)
        refuse_split_calibration(self.recipe, config.parallel_config.tensor_parallel_size)
        self._config = ref(config)
        self.layouts: dict[int, PageLayout] = {}
        self._reported = False
        self._calibrations: dict[str | None, Calibration] = {}

    def assign(self) -> None:
        """Give every packed layer its plan, by the number in its name; once per model."""
        from .backend import KvloomImpl

        config = self._config()
        assert config is not None
        modules = config.compilation_config.static_forward_context
        layers = {
            name: module
            for name, module in modules.items()
            if isinstance(getattr(module, "impl", None), KvloomImpl)
        }
        others = (
            module
            for name, module in modules.items()
            if isinstance(module, AttentionLayerBase)
            and not isinstance(module, TailLayer)
            and name not in layers
        )
        refuse_other_layers({type(module).__name__ for module in others})
        refuse_attention_layers(layers)
        layer_indices = {name: layer_index(name) for name in layers}
        refuse_shared_indices(layer_indices)
        first = next(iter(layers.values())).impl
        geometry = Geometry(
            len(layers), first.num_heads, first.num_kv_heads, first.head_size, first.dtype,
            cached=tuple(sorted(layer_indices.values())),
        )  # fmt: skip
        self.recipe.check(geometry)
        for name, layer in layers.items():
            if layer.impl.plan is None:
                plan = self._plan(layer_indices[name], geometry)
                layer.impl.plan = plan
                self.layouts[layer_indices[name]] = PageLayout(
                    plan, self.page, first.num_kv_heads, first.head_size, first.dtype
                )
                layer.attn_backend = layer.attn_backend.of_layer(plan)

    def allocated(self, memory: Tensor) -> None:
        """Report once what fits into vLLM's pool, given a tail's memory [blocks, H, N, 2 D]."""
        if not self._reported:
            self._reported = True
            block = memory.stride(0) * memory.itemsize
            for line in report.lines(self.recipe_text, self.layouts, memory.shape[0], block):
                logger.info_once(line)

    def _plan(self, layer_index: int, geometry: Geometry) -> LayerPlan:
        recipe = self.recipe.for_layer(layer_index, geometry.layer_indices)
        store = recipe.store
        encodings: dict[str, LayerEncoding | None] = {}
        if store.calibrated:
            calibration = self._calibration(store.calibration)
            for side, fmt in store.quantized.items():
                encodings[side] = calibration.encoding(layer_index, side, fmt)
        rope = rotary.rope(recipe) if store.pre_rope else None
        return LayerPlan.of_recipe(recipe, encodings.get("keys"), encodings.get("values"), rope)

    def _calibration(self, path: str | None) -> Calibration:
        """Return a calibration, read once; path: as for `load_calibration`."""
        if path not in self._calibrations:
            config = self._config()
            assert config is not None
            model = config.model_config
            found = load_calibration(path, model.model, model.hf_config)
            self._calibrations[path] = found
        return self._calibrations[path]


def of(config: Any) -> Engine:
    """Return the engine of a vLLM configuration, checked at the first call.

    Its layers keep it: vLLM's configurations are not hashable.
    """
    layers = config.compilation_config.static_forward_context.values()
    return next((layer.engine for layer in layers if isinstance(layer, TailLayer)), None) or Engine(
        config
    )


def layer_index(name: str) -> int:
    """Return the index of a layer: the first in its name, as in model.layers.3.self_attn.attn."""
    layer_indices = [int(part) for part in name.split(".") if part.isdigit()]
    if not layer_indices:
        raise ValueError(f"kvloom in vLLM: layer {name!r} has no number; run without kvloom")
    return layer_indices[0]
