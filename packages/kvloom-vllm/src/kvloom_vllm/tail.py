"""The exact tokens of a request's page that is not full, in vLLM's own pool.

Each layer has a second layer beside it, whose cache is one block per request: vLLM allocates it
with the request, frees it at its end or when the request is preempted, and never shares it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.attention.backend import AttentionBackend, AttentionMetadataBuilder
from vllm.v1.kv_cache_interface import CircularBufferSpec, KVCacheLayout

LAYOUT = KVCacheLayout.BLHNC
"""Blocks outermost: packed pages and exact tails of all layers share a block of bytes."""


@dataclass(frozen=True, kw_only=True)
class TailSpec(CircularBufferSpec):
    """One block per request: room for the exact tokens of a page."""

    def max_num_blocks_per_req(self, vllm_config: Any, max_len: int) -> int:
        """Return the width of the block table, which the first runner also maps slots by."""
        return -(-max_len // self.block_size)


class TailBuilder(AttentionMetadataBuilder):
    """Gives each row of a step the block of its tail."""

    def __init__(self, kv_cache_spec: Any, layer_names: Any, vllm_config: Any, device: Any) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> torch.Tensor:
        """Return the block of each row's tail, int64 [rows]."""
        m = common_attn_metadata
        return m.block_table_tensor[: m.num_reqs, 0].long()


class TailBackend(AttentionBackend):
    """What vLLM asks about tails; nothing attends to them by it."""

    @staticmethod
    def get_name() -> str:
        """Return a name for logs."""
        return "KVLOOM_TAIL"

    @staticmethod
    def get_impl_cls() -> Any:
        """Raise: tails have no attention of their own."""
        raise NotImplementedError("the layer beside a tail attends to it")

    @staticmethod
    def get_builder_cls() -> type[TailBuilder]:
        """Return what finds the blocks of a step."""
        return TailBuilder

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        """Return the layout in which pages of several sizes share blocks."""
        return (LAYOUT,)


class TailLayer(torch.nn.Module, AttentionLayerBase):
    """The tail of one layer, as vLLM allocates caches: by layers of `static_forward_context`.

    Of a token, it has keys and then values, in the model's dtype. engine: see `engine.of`.
    """

    def __init__(
        self, config: Any, engine: Any, heads: int, head_dim: int, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.engine = engine
        layers = config.compilation_config.static_forward_context
        self.prefix = (
            f"kvloom_tail.{sum(isinstance(layer, TailLayer) for layer in layers.values())}"
        )
        layers[self.prefix] = self
        self.heads, self.head_dim, self.dtype = heads, head_dim, dtype
        self._memory = torch.empty(0, dtype=dtype)

    @property
    def kv_cache(self) -> torch.Tensor:
        """The memory that vLLM gave it, [blocks, H, N, 2 D]; empty before."""
        return self._memory

    @kv_cache.setter
    def kv_cache(self, memory: torch.Tensor) -> None:
        self._memory = memory
        if memory.numel():
            self.engine.allocated(memory)

    def get_attn_backend(self) -> type[TailBackend]:
        """Return what vLLM asks about this layer."""
        return TailBackend

    def get_kv_cache_spec(self, vllm_config: Any) -> TailSpec:
        """Return one exact page per request."""
        return TailSpec(
            block_size=vllm_config.cache_config.block_size, num_kv_heads=self.heads,
            head_size=self.head_dim, dtype=self.dtype, dcp_sharded=False,
        )  # fmt: skip
