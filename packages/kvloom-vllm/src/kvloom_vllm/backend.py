"""The attention backend that vLLM runs for an engine that asks for a recipe."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.config import get_current_vllm_config
from vllm.forward_context import get_forward_context
from vllm.v1.attention.backend import AttentionBackend, AttentionImpl, MultipleOf
from vllm.v1.kv_cache_interface import KVCacheLayout

from kvloom.paged import LayerPlan, PackedPages, PagedAttention, PagedStep, PageLayout

from . import engine
from .refusal import refuse_layer
from .step import StepBuilder
from .tail import LAYOUT, TailLayer


class KvloomBackend(AttentionBackend):
    """Packed pages; `of_layer` makes the class for a layer's own plan."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto"]
    forward_includes_kv_cache_update = True
    plan: ClassVar[LayerPlan | None] = None

    @classmethod
    def of_layer(cls, plan: LayerPlan) -> type[KvloomBackend]:
        """Return the backend of a layer with this plan."""
        return type(cls.__name__, (cls,), {"plan": plan})

    @staticmethod
    def get_name() -> str:
        """Return the name of the backend that it stands in for, which vLLM looks up."""
        return "CPU_ATTN"

    @classmethod
    def layout(cls, spec: Any) -> PageLayout:
        """Return where the tensors of a page lie, given vLLM's spec of a layer."""
        if cls.plan is None:
            raise RuntimeError("kvloom in vLLM: a layer was given no recipe; report this")
        dtype = torch.empty(0, dtype=spec.dtype).dtype
        return PageLayout(cls.plan, spec.block_size, spec.num_kv_heads, spec.head_size, dtype)

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        """Return the spec with the bytes of a packed page."""
        if spec.state_content_bytes is not None:
            return spec
        content = cls.layout(spec).bytes_per_token_and_head
        return replace(spec, state_content_bytes=content, dtype=torch.uint8)

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        """Return the sizes of pages; `rule.paged` refuses those that the recipe does not fit."""
        return [MultipleOf(1)]

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        """Return the layout in which pages of several sizes share blocks."""
        return (LAYOUT,)

    @classmethod
    def supports_kv_connector(cls) -> bool:
        """Return True: kvloom's own runs, and `refusal` names the others."""
        return True

    @staticmethod
    def get_impl_cls() -> type[KvloomImpl]:
        """Return what attends."""
        return KvloomImpl

    @staticmethod
    def get_builder_cls() -> type[StepBuilder]:
        """Return what makes a step of vLLM's metadata."""
        return StepBuilder


class KvloomImpl(AttentionImpl):
    """Attention of one layer, as vLLM makes and calls it."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: Any = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = "decoder",
        kv_sharing_target_layer_name: str | None = None,
        **others: Any,
    ) -> None:
        refuse_layer(
            alibi_slopes=alibi_slopes, sliding_window=sliding_window,
            logits_soft_cap=logits_soft_cap, attn_type=attn_type,
            kv_sharing_target_layer_name=kv_sharing_target_layer_name, **others,
        )  # fmt: skip
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_kv_heads or num_heads
        self.kv_cache_dtype = kv_cache_dtype
        self.kv_sharing_target_layer_name = None
        config = get_current_vllm_config()
        self.engine = engine.of(config)
        self.dtype = config.model_config.dtype
        self.tail = TailLayer(config, self.engine, self.num_kv_heads, head_size, self.dtype)
        self.paged: PagedAttention | None = None
        self._memory: Tensor | None = None
        self.plan: LayerPlan | None = None

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Give the layer the pages of its number, now that all layers are known."""
        self.engine.assign()

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: PagedStep | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Store keys and values [tokens, H, D] and attend queries [tokens, Hq, D] to `output`."""
        if attn_metadata is None:
            return output.fill_(0)
        tails: Tensor = get_forward_context().attn_metadata[self.tail.prefix]
        self._paged(kv_cache).run(attn_metadata, tails, query, key, value, output)
        return output

    def _paged(self, kv_cache: Tensor) -> PagedAttention:
        """Return attention over vLLM's memory, described once unless vLLM gives other memory."""
        if self.paged is None or self._memory is not kv_cache:
            self._memory = kv_cache
            assert self.plan is not None
            page = self.tail.kv_cache.shape[2]
            layout = PageLayout(self.plan, page, self.num_kv_heads, self.head_size, self.dtype)
            self.paged = PagedAttention(
                PackedPages(layout, kv_cache), self.tail.kv_cache, self.scale
            )
        return self.paged
