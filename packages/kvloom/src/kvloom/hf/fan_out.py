"""One forward pass of a prompt that fills the caches of many recipes.

A first prompt attends to itself exactly, so its queries, keys and values do not depend on the
recipe. One cache, the leader, takes part in the forward pass; the others, its followers, store what
each layer attends with. Each cache is then as if it had read the prompt alone. Followers that score
a repetition of the prompt alike (KVzip) share its passes.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..cache.step import StepInputs
from ..errors import CacheMisuse
from . import attention, compat, token_ids
from .cache import Cache
from .repetition import Repetition, of_prompt
from .routed import RoutedCache, RoutedLayer, lasting, on_one_device


class Follower:
    """A cache that stores a prompt without attending to it.

    seconds: what the prompt takes in this cache alone: the forward pass, the passes that repeat the
    prompt, and storing it. error: why the cache is still empty; None if it holds the prompt. apart:
    whether it cannot follow, and reads the prompt by a forward pass of its own. repetition: of a
    cache that scores one.
    """

    def __init__(self, cache: Cache) -> None:
        self.cache = cache
        self.seconds = 0.0
        self.error: Exception | None = None
        self.apart = False
        self.repetition: Repetition | None = None

    @property
    def ended(self) -> bool:
        """Whether the layers that remain need not be stored."""
        return self.apart or self.error is not None

    @contextmanager
    def failing(self, *errors: type[Exception]) -> Iterator[None]:
        """Keep an error of this follower in `error`, so that the others go on."""
        try:
            yield
        except errors as error:
            self.error = error


def prefill_together(
    model: PreTrainedModel,
    leader: Cache,
    followers: Sequence[Follower],
    clock: Callable[[], float] = time.perf_counter,
    **inputs: Any,
) -> tuple[Tensor, float]:
    """Fill the leader and the followers with one prompt.

    leader: a cache without tokens, as every follower's. clock: returns seconds. inputs: arguments
    of the model, such as input_ids [B, T] and attention_mask. Returns the last logits [B, V] and
    the seconds of the forward pass that filled the leader.

    An error of one follower, such as `NotFinite`, does not stop the others: see `Follower.error`.
    Any other failure leaves all caches empty. Raises `CacheMisuse` for a cache with tokens.
    """
    caches = [leader, *(follower.cache for follower in followers)]
    if any(cache.get_seq_length() for cache in caches):
        raise CacheMisuse("a cache holds tokens already; give prefill_together new caches")
    model = compat.unwrap(model)
    for follower in followers:
        with follower.failing(CacheMisuse):
            follower.repetition = of_prompt(model, follower.cache, (), inputs)
    try:
        with ExitStack() as running:
            for cache in caches:
                running.enter_context(cache.guard.step())
            for follower in followers:
                with follower.failing(CacheMisuse):
                    running.enter_context(token_ids.of_call(follower.cache, (), inputs))
            logits, seconds = _read_prompt(model, leader, followers, clock, inputs)
    except BaseException:
        for cache in caches:
            cache.reset()
        raise
    for follower in followers:
        if follower.ended:
            follower.cache.reset()
        if follower.apart:
            begin = clock()
            with follower.failing(Exception):
                _last_logits(model, follower.cache, inputs)
            follower.seconds = clock() - begin
    return logits, seconds


def _read_prompt(
    model: PreTrainedModel,
    leader: Cache,
    followers: Sequence[Follower],
    clock: Callable[[], float],
    inputs: dict[str, Any],
) -> tuple[Tensor, float]:
    """Run one forward pass that fills all caches, then the repetitions; as `prefill_together`."""
    layers = [
        _FanOutLayer(layer, [(f, f.cache.layers[i]) for f in followers], clock)
        if isinstance(layer, RoutedLayer)
        else layer
        for i, layer in enumerate(leader.layers)
    ]
    fan_out = RoutedCache(layers, leader.fingerprint)
    fan_out.learned_positions = leader.learned_positions
    begin = clock()
    logits = _last_logits(model, fan_out, inputs)
    forward = clock() - begin - sum(follower.seconds for follower in followers)
    for follower in followers:
        follower.seconds += forward
        _copy_other_layers(leader, follower)
    with attention.routed(model._kvloom.configs):
        _repeat(followers, clock)
    for follower in followers:
        for layer in follower.cache.routed:
            layer.cache.end_step()
    return logits, forward


class _FanOutLayer(RoutedLayer):
    """The leader's layer; passes what it attends with to the same layer of the followers."""

    def __init__(
        self,
        leader: RoutedLayer,
        followers: Sequence[tuple[Follower, RoutedLayer]],
        clock: Callable[[], float],
    ) -> None:
        super().__init__(leader.cache)
        self.followers, self.clock = followers, clock

    def attend(self, given: StepInputs) -> Tensor:
        """Attend in the leader; store the prompt in the followers."""
        out = super().attend(given)
        given = on_one_device(given)
        for follower, layer in self.followers:
            if follower.ended:
                continue
            keep, alibi = layer.cache.recipe.keep, given.queries.alibi
            if alibi is not None and keep is not None and keep.positions != "original":
                follower.apart = True  # such positions are rounded differently in some models
                continue
            begin = self.clock()
            with follower.failing(Exception):
                queries = given.queries._replace(ids=layer.ids)
                lasting(layer.cache.prefill)(given._replace(queries=queries))
            follower.seconds += self.clock() - begin
        return out


def _copy_other_layers(leader: Cache, follower: Follower) -> None:
    """Copy the layers that kvloom does not compress."""
    for i, layer in enumerate(follower.cache.layers):
        if not isinstance(layer, RoutedLayer) and not follower.ended:
            follower.cache.layers[i] = copy.deepcopy(leader.layers[i])


def _repeat(followers: Sequence[Follower], clock: Callable[[], float]) -> None:
    """Repeat the prompt once for all followers that score it alike; then each evicts."""
    alike: dict[Any, list[tuple[Follower, Repetition]]] = {}
    for follower in followers:
        if follower.repetition is not None and not follower.ended:
            found = alike.setdefault(follower.repetition.rule, [])
            found.append((follower, follower.repetition))
    for same in alike.values():
        first, *others = sorted((one for _, one in same), key=lambda one: one.budget)
        begin, failed = clock(), None
        try:
            first.score()
            for other in others:
                other.take_scores(first)
        except Exception as error:
            failed = error
        shared = clock() - begin
        for follower, one in same:
            begin = clock()
            with follower.failing(Exception):
                if failed is not None:
                    raise failed
                one.evict()
            follower.seconds += shared + clock() - begin


def _last_logits(model: PreTrainedModel, cache: RoutedCache, inputs: dict[str, Any]) -> Tensor:
    last_only = compat.last_logits_option(type(model).forward)
    with torch.no_grad():
        return model(past_key_values=cache, use_cache=True, **inputs, **last_only).logits[:, -1]
