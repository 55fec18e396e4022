"""Managers of transformers' continuous batching whose pages are packed.

transformers schedules requests, and allocates, shares, copies and frees blocks. Decides what a
block holds, which settings are served, and when a manager's attention is kvloom's. Imported by
`continuous` alone, with a version of transformers that has these hooks.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import copy_context
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, ContinuousBatchingConfig, PreTrainedModel
from transformers.generation.continuous_batching import cache as stock
from transformers.generation.continuous_batching.cache_allocators import (
    FullAttentionCacheAllocator,
)
from transformers.generation.continuous_batching.cache_allocators.cache_allocator import (
    compute_block_hash,
)
from transformers.generation.continuous_batching.continuous_api import ContinuousBatchingManager
from transformers.generation.continuous_batching.requests import RequestStatus

from ...errors import CacheMisuse, InputError, KvloomError, UnsupportedModel
from ...paged import LayerPlan, PackedPages, PagedAttention, PagedRow, PagedStep, PageLayout, paged
from ...recipe import Recipe
from .. import compat
from ..implementation import FIELD
from ..layer_facts import load_layer_facts
from ..prompts.pages import StoredPages
from ..routing import attention_configs
from .eviction import PromptEviction

NAME = "kvloom_flash"
"""The attention implementation: transformers makes no masks for a name with "flash", and reads no
block tables of its own for a name without 2 or 3."""

_TABLE = threading.Lock()
_ALIGNED = 128  # bytes, as transformers aligns blocks


def _up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


class PackedAllocator(FullAttentionCacheAllocator):
    """Blocks of packed pages; `tail_blocks` more of them per request hold its exact tokens.

    A request's block table has its full pages in order, then its tail blocks. So transformers
    shares, hashes, frees, forks and copies them as its own. A page that is not full has no block.

    plans: one for each layer. stored: where pages are stored, too. eviction: from prompts; blocks
    are then not shared. The other arguments are those of transformers.
    """

    supports_block_table = False

    def __init__(
        self,
        plans: list[LayerPlan],
        stored: StoredPages | None,
        eviction: PromptEviction | None,
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
        self.eviction = eviction
        self.layouts = [
            PageLayout(plan, page_size, num_key_value_heads, head_dim, cache_dtype)
            for plan in plans
        ]
        self.begins = [0]
        for layout in self.layouts:
            self.begins.append(_up(self.begins[-1] + layout.nbytes, _ALIGNED))
        self.tail_nbytes = self.layouts[0].exact_nbytes
        self.tail_shape = num_key_value_heads, page_size, 2 * head_dim
        layers = len(layer_indices)
        page = _up(-(-max(self.begins[-1], self.tail_nbytes) // layers), _ALIGNED)
        self.tails_per_block = page * layers // self.tail_nbytes
        self.tail_blocks = -(-layers // self.tails_per_block)
        self.untailed: set[str] = set()  # requests that have pages of a prefix alone
        self.evicted: dict[str, int] = {}  # tokens that requests have read and do not store
        self.rows: list[tuple[PagedRow, list[int]]] = []
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

    def blocks_for(self, tokens: int) -> int:
        """Return the blocks of a request that stores so many tokens."""
        return tokens // self.tokens_per_page + self.tail_blocks

    def kept(self, prompt: int) -> int:
        """Return how many tokens of a prompt are stored."""
        return prompt if self.eviction is None else self.eviction.kept(prompt)

    def stored_tokens(self, request_id: str, past: int, new: int) -> tuple[int, int]:
        """Return how many tokens a request stores before a step with new ones, and after it."""
        if not past:
            return 0, self.kept(new)
        stored = past - self.evicted.get(request_id, 0)
        return stored, stored + new

    # --- blocks of a request

    def needs_new_blocks(self, request_id: str, past_length: int, query_length: int) -> int:
        """Return how many blocks a request needs for new tokens."""
        have = len(self.block_table.get(request_id, []))
        _, stored = self.stored_tokens(request_id, past_length, query_length)
        return max(0, self.blocks_for(stored) - have)

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

    def fork_blocks(
        self, source_request_id: str, dest_request_id: str, past_length: int
    ) -> tuple[list[int], list[int]]:
        """Give a request the blocks of another, of which transformers copies those returned."""
        self.evicted[dest_request_id] = self.evicted.get(source_request_id, 0)
        return super().fork_blocks(source_request_id, dest_request_id, past_length)

    def free_blocks(self, request_id: str, no_cache: bool = False) -> None:
        """Free a request's pages and tail, between steps: rows that wait are of a failed one."""
        self.rows.clear()
        self.untailed.discard(request_id)
        self.evicted.pop(request_id, None)
        super().free_blocks(request_id, no_cache)

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
            return super().mark_complete_blocks(request_id, token_ids, new)
        table, hashed = self.block_table[request_id], self.ledger.block_to_hash
        before = sum(block in hashed for block in table)
        super().mark_complete_blocks(request_id, token_ids, new)
        numbers = range(before, sum(block in hashed for block in table))
        size = self.tokens_per_page
        keys = self.stored.keys(token_ids, size)
        return self.stored.put(
            [(keys[i], token_ids[i * size : (i + 1) * size], self._page(table[i])) for i in numbers]
        )

    def _page(self, block: int) -> Tensor:
        """Return the bytes of a block's pages, without those between them."""
        parts = zip(self.begins, self.layouts, strict=False)
        return torch.cat([self._copy_view[block, x : x + y.nbytes] for x, y in parts])

    # --- one step

    def get_write_indices(self, request_id: str, past_length: int, query_length: int) -> list[int]:
        """Note a request of the next step; transformers asks in the order of its tokens."""
        begin, table = self.rows[-1][0].batch_end if self.rows else 0, self.block_table[request_id]
        stored = self.stored_tokens(request_id, past_length, query_length)
        self.evicted[request_id] = past_length + query_length - stored[1]
        blocks = torch.tensor(table[: -self.tail_blocks], dtype=torch.long)
        row = PagedRow(len(self.rows), begin, begin + query_length, *stored, blocks)
        self.rows.append((row, table[-self.tail_blocks :]))
        return []

    def update(self, *_: Any) -> tuple[Tensor, Tensor]:
        """Raise: transformers' own attention called this."""
        raise CacheMisuse(
            "the model's attention implementation was changed while packed pages are in use; call "
            "manager.stop() first"
        )

    def attend(self, layer_index: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """Store and attend all tokens of a step: q [T, Hq, D], k, v [T, H, D]."""
        if self.rows:
            rows, tails = zip(*self.rows, strict=True)
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
        choose = None if self.eviction is None else partial(self.eviction.choose, place)
        return PagedAttention(pages, tail.unflatten(1, self.tail_shape), scale, choose)


def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    cache: Any = None,
    **arguments: Any,
) -> tuple[Tensor, None]:
    """Attend the tokens of a step [1, Hq, T, D]; returns [1, T, Hq, D]."""
    if cache is None:
        raise CacheMisuse(
            "a manager of kvloom.continuous runs on this model, and other calls have to wait; call "
            "manager.stop() first"
        )
    for name in ("s_aux", "sliding_window", "softcap"):
        if arguments.get(name) is not None:
            raise UnsupportedModel(
                f"the model's attention takes {name!r}, which kernels for pages do not compute; "
                "use model.generate_batch without kvloom.continuous"
            )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    layer_index: int = module.layer_idx  # type: ignore[assignment]
    return cache.layer_to_allocator[layer_index].attend(layer_index, q, k, v, scale)[None], None


