"""A step of vLLM's metadata, built once for all layers."""

from __future__ import annotations

from typing import Any

from vllm.v1.attention.backend import AttentionMetadataBuilder

from kvloom.paged import PagedRow, PagedStep


class StepBuilder(AttentionMetadataBuilder):
    """Makes the step of vLLM's metadata."""

    def __init__(self, kv_cache_spec: Any, layer_names: Any, vllm_config: Any, device: Any) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.page = kv_cache_spec.block_size

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> PagedStep:
        """Return the step that vLLM has scheduled."""
        m, page = common_attn_metadata, self.page
        ends = m.query_start_loc_cpu.tolist()
        lengths = m.seq_lens[: m.num_reqs].tolist()
        table = m.block_table_tensor[: m.num_reqs].long()
        rows = []
        for at, stop in enumerate(lengths):
            begin, end = ends[at], ends[at + 1]
            if end > begin:
                start = stop - (end - begin)
                rows.append(PagedRow(at, begin, end, start, stop, table[at, : -(-stop // page)]))
        return PagedStep(rows, page)
