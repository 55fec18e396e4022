"""Managers of transformers' continuous batching whose pages are packed.

transformers schedules requests, and allocates, shares, copies and frees blocks. Decides which
settings and requests are served, and when a manager's attention is kvloom's. Imported by
`continuous` alone, with a version of transformers that has these hooks.
"""

from __future__ import annotations

import copy
import sys
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
from transformers.generation.continuous_batching.continuous_api import ContinuousBatchingManager

from ...errors import CacheMisuse, InputError, KvloomError, UnsupportedModel
from ...paged import LayerPlan, packed_by_page
from ...recipe import Recipe
from .. import compat
from ..examples import needed
from ..forward import input_norms
from ..implementation import FIELD, NAME, PAGES, manager_runs, use_kvloom
from ..layer_facts import load_layer_facts
from ..prompts.pages import StoredPages
from ..routed_cache import RoutedCache
from ..routing import attention_configs
from .allocator import PackedAllocator, attention_changed
from .examples import learning
from .head_pages import EvictingAllocator
from .prompt_eviction import PromptEviction

_TABLE = threading.Lock()

_OF_MANAGER = threading.local()
"""Its attribute `runs` is set in the thread of a manager."""


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
    if cache is None and hasattr(_OF_MANAGER, "runs"):
        raise UnsupportedModel(
            f"the model gives its {type(module).__name__} none of the pages that transformers' "
            "continuous batching passes to it; use model.generate"
        )
    if cache is None:
        raise manager_runs()
    for name in ("s_aux", "sliding_window", "softcap"):
        if arguments.get(name) is not None:
            raise UnsupportedModel(
                f"the model's attention takes {name!r}, which kernels for pages do not compute; "
                "use model.generate"
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
            self.batching.check_alone(self)
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
        (blocks,) = self.batch_processor.cache.cache_allocators.values()
        eviction: Any = blocks.eviction
        batching = self.batching
        _OF_MANAGER.runs = True
        with ExitStack() as hooks:
            check = self.model.register_forward_pre_hook(batching.check_attention)
            hooks.callback(check.remove)
            if eviction is not None:
                hooks.enter_context(input_norms(self.model, eviction))
                if batching.learns:
                    hooks.enter_context(
                        learning(self.model, batching.cache, blocks, batching.outside_pages)
                    )
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
        (blocks,) = self.batch_processor.cache.cache_allocators.values()
        later = (new or 1) - 1  # the last new token is not stored
        needed = blocks.blocks_for(prompt, later)
        if needed > blocks.num_blocks:
            exact = sum(layout.exact_nbytes for layout in blocks.layouts)
            enough = (needed - 1) * blocks.bytes_per_block // exact + 1
            raise InputError(
                f"a request of {prompt:,} tokens and {new or 1:,} new ones takes {needed:,} blocks "
                f"of packed pages, and {blocks.num_blocks:,} fit; set num_blocks={enough} or more"
            )


def _prepare(cache: Any) -> None:
    """Let a scheduler count no tokens that a step reads, and reserve blocks for whole prompts.

    cache: of transformers. It would refuse more tokens than exact blocks hold. Of a prompt in
    chunks, a recipe that evicts stores nothing before the last one.
    """
    cache.read_cache_limit = 0
    (blocks,) = cache.cache_allocators.values()
    if blocks.eviction is None:
        return
    can_store = cache.can_store_request_tokens

    def can_store_whole(state: Any, request_len: int, *args: Any, **options: Any) -> bool:
        before_fork = state.num_children > 0  # each fork reads the last token by itself
        whole = len(state.remaining_prefill_tokens) - before_fork
        return can_store(state, whole or request_len, *args, **options)

    cache.can_store_request_tokens = can_store_whole


class PackedBatching:
    """The packed pages of a model in a block of `continuous`.

    cache: an empty one of the model and the recipe. engine: what errors call continuous batching.
    stored: as for `PackedAllocator`.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        cache: RoutedCache,
        recipe: Recipe,
        engine: str,
        stored: StoredPages | None,
    ) -> None:
        self.model, self.cache, self.recipe = model, cache, recipe
        self.engine, self.stored = engine, stored
        self.managers: list[PackedManager] = []
        self.using: set[PackedManager] = set()  # kvloom's attention
        self.former: list[tuple[Any, str]] = []  # configs, and their attention without kvloom
        self.weights = self._weights()
        AttentionInterface.register(PAGES, attention)

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
        if continuous_batching_config is None:  # its former place
            continuous_batching_config = getattr(generation, "continuous_batching_config", None)
        config = copy.copy(continuous_batching_config or ContinuousBatchingConfig())
        _check_settings(config, getattr(self.model.config, "compile_config", None))
        if self.stored is not None and not config.allow_block_sharing:
            raise InputError(
                "a prompt store shares pages, and allow_block_sharing is False; leave it out, or "
                "the store"
            )
        config.use_cuda_graph = config.use_async_batching = False
        found = packed_by_page(
            self.recipe, config.page_size, self.engine, "page_size=", evicts=True
        )
        layer_indices = compat.geometry(self.model).layer_indices
        facts = load_layer_facts(self.model, found)
        plans = [
            LayerPlan.of_recipe(found.for_layer(i, layer_indices), *of_layer[:3])
            for i, of_layer in zip(layer_indices, facts, strict=True)
        ]
        allocator = partial(PackedAllocator, plans, self.stored)
        eviction = PromptEviction(found, layer_indices, facts)
        if eviction.evicts:
            allocator = partial(EvictingAllocator, plans, eviction)
            config.allow_block_sharing = False  # the tokens of a block depend on all of a prompt
        with torch.no_grad():
            manager = PackedManager(allocator, self, self.model, generation, config, workload_hints)
        self.managers.append(manager)
        return manager

    def switch(self, manager: PackedManager) -> None:
        """Set kvloom's attention for a manager."""
        if not self.using:
            self.former = [(x, vars(x)[FIELD]) for x in attention_configs(self.model)]
        self.using.add(manager)
        self._name(pages=True)

    def switch_back(self, manager: PackedManager) -> None:
        """Set the model's own attention when no manager uses kvloom's."""
        if self.using == {manager}:
            self._name(pages=False)
        self.using.discard(manager)

    @contextmanager
    def outside_pages(self) -> Iterator[None]:
        """Let the model run with a cache of kvloom, in the middle of a manager's step."""
        self._name(pages=False)
        try:
            with use_kvloom([config for config, _ in self.former]):
                yield
        finally:
            self._name(pages=True)

    def _name(self, pages: bool) -> None:
        """Name the attention of pages in the configs, or the model's own where they name pages."""
        for config, former in self.former:
            if pages or vars(config)[FIELD] == PAGES:
                vars(config)[FIELD] = PAGES if pages else former

    def check(self) -> None:
        """Raise `CacheMisuse` if the model is another than at the beginning of the block."""
        if self._weights() != self.weights or (self.stored is not None and self.stored.changed()):
            raise CacheMisuse(
                "the model has changed since kvloom.continuous began, and pages hold keys and "
                "values of the former one; leave the block and enter it again"
            )

    @property
    def learns(self) -> bool:
        """Whether layers learn from examples of a prompt, if it is long enough."""
        return needed(self.cache, sys.maxsize)

    def check_alone(self, manager: PackedManager) -> None:
        """Raise `CacheMisuse` if another manager runs, and would learn at the same time."""
        if self.learns and any(x.is_running() for x in self.managers if x is not manager):
            raise CacheMisuse(
                f"recipe {self.recipe.name!r} reads examples of each prompt, and another manager "
                "runs on this model; call its stop() first"
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

    def check_attention(self, *_: Any) -> None:
        """Raise `CacheMisuse` if the model's attention was changed; a hook of its forward."""
        for config, _former in self.former:
            if vars(config)[FIELD] not in (PAGES, NAME):
                raise attention_changed()


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