@contextmanager
def _packed(allocator: Callable[..., PackedAllocator], config: Any) -> Iterator[None]:
    """Let transformers make packed blocks for the model of a config, and its own for others."""
    with _TABLE:
        table = stock.ATTN_TYPE_TO_ALLOCATOR
        former = table[compat.FULL]

        class Chosen(former):  # type: ignore[misc, valid-type]
            """Has the attributes of transformers' class, which other threads may read."""

            def __new__(cls, **options: Any) -> Any:
                is_this_model = options["config"] is config
                return allocator(**options) if is_this_model else former(**options)

        table[compat.FULL] = Chosen
        try:
            yield
        finally:
            table[compat.FULL] = former


class PackedManager(ContinuousBatchingManager):
    """A manager of transformers with packed pages.

    allocator: makes a `PackedAllocator`, given the arguments of transformers. batching: what the
    `with` block has installed. The other arguments are those of transformers.
    """

    def __init__(
        self,
        allocator: Callable[..., PackedAllocator],
        batching: PackedBatching,
        model: PreTrainedModel,
        generation_config: Any,
        continuous_batching_config: Any,
        workload_hints: Any,
    ) -> None:
        self.allocator, self.batching, self.hints = allocator, batching, workload_hints
        self.batch_processor: Any = None
        try:
            super().__init__(model, generation_config, continuous_batching_config, workload_hints)
        except BaseException:
            self.restore()
            raise

    def switch_to_cb_friendly_attn(self, model: PreTrainedModel, *_: Any) -> None:
        """Set kvloom's attention, until `restore`."""
        self.batching.switch(self)

    def restore(self) -> None:
        """Set the model's own attention, unless another manager uses kvloom's."""
        self.batching.switch_back(self)

    def start(self) -> None:
        """Start the thread; raise before, where transformers would only log."""
        try:
            self.batching.check()
            self.switch_to_cb_friendly_attn(self.model)
            if self.batch_processor is None:
                self.batch_processor = self._create_batch_processor()
            for state in self.input_queue.queue:
                self._check_fits(len(state.initial_tokens), state.max_new_tokens)
        except BaseException:
            self.restore()
            raise
        self.context = copy_context()
        super().start()

    def stop(self, *args: Any, **options: Any) -> None:
        """Stop the thread, and raise the error with which it has ended, if any."""
        super().stop(*args, **options)
        self.restore()
        if (error := self.background_thread_status.fatal_error) is not None:
            raise error

    def close(self) -> None:
        """Stop the thread at once, if it was started and not stopped."""
        if self._generation_thread is not None:
            self.stop(hard_stop=True)
        self.restore()

    def add_request(
        self,
        input_ids: list[int],
        request_id: str | None = None,
        max_new_tokens: int | None = None,
        *args: Any,
        **options: Any,
    ) -> str | None:
        """Add a request; raises `InputError` for one that the blocks cannot hold."""
        new = self.generation_config.max_new_tokens if max_new_tokens is None else max_new_tokens
        self._check_fits(len(input_ids), new)
        added: str | None = super().add_request(
            input_ids, request_id, max_new_tokens, *args, **options
        )
        return added

    def _run_generation_loop(self) -> None:
        """Run the thread with the settings of `kvloom.kernels.use_backend` where it was started."""
        self.context.run(super()._run_generation_loop)

    def _create_batch_processor(self) -> Any:
        if self.batch_processor is not None:  # transformers resets it
            return super()._create_batch_processor()
        try:
            with _packed(self.allocator, self.model.config.get_text_config()):
                self.batch_processor = super()._create_batch_processor()
            _prepare(self.batch_processor.cache)
            self._check_fits(1, 1)
            if self.hints is not None:
                self._check_fits(self.hints.max_prompt_length, self.hints.max_generated_length)
        except (MemoryError, ValueError) as error:
            self.batch_processor = None
            self.restore()
            if isinstance(error, KvloomError):
                raise
            raise InputError(
                f"transformers finds no memory for blocks of packed pages ({error}); set another "
                "num_blocks, max_batch_tokens or max_memory_percent"
            ) from error
        return self.batch_processor

    def _check_fits(self, prompt: int, new: int | None) -> None:
        if self.batch_processor is None:
            return
        cache = self.batch_processor.cache
        (blocks,) = cache.cache_allocators.values()
        later = (new or 1) - 1  # the last new token is not stored
        if blocks.eviction is not None and prompt + later > cache.max_batch_tokens:
            raise InputError(
                f"a request of {prompt:,} tokens and {new or 1:,} new ones does not fit into one "
                f"step of {cache.max_batch_tokens:,}, which this recipe needs to evict; set "
                f"max_batch_tokens={prompt + later} or more"
            )
        needed = blocks.blocks_for(blocks.kept(prompt) + later)
        if needed > blocks.num_blocks:
            exact = sum(layout.exact_nbytes for layout in blocks.layouts)
            enough = (needed - 1) * blocks.bytes_per_block // exact + 1
            raise InputError(
                f"a request of {prompt:,} tokens and {new or 1:,} new ones takes {needed:,} blocks "
                f"of packed pages, and {blocks.num_blocks:,} fit; set num_blocks={enough} or more"
            )


