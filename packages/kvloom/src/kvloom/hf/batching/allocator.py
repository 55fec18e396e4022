"""Blocks of packed pages in transformers' continuous batching.

Decides what a block holds, and what a step stores in it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.generation.continuous_batching import cache as stock
from transformers.generation.continuous_batching.cache_allocators import (
    FullAttentionCacheAllocator,
)
from transformers.generation.continuous_batching.cache_allocators.cache_allocator import (
    compute_block_hash,
)

from ...errors import CacheMisuse
from ...paged import LayerPlan, PackedPages, PagedAttention, PagedRow, PagedStep, PageLayout
from ..prompts.pages import StoredPages
from .prompt_eviction import PromptEviction

ALIGNED = 128  # bytes, as transformers aligns blocks


def round_up(n: int, multiple: int) -> int:
    """Return the next multiple."""
    return -(-n // multiple) * multiple


def attention_changed() -> CacheMisuse:
    """Return the error of a step by another attention than that of packed pages."""
    return CacheMisuse(
        "the model's attention implementation was changed while packed pages are in use; call "
        "manager.stop() first"
    )


class PackedAllocator(FullAttentionCacheAllocator):
    """Blocks of packed pages; `tail_blocks` more of them per request hold its exact tokens.

    A request's block table has its full pages in order, then its tail blocks. So transformers
    shares, hashes, frees, forks and copies them as its own. A page that is not full has no block.

    plans: one for each layer. stored: where pages are stored, too. The other arguments are those
    of transformers.
    """

    supports_block_table = False
    eviction: PromptEviction | None = None

    def __init__(
        self,
        plans: list[LayerPlan],
        stored: StoredPages | None,
        *,
        index: int,
        config: Any,
        num_key_value_heads: int,
        cache_dtype: torch.dtype,
        page_size: int,
        layer_indices: list[int],
        allow_block_sharing: bool,
    ) -> None:
        head_dim, self.dtype, self.stored = stock.find_head_dim(config), cache_dtype, stored
        self.layouts = [
            PageLayout(plan, page_size, num_key_value_heads, head_dim, cache_dtype)
            for plan in plans
        ]
        self.begins = [0]
        for layout in self.layouts:
            self.begins.append(round_up(self.begins[-1] + layout.nbytes, ALIGNED))
        self.tail_nbytes = self.layouts[0].exact_nbytes
        self.tail_shape = num_key_value_heads, page_size, 2 * head_dim
        layers, page = len(layer_indices), self.page_nbytes()
        self.tails_per_block = page * layers // self.tail_nbytes
        self.tail_blocks = -(-layers // self.tails_per_block)
        self.untailed: set[str] = set()  # requests that have pages of a prefix alone
        self.rows: list[tuple[str, PagedRow, list[int]]] = []
        self.step: tuple[PagedStep, tuple[Tensor, ...]] | None = None
        self.layers: dict[int, PagedAttention] = {}
        self._before_cache_tensor_init(
            index=index, layer_indices=layer_indices, tokens_per_page=page_size,
            bytes_per_page=page, allow_block_sharing=allow_block_sharing,
        )  # fmt: skip

    def register_cache_tensor(
        self, bytes_per_sector: int, non_trash_bytes: int, cache_tensor: Tensor, pool: Any
    ) -> None:
        """Take the memory of all blocks."""
        self.bytes_per_sector = bytes_per_sector
        self._copy_view = cache_tensor.view(-1, self.bytes_per_block)
        self._after_cache_tensor_init(non_trash_bytes, bytes_per_sector, cache_tensor, pool)

    def page_nbytes(self) -> int:
        """Return the bytes of a block for each layer."""
        least = max(self.begins[-1], self.tail_nbytes)
        return round_up(-(-least // len(self.layouts)), ALIGNED)

    def blocks_for(self, prompt: int, later: int = 0) -> int:
        """Return the blocks of a request with so many tokens in its prompt, and later ones."""
        return (prompt + later) // self.tokens_per_page + self.tail_blocks

    # --- blocks of a request

    def needs_new_blocks(self, request_id: str, past_length: int, query_length: int) -> int:
        """Return how many blocks a request needs for new tokens."""
        have = len(self.block_table.get(request_id, []))
        return max(0, self.blocks_for(past_length + query_length) - have)

    def allocate_cache_to_request(
        self, request_id: str, past_length: int, query_length: int
    ) -> None:
        """Give a request blocks for new tokens: pages go before its tail."""
        new = self.needs_new_blocks(request_id, past_length, query_length)
        blocks = self.pool.get_free_blocks(self.index, new)
        table = self.block_table.setdefault(request_id, [])
        end = max(0, len(table) - self.tail_blocks)
        if request_id in self.untailed:
            self.untailed.discard(request_id)
            end = len(table)
        table[end:end] = blocks

    def acquire_prefix_blocks(self, request_id: str, prefix_len: int, block_ids: list[int]) -> None:
        """Give a request the full pages of another; its tail follows with its first new tokens."""
        super().acquire_prefix_blocks(request_id, prefix_len, block_ids)
        self.untailed.add(request_id)

    def free_blocks(self, request_id: str, no_cache: bool = False) -> None:
        """Free a request's pages and tail, between steps: rows that wait are of a failed one."""
        self.rows.clear()
        self.untailed.discard(request_id)
        super().free_blocks(request_id, no_cache)
        if self.stored is not None:
            self.stored.flush()

    # --- stored pages

    def match_prefix_blocks(self, prompt_ids: list[int]) -> list[int]:
        """Return the blocks of a prompt's first pages: those in memory, and those in the store."""
        if self.stored is None:
            return super().match_prefix_blocks(prompt_ids)
        size, blocks, digest = self.tokens_per_page, [], None
        for i, key in enumerate(self.stored.keys(prompt_ids[:-1], size)):
            tokens = prompt_ids[i * size : (i + 1) * size]
            digest = compute_block_hash(digest, tokens)
            block = self.ledger.hash_to_block.get(digest)
            block = self._load(key, tokens, digest) if block is None else block
            if block is None:
                break
            blocks.append(block)
        return blocks

    def _load(self, key: str, tokens: list[int], digest: int) -> int | None:
        """Load a stored page into a free block; return None without such a page or block."""
        assert self.stored is not None
        pool, sizes = self.pool, [layout.nbytes for layout in self.layouts]
        has_room = pool.count_free_blocks(self.index) or pool.num_free_sectors
        page = self.stored.load(key, tokens, sum(sizes)) if has_room else None
        if page is None:
            return None
        if not pool.count_free_blocks(self.index):
            pool.allocate_sector(self.index)
        (block,) = pool.get_free_blocks(self.index, 1)
        for begin, part in zip(self.begins, page.split(sizes), strict=False):
            self._copy_view[block, begin : begin + len(part)] = part
        self.ledger.register_new_hash(block, digest)
        self.ledger.cached_blocks[block] = None
        return block

    def mark_complete_blocks(self, request_id: str, token_ids: list[int], new: int) -> None:
        """Note the full pages of a request as shareable, and store them."""
        if self.stored is None:
            super().mark_complete_blocks(request_id, token_ids, new)
            return
        table, hashed = self.block_table[request_id], self.ledger.block_to_hash
        before = sum(block in hashed for block in table)
        super().mark_complete_blocks(request_id, token_ids, new)
        size, keys = self.tokens_per_page, self.stored.keys(token_ids, self.tokens_per_page)
        for i in range(before, sum(block in hashed for block in table)):
            self.stored.put(keys[i], token_ids[i * size : (i + 1) * size], self._page(table[i]))

    def _page(self, block: int) -> Tensor:
        """Return the bytes of a block's pages, without those between them."""
        parts = zip(self.begins, self.layouts, strict=False)
        return torch.cat([self._copy_view[block, x : x + y.nbytes] for x, y in parts])

    # --- one step

    def get_write_indices(self, request_id: str, past_length: int, query_length: int) -> list[int]:
        """Note a request of the next step; transformers asks in the order of its tokens."""
        begin = self.rows[-1][1].batch_end if self.rows else 0
        table, stop = self.block_table[request_id], past_length + query_length
        blocks = torch.tensor(table[: -self.tail_blocks], dtype=torch.long)
        row = PagedRow(len(self.rows), begin, begin + query_length, past_length, stop, blocks)
        self.rows.append((request_id, row, table[-self.tail_blocks :]))
        return []

    def update(self, *_: Any) -> tuple[Tensor, Tensor]:
        """Raise: transformers' own attention called this."""
        raise attention_changed()

    def attend(self, layer_index: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """Store and attend all tokens of a step: q [T, Hq, D], k, v [T, H, D]."""
        if self.rows:
            _, rows, tails = zip(*self.rows, strict=True)
            by_layer = torch.tensor(tails).T.contiguous().unbind(0)
            self.step = PagedStep(list(rows), self.tokens_per_page), by_layer
            self.rows = []
        assert self.step is not None
        step, by_layer = self.step
        place = self.layer_indices.index(layer_index)
        if layer_index not in self.layers:
            self.layers[layer_index] = self._layer(place, scale)
        out = q.new_empty(q.shape)
        self.layers[layer_index].run(step, by_layer[place // self.tails_per_block], q, k, v, out)
        return out

    def _layer(self, place: int, scale: float) -> PagedAttention:
        begin, layout = self.begins[place], self.layouts[place]
        pages = PackedPages(layout, self._copy_view[:, begin : begin + layout.nbytes])
        begin = place % self.tails_per_block * self.tail_nbytes
        tail = self._copy_view[:, begin : begin + self.tail_nbytes].view(self.dtype)
        return PagedAttention(pages, tail.unflatten(1, self.tail_shape), scale)
