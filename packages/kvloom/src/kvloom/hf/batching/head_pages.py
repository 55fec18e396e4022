"""Blocks of pages of single heads, for requests whose heads store different tokens of a prompt.

Decides where each head's tokens are. A head of a request is a row of attention to pages.
"""

from __future__ import annotations

from functools import cached_property
from math import gcd
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ...cache.step import Queries
from ...kernels import PageTable, ops
from ...paged import LayerPlan, PackedPages, PagedAttention, PageLayout
from ...paged.step import SingleTokenRows
from .allocator import ALIGNED, PackedAllocator, round_up
from .prompt_eviction import Heads, PromptChoice, PromptEviction


class StoredHeads:
    """What the heads of a request store.

    evicted: int64 [layers, H], the tokens that a head has read and does not store. pages: int64
    [layers, H, width], where its pages are. used: how many pages all heads have.
    """

    def __init__(self, evicted: Tensor) -> None:
        self.evicted, self.used = evicted, 0
        self.pages = evicted.new_zeros(*evicted.shape, 1)

    def add(
        self, addresses: Tensor, layers: Tensor | int, heads: Tensor | int, numbers: Tensor
    ) -> None:
        """Add pages int64 [n], which are the pages `numbers` of these heads."""
        missing = int(numbers.max()) + 1 - self.pages.shape[2]
        if missing > 0:
            self.pages = F.pad(self.pages, (0, missing))
        self.pages[layers, heads, numbers] = addresses
        self.used += len(addresses)

    def moved(self, blocks: list[int], new: list[int], size: int) -> StoredHeads:
        """Return the same in other blocks, of `size` pages each."""
        to = torch.zeros(max(blocks) + 1, dtype=torch.long)
        to[blocks] = torch.tensor(new)
        copy = StoredHeads(self.evicted.clone())
        copy.pages = to[self.pages // size] * size + self.pages % size
        copy.used = self.used
        return copy


class PromptChunk(NamedTuple):
    """A prompt's tokens of a step, where its tails are, int64 [layers, H], and what stays of it."""

    request_id: str
    span: slice
    tails: Tensor
    choice: PromptChoice


class DecodingHeads(NamedTuple):
    """The requests of a step that read one token each.

    tokens: int64 [R], their places in the step's tensors. starts: int64 [layers, R * H], the tokens
    that a head stores before it. pages: int64 [layers, R * H, width]. tails: int64 [layers, R * H].
    """

    tokens: Tensor
    starts: Tensor
    pages: Tensor
    tails: Tensor


class CalibratedHeads:
    """Attention to the pages of heads with calibrations of their own, head after head.

    of_heads: the attention of each head.
    """

    def __init__(self, of_heads: list[PagedAttention]) -> None:
        self.of_heads = of_heads

    def decode(
        self, rows: SingleTokenRows, table: PageTable, q: Tensor, k: Tensor, v: Tensor
    ) -> Tensor:
        """Store and attend as `PagedAttention` does; rows are the heads of each request."""
        out = q.new_empty(q.shape, dtype=torch.float32)
        for head, attention in enumerate(self.of_heads):
            own = slice(head, None, len(self.of_heads))
            part = SingleTokenRows(rows.starts[own], rows.blocks[own], rows.page)
            tails = table.tails[own]
            out[own] = attention.decode(part, part.table(tails), q[own], k[own], v[own])
        return out


class EvictingAllocator(PackedAllocator):
    """Blocks of pages of single heads; `tail_blocks` more per request hold its exact tokens.

    A block has as many pages as there are heads in all layers, of any heads of its request: one
    that fills a page takes the next. Blocks are not shared.

    eviction: chooses what stays of a prompt. The other arguments are those of `PackedAllocator`.
    """

    eviction: PromptEviction

    def __init__(self, plans: list[LayerPlan], eviction: PromptEviction, **options: Any) -> None:
        self.eviction = eviction
        self.requests: dict[str, StoredHeads] = {}
        self.choices: dict[str, PromptChoice] = {}  # of prompts whose last chunk has not begun
        self.chunks: list[PromptChunk] = []
        self.decoding: DecodingHeads | None = None
        self.of_heads: dict[int, list[PagedAttention]] = {}  # by layer, of each head
        self.of_layers: dict[int, PagedAttention | CalibratedHeads] = {}  # of all heads
        super().__init__(plans, None, **options)

    @property
    def heads(self) -> int:
        """Key/value heads of a layer."""
        return self.layouts[0].heads

    @property
    def pages_of_block(self) -> int:
        """Pages of single heads in a block."""
        return len(self.layouts) * self.heads

    @cached_property
    def head_layouts(self) -> list[list[PageLayout]]:
        """The layout of each head's page in each layer; one where all heads have the same."""
        return [
            [
                PageLayout(layout.plan.of_head(head), layout.tokens, 1, layout.head_dim, self.dtype)
                for head in range(self.heads if any(layout.plan.calibrated) else 1)
            ]
            for layout in self.layouts
        ]

    @cached_property
    def head_nbytes(self) -> int:
        """The bytes of a head's page; a block also holds the tail of a layer."""
        least = -(-self.tail_nbytes // self.pages_of_block)
        return round_up(max(least, *(layouts[0].nbytes for layouts in self.head_layouts)), ALIGNED)

    @cached_property
    def tail_unit(self) -> int:
        """The bytes in which the places of tails are counted."""
        return gcd(self.tail_nbytes // self.heads, ALIGNED)

    def page_nbytes(self) -> int:
        """Return the bytes of a block for each layer: a page of each head."""
        return self.heads * self.head_nbytes

    def blocks_for(self, prompt: int, later: int = 0) -> int:
        """Return the most blocks of a request with so many tokens in its prompt, and later ones."""
        size = self.tokens_per_page
        return self._blocks_of(self.eviction.most_pages(prompt, later, self.heads, size))

    def _blocks_of(self, pages: int) -> int:
        return -(-pages // self.pages_of_block) + self.tail_blocks

    # --- blocks of a request

    def needs_new_blocks(self, request_id: str, past_length: int, query_length: int) -> int:
        """Return how many blocks a request needs for new tokens."""
        needed = self.blocks_for(past_length + query_length)
        if past_length and request_id not in self.choices:
            stored = past_length + query_length - self.requests[request_id].evicted
            needed = self._blocks_of(int((stored // self.tokens_per_page).sum()))
        return max(0, needed - len(self.block_table.get(request_id, [])))

    def allocate_cache_to_request(
        self, request_id: str, past_length: int, query_length: int
    ) -> None:
        """Give a request blocks for new tokens: at first, for all of its prompt."""
        super().allocate_cache_to_request(request_id, past_length, query_length)
        if not past_length:
            evicted = torch.zeros(len(self.layouts), self.heads, dtype=torch.long)
            self.requests[request_id] = StoredHeads(evicted)
            self.choices[request_id] = self.eviction.begin(query_length)

    def fork_blocks(
        self, source_request_id: str, dest_request_id: str, past_length: int
    ) -> tuple[list[int], list[int]]:
        """Give a request blocks like those of another; return those, to be copied, and these."""
        blocks, new = super().fork_blocks(source_request_id, dest_request_id, past_length)
        source = self.requests[source_request_id]
        self.requests[dest_request_id] = source.moved(blocks, new, self.pages_of_block)
        return blocks, new

    def free_blocks(self, request_id: str, no_cache: bool = False) -> None:
        """Free a request's pages and tail, and its chunks, between steps."""
        self.requests.pop(request_id, None)
        self.choices.pop(request_id, None)
        self.chunks = []
        super().free_blocks(request_id, no_cache)

    def _next_pages(self, request_id: str, count: int) -> Tensor:
        """Return the next `count` pages of a request's blocks, int64."""
        used = self.requests[request_id].used
        number = torch.arange(used, used + count)
        blocks = torch.tensor(self.block_table[request_id][: -self.tail_blocks])
        size = self.pages_of_block
        return blocks[number // size] * size + number % size

    # --- one step

    def attend(self, layer_index: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """Store and attend all tokens of a step: q [T, Hq, D], k, v [T, H, D]."""
        if self.rows:
            self._begin_step()
        place = self.layer_indices.index(layer_index)
        if place not in self.of_layers:
            self._make_attention(place, scale)
        out = q.new_empty(q.shape)
        norms = self.eviction.norms(layer_index)
        for chunk in self.chunks:
            span, choice = chunk.span, chunk.choice
            own_q, own_k, own_v = (x[span].transpose(0, 1)[None] for x in (q, k, v))
            queries = Queries(own_q, scale, norms=None if norms is None else norms[:, span])
            queries, all_k, all_v = choice.joined(place, queries, own_k, own_v)
            state = ops.attend_prompt(own_q, all_k, all_v, scale)
            out[span] = state.out[0].transpose(0, 1).to(out.dtype)
            for decided, heads in choice.read(place, queries, all_k, all_v):
                self._store(decided, chunk, heads)
        if self.decoding is not None:
            index, starts, pages, tails = self.decoding
            rows = SingleTokenRows(starts[place], pages[place], self.tokens_per_page)
            of_heads = (x[index].view(len(starts[place]), -1, x.shape[2]) for x in (q, k, v))
            attended = self.of_layers[place].decode(rows, rows.table(tails[place]), *of_heads)
            out[index] = attended.view(len(index), *q.shape[1:]).to(out.dtype)
        return out

    def _begin_step(self) -> None:
        """Sort the requests of a step, and give heads that fill a page the next one."""
        self.chunks, decoding = [], []
        for request_id, row, tail in self.rows:
            if row.batch_begin == row.batch_end:  # each fork of it reads its only token
                continue
            tails, choice = self._tails(tail), self.choices.get(request_id)
            if choice is not None:
                span = slice(row.batch_begin, row.batch_end)
                self.chunks.append(PromptChunk(request_id, span, tails, choice))
                if row.token_end == choice.tokens:
                    del self.choices[request_id]
                continue
            stored = self.requests[request_id]
            after = row.token_end - stored.evicted
            filled = (after % self.tokens_per_page == 0).nonzero()
            if len(filled):
                layers, heads = filled.unbind(1)
                numbers = after[layers, heads] // self.tokens_per_page - 1
                stored.add(self._next_pages(request_id, len(filled)), layers, heads, numbers)
            decoding.append((row.batch_begin, after - 1, stored.pages, tails))
        self.rows, self.decoding = [], None
        if decoding:
            tokens, starts, pages, all_tails = zip(*decoding, strict=True)
            width = max(x.shape[2] for x in pages)
            padded = [F.pad(x, (0, width - x.shape[2])) for x in pages]
            by_layer = (torch.cat(x, dim=1) for x in (starts, padded, all_tails))
            self.decoding = DecodingHeads(torch.tensor(tokens), *by_layer)

    def _store(self, place: int, chunk: PromptChunk, heads: Heads) -> None:
        """Store the tokens of a prompt that stay in a layer."""
        stored, size = self.requests[chunk.request_id], self.tokens_per_page
        for head, (layer, (k, v)) in enumerate(zip(self.of_heads[place], heads, strict=True)):
            stored.evicted[place, head] = chunk.choice.tokens - len(k)
            full = len(k) // size
            if rest := len(k) % size:
                exact = torch.cat([k[full * size :], v[full * size :]], dim=-1)
                layer.tail[chunk.tails[place, head], 0, :rest] = exact
            if full:
                addresses, numbers = self._next_pages(chunk.request_id, full), torch.arange(full)
                stored.add(addresses, place, head, numbers)
                k, v = (x[: full * size].view(full, 1, size, x.shape[1]) for x in (k, v))
                layer.pages.write(addresses, k, v, numbers)

    def _tails(self, blocks: list[int]) -> Tensor:
        """Return where the exact tokens of each head are, int64 [layers, H], in tail units."""
        place = torch.arange(len(self.layouts))
        begin = torch.tensor(blocks)[place // self.tails_per_block] * self.bytes_per_block
        begin += place % self.tails_per_block * self.tail_nbytes
        heads = torch.arange(self.heads) * (self.tail_nbytes // self.heads)
        return (begin[:, None] + heads) // self.tail_unit

    def _make_attention(self, place: int, scale: float) -> None:
        layouts, memory = self.head_layouts[place], self._copy_view
        layout = layouts[0]
        size = layout.tokens, 2 * layout.head_dim
        count = (memory.numel() - layout.exact_nbytes) // self.tail_unit + 1
        strides = self.tail_unit // self.dtype.itemsize, size[0] * size[1], size[1], 1
        tails = memory.view(-1).view(self.dtype).as_strided((count, 1, *size), strides)
        pages = memory.view(-1, self.head_nbytes)
        of_heads = [
            PagedAttention(PackedPages(x, pages[:, : x.nbytes]), tails, scale) for x in layouts
        ]
        alike = len(of_heads) == 1
        self.of_layers[place] = of_heads[0] if alike else CalibratedHeads(of_heads)
        self.of_heads[place] = of_heads * self.heads if alike else of_heads