def _prepare(cache: Any) -> None:
    """Let a scheduler count no tokens that a step reads, and a prompt wait for a step with room.

    cache: of transformers. It would refuse more tokens than exact blocks hold. A recipe that evicts
    needs a whole prompt in one step.
    """
    cache.read_cache_limit = 0
    (blocks,) = cache.cache_allocators.values()
    if blocks.eviction is None:
        return
    can_store = cache.can_store_request_tokens

    def can_store_whole(state: Any, request_len: int, *args: Any, **options: Any) -> bool:
        decodes = state.status is RequestStatus.DECODING
        whole = decodes or request_len == len(state.remaining_prefill_tokens)
        return whole and can_store(state, request_len, *args, **options)

    cache.can_store_request_tokens = can_store_whole


class PackedBatching:
    """The packed pages of a model in a block of `continuous`.

    engine: what errors call continuous batching. stored: as for `PackedAllocator`.
    """

    def __init__(
        self, model: PreTrainedModel, recipe: Recipe, engine: str, stored: StoredPages | None
    ) -> None:
        self.model, self.recipe, self.engine, self.stored = model, recipe, engine, stored
        self.managers: list[PackedManager] = []
        self.using: set[PackedManager] = set()  # kvloom's attention
        self.former: list[tuple[Any, str]] = []  # configs, and their attention without kvloom
        self.weights = self._weights()
        AttentionInterface.register(NAME, attention)

    def manager(
        self,
        generation_config: Any = None,
        continuous_batching_config: Any = None,
        workload_hints: Any = None,
    ) -> PackedManager:
        """Return a manager, in place of `init_continuous_batching` of transformers."""
        cached = getattr(self.model, "_cached_continuous_batching_manager", None)
        if cached is not None:
            self.check()
            cached.switch_to_cb_friendly_attn(self.model)
            return cached
        generation = copy.copy(generation_config or self.model.generation_config)
        if generation.eos_token_id is None:
            generation.eos_token_id = -1  # as transformers does
        config = copy.copy(continuous_batching_config or ContinuousBatchingConfig())
        _check_settings(config, getattr(self.model.config, "compile_config", None))
        if self.stored is not None and not config.allow_block_sharing:
            raise InputError(
                "a prompt store shares pages, and allow_block_sharing is False; leave it out, or "
                "the store"
            )
        config.use_cuda_graph = config.use_async_batching = False
        found = paged(self.recipe, config.page_size, self.engine, "page_size=", evicts=True)
        layer_indices = compat.geometry(self.model).layer_indices
        facts = load_layer_facts(self.model, found)
        plans = [
            LayerPlan.of_recipe(found.for_layer(i, layer_indices), *of_layer[:3])
            for i, of_layer in zip(layer_indices, facts, strict=True)
        ]
        eviction = None
        if found.keep is not None:
            eviction = PromptEviction(found, layer_indices, facts)
            config.allow_block_sharing = False  # the tokens of a block depend on all of a prompt
        allocator = partial(PackedAllocator, plans, self.stored, eviction)
        with torch.no_grad():
            manager = PackedManager(allocator, self, self.model, generation, config, workload_hints)
        self.managers.append(manager)
        return manager

    def switch(self, manager: PackedManager) -> None:
        """Set kvloom's attention for a manager."""
        if not self.using:
            self.former = [(x, vars(x)[FIELD]) for x in attention_configs(self.model)]
        self.using.add(manager)
        for config, _ in self.former:
            vars(config)[FIELD] = NAME

    def switch_back(self, manager: PackedManager) -> None:
        """Set the model's own attention when no manager uses kvloom's."""
        if self.using == {manager}:
            for config, former in self.former:
                vars(config)[FIELD] = former
        self.using.discard(manager)

    def check(self) -> None:
        """Raise `CacheMisuse` if the model is another than at the beginning of the block."""
        if self._weights() != self.weights:
            raise CacheMisuse(
                "the model's weights have changed since kvloom.continuous began, and pages hold "
                "keys and values of the former ones; leave the block and enter it again"
            )

    def close(self) -> None:
        """Stop what runs, and leave the model as it was."""
        with ExitStack() as ends:
            ends.callback(delattr, self.model, "init_continuous_batching")
            ends.callback(self.model.destroy_cached_continuous_batching_manager)
            for manager in self.managers:
                ends.callback(manager.close)

    def _weights(self) -> list[tuple]:
        return [
            (x.data_ptr(), 0 if x.is_inference() else x._version, x.dtype)
            for x in self.model.parameters()
        ]


def _check_settings(config: Any, compiled: Any) -> None:
    """Raise `InputError` for settings that packed pages do not serve, by name.

    compiled: how the model's config asks transformers to compile steps.
    """
    graphs = config.use_cuda_graph
    asked = {
        "cpu_offload_space": config.cpu_offload_space != 0.0,
        "use_cuda_graph": any(graphs) if isinstance(graphs, tuple) else graphs,
        "use_async_batching": config.use_async_batching,
        "default_compile_level": config.default_compile_level,
        "varlen_compile_config": config.varlen_compile_config,
        "decode_compile_config": config.decode_compile_config,
        "compile_config of the model": compiled,
    }
    if found := [name for name, value in asked.items() if value]:
        raise InputError(
            f"packed pages of kvloom.continuous do not serve {' and '.join(found)}; leave "
            f"{'it' if len(found) == 1 else 'them'} out"
        )
