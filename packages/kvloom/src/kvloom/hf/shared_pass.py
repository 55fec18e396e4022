"""One forward pass for several caches: of a prompt they all read, or of a step of each.

`prefill_many`: a first prompt attends to itself exactly, so its queries, keys and values do not
depend on the recipe. One cache, the leader, takes part in the forward pass; the others, its
followers, store what each layer attends with. Each cache is then as if it had read the prompt
alone. Followers that score a repetition of the prompt alike (KVzip) share its passes.

`BatchedCaches`: the rows of several caches are one batch. The weights of a model are then read once
for all of them. Reading weights is most of the time of a decode step on a small batch. Each cache
attends with its own rows. The results are those of separate steps but for rounding: matrix products
of another batch size may round differently.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import accumulate, pairwise
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..cache.layer import LayerCache
from ..cache.step import StepInputs
from ..errors import CacheMisuse
from . import compat, examples
from .cache import Cache
from .forward import token_ids
from .guard import outside_inference_mode
from .hybrid import compressed_part, stock_part, with_compressed
from .implementation import use_kvloom
from .passes import last_logits
from .repetition import Repetition, of_prompt
from .routed_cache import RoutedCache
from .routed_layer import RoutedLayer, on_one_device
from .supported import unwrap


class Follower:
    """A cache that stores a prompt without attending to it.

    Attributes:
        cache: The cache.
        seconds: What the prompt takes in this cache alone: the forward pass, the passes that repeat
            the prompt, and storing it.
        error: Why the cache is still empty; None if it holds the prompt.
        reads_alone: Whether this cache needs a forward pass of its own.
        repetition: What repeats the prompt, where the recipe scores a repetition.
    """

    def __init__(self, cache: Cache) -> None:
        self.cache = cache
        self.seconds = 0.0
        self.error: Exception | None = None
        self.reads_alone = False
        self.repetition: Repetition | None = None

    @property
    def ended(self) -> bool:
        """Whether the layers that remain need not be stored."""
        return self.reads_alone or self.error is not None

    @contextmanager
    def failing(self, *errors: type[Exception]) -> Iterator[None]:
        """Keep an error of this follower in `error`, so that the others go on."""
        try:
            yield
        except errors as error:
            self.error = error


@torch.no_grad()
def prefill_many(
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
    Any other failure leaves all caches empty. Raises `CacheMisuse` for a cache with tokens, or of
    another model.
    """
    caches = [leader, *(follower.cache for follower in followers)]
    model, tokens = unwrap(model), next(iter(inputs.values())).shape[1]
    for cache in caches:
        cache.check_model(model)
    if any(cache.get_seq_length() for cache in caches):
        raise CacheMisuse("a cache holds tokens already; give prefill_many new caches")
    if examples.needed(leader, tokens):
        raise CacheMisuse("a leader learns nothing from examples; use a cache of `full`")
    for follower in followers:
        follower.seconds, follower.error = 0.0, None
        with follower.failing(CacheMisuse):
            follower.repetition = of_prompt(model, follower.cache, inputs)
    windows = any(cache.packs_windows for cache in caches)
    for follower in followers:
        follower.reads_alone = windows or _other_positions(leader, follower.cache, inputs)
    try:
        with ExitStack() as running:
            for cache in caches:
                running.enter_context(cache.guard.step())
            for follower in followers:
                with follower.failing(CacheMisuse):
                    running.enter_context(token_ids(follower.cache, inputs))
            _learn(model, followers, tokens, clock, inputs)
            for follower in followers:
                if follower.repetition is not None:
                    running.enter_context(follower.repetition.reading())
            logits, seconds = _read_prompt(model, leader, followers, clock, inputs)
    except BaseException:
        for cache in caches:
            cache.reset()
        raise
    for follower in followers:
        if follower.ended:
            follower.cache.reset()
        if follower.reads_alone:
            begin = clock()
            with follower.failing(Exception):
                last_logits(model, follower.cache, **inputs)
            follower.seconds = clock() - begin
    return logits, seconds


def _other_positions(leader: Cache, cache: Cache, inputs: dict[str, Any]) -> bool:
    """Return whether a cache reads the prompt at other positions than the leader.

    A cache that renumbers learned positions derives those of padded rows from the mask, where the
    call gives none; the model itself may count padding.
    """
    mask = inputs.get("attention_mask")
    padded = mask is not None and not mask.all()
    has_positions = inputs.get("position_ids") is not None
    return padded and not has_positions and cache.learned_positions != leader.learned_positions


def _learn(
    model: PreTrainedModel,
    followers: Sequence[Follower],
    tokens: int,
    clock: Callable[[], float],
    inputs: dict[str, Any],
) -> None:
    """Give the layers of each follower what they learn from examples of the prompt."""
    with use_kvloom(model._kvloom.configs):
        for follower in followers:
            if follower.ended or not examples.needed(follower.cache, tokens):
                continue
            begin = clock()
            with follower.failing(Exception):
                examples.learn(model, follower.cache, inputs)
            follower.seconds += clock() - begin


def _read_prompt(
    model: PreTrainedModel,
    leader: Cache,
    followers: Sequence[Follower],
    clock: Callable[[], float],
    inputs: dict[str, Any],
) -> tuple[Tensor, float]:
    """Run one forward pass that fills all caches, then the repetitions; as `prefill_many`."""
    fan_out = RoutedCache(list(leader.layers), leader.config_key)
    for i, layer_index in enumerate(leader.geometry.layer_indices):
        parts = [(follower, follower.cache.full_layers[i]) for follower in followers]
        fan_out.replace(layer_index, _FanOutLayer(leader.full_layers[i], parts, clock))
    fan_out.learned_positions = leader.learned_positions
    begin, before = clock(), sum(follower.seconds for follower in followers)
    logits = last_logits(model, fan_out, **inputs)
    forward = clock() - begin - sum(follower.seconds for follower in followers) + before
    for follower in followers:
        follower.seconds += forward
        _copy_other_layers(leader, follower)
    with use_kvloom(model._kvloom.configs):
        _repeat(followers, clock)
    leader.hidden = fan_out.hidden
    for follower in followers:
        follower.cache.hidden = fan_out.hidden
        for layer in follower.cache.full_layers:
            layer.cache.forget_undo()
    return logits, forward


class _FanOutLayer(RoutedLayer):
    """The leader's layer; passes what it attends with to the same layer of the followers."""

    def __init__(
        self,
        leader: RoutedLayer,
        followers: Sequence[tuple[Follower, RoutedLayer]],
        clock: Callable[[], float],
    ) -> None:
        super().__init__(leader.cache, shared=leader.shared)
        self.followers, self.clock = followers, clock

    @property
    def reads_queries(self) -> bool:
        """Whether the leader or a follower reads the queries of the prompt."""
        return super().reads_queries or any(layer.reads_queries for _, layer in self.followers)

    @property
    def uses_input_norms(self) -> bool:
        """Whether the leader or a follower reads the norms of the layer's input."""
        return super().uses_input_norms or any(
            layer.uses_input_norms for _, layer in self.followers
        )

    def check_axes(self) -> None:
        """Check the leader's recipe, and each follower's."""
        super().check_axes()
        for follower, layer in self.followers:
            with follower.failing(CacheMisuse):
                layer.check_axes()

    def attend(self, step: StepInputs) -> Tensor:
        """Attend in the leader; store the prompt in the followers."""
        first = self.awaits_attention  # not of a layer that shares these keys and values
        norms = self.norms
        out = super().attend(step)
        if not first:
            return out
        step = on_one_device(step)
        for follower, layer in self.followers:
            if follower.ended:
                continue
            keep, alibi = layer.cache.recipe.keep, step.queries.alibi
            if alibi is not None and keep is not None and keep.renumbers:
                follower.reads_alone = True  # such positions are rounded differently in some models
                continue
            begin = self.clock()
            with follower.failing(Exception):
                queries = step.queries._replace(
                    ids=layer.ids,
                    norms=norms if layer.uses_input_norms else None,
                    predictor=layer.predictor,
                )
                layer.predictor = None
                outside_inference_mode(layer.cache.prefill)(step._replace(queries=queries))
            follower.seconds += self.clock() - begin
        return out


def _copy_other_layers(leader: Cache, follower: Follower) -> None:
    """Copy what transformers stores: layers that kvloom does not compress, and states."""
    if follower.ended:
        return
    cache = follower.cache
    for i, source in enumerate(leader.layers):
        stored, compressed = copy.deepcopy(stock_part(source)), compressed_part(cache.layers[i])
        if stored is not None:
            cache.replace(i, stored if compressed is None else with_compressed(stored, compressed))


def _repeat(followers: Sequence[Follower], clock: Callable[[], float]) -> None:
    """Repeat the prompt once for all followers that score it alike; then each evicts."""
    by_rule: dict[Any, list[tuple[Follower, Repetition]]] = {}
    for follower in followers:
        repetition = follower.repetition
        if repetition is not None and not follower.ended:
            by_rule.setdefault(repetition.rule, []).append((follower, repetition))
    for members in by_rule.values():
        first, *others = sorted((x for _, x in members), key=lambda repetition: repetition.budget)
        begin, failure = clock(), None
        try:
            first.score()
            for repetition in others:
                repetition.take_scores(first)
        except Exception as error:
            failure = error
        scoring = clock() - begin
        for follower, repetition in members:
            begin = clock()
            with follower.failing(Exception):
                if failure is not None:
                    raise failure
                repetition.evict()
            follower.seconds += scoring + clock() - begin


def can_batch(model: PreTrainedModel, caches: Sequence[Cache]) -> bool:
    """Return whether `BatchedCaches` supports these caches.

    It supports no layers with a sliding window or states, no learned position embeddings, and no
    models with an adapter. The caches, one or more, must have seen equally many tokens. A step
    refuses padding.
    """
    return (
        bool(caches)
        and not compat.has_adapter(unwrap(model))
        and not any(cache.learned_positions or cache.packs_windows for cache in caches)
        and all(isinstance(layer, RoutedLayer) for layer in caches[0].layers)
        and len({cache.get_seq_length() for cache in caches}) == 1
    )


class BatchedCaches(RoutedCache):
    """Several caches of one model as one cache, for one step.

    A failure in the step leaves all of them as they were.

    Args:
        model: The model of the caches.
        caches: In the order of their rows in the batch.

    Raises:
        CacheMisuse: `can_batch` refuses the caches, or one is of another model.
    """

    def __init__(self, model: PreTrainedModel, caches: Sequence[Cache]) -> None:
        for cache in caches:
            cache.check_model(unwrap(model))
        if not can_batch(model, caches):
            raise CacheMisuse("these caches cannot be batched; step each of them alone")
        ends = [0, *accumulate(_rows(cache) for cache in caches)]
        self.caches, self.slices = caches, [slice(*pair) for pair in pairwise(ends)]
        layers = [
            BatchedLayer([cache.layers[i] for cache in caches], self.slices)
            for i in range(len(caches[0].layers))
        ]
        super().__init__(layers, caches[0].config_key)
        self.owner = caches[0].owner

    @contextmanager
    def step(self) -> Iterator[None]:
        """Run a step of every cache."""
        with self.guard.step(), ExitStack() as steps:
            for cache in self.caches:
                steps.enter_context(cache.step())
            yield
            if unreached := self.unreached():
                raise unreached

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the number of tokens seen, those that wait in the caches included."""
        return self.caches[0].get_seq_length(layer_idx)

    def check_mask(self, mask: Tensor | None) -> None:
        """Check the rows of each cache."""
        for cache, rows in zip(self.caches, self.slices, strict=True):
            cache.check_mask(None if mask is None else mask[rows])

    def check_batch(self, rows: int) -> None:
        """Raise `CacheMisuse` for another batch size than that of all caches."""
        if rows != self.slices[-1].stop:
            raise CacheMisuse(
                f"the caches hold {self.slices[-1].stop} rows in all and were given {rows}; "
                "give one row for each"
            )


class BatchedLayer(RoutedLayer):
    """The same layer of several caches; each attends with its rows of the batch."""

    def __init__(self, routed: Sequence[RoutedLayer], slices: Sequence[slice]) -> None:
        super().__init__(routed[0].cache)
        self.routed, self.slices = routed, slices
        self.members = [layer.cache for layer in routed]

    @property
    def needs_ids(self) -> bool:
        """Whether the next step of a cache needs token ids."""
        return any(member.needs_ids for member in self.members)

    @property
    def uses_input_norms(self) -> bool:
        """Whether the next step of a cache needs the norms of the layer's input."""
        return any(member.uses_input_norms for member in self.members)

    def attend(self, step: StepInputs) -> Tensor:
        """Attend in each cache with its rows of the batch."""
        self.arrived()
        if step.queries.visible is not None:
            raise CacheMisuse(
                f"{self.cache.name}: rows with padding cannot be batched; step each cache alone"
            )
        step = self.with_inputs_of_call(step)
        parts = []
        for layer, rows in zip(self.routed, self.slices, strict=True):
            own, seen = _step_of(layer.cache, step).map(itemgetter(rows)), layer.cache.seen
            parts.append(outside_inference_mode(layer.cache.run)(own))
            layer.note_gradients(parts[-1], own, seen)
        return torch.cat(parts)


def _step_of(member: LayerCache, step: StepInputs) -> StepInputs:
    """Return a step without the ids and norms that this cache does not read."""
    queries = step.queries
    return step._replace(
        queries=queries._replace(
            ids=queries.ids if member.needs_ids else None,
            norms=queries.norms if member.uses_input_norms else None,
        )
    )


def _rows(cache: Cache) -> int:
    like = cache.full_layers[0].cache.like
    if like is None:
        raise CacheMisuse("a cache is empty; give caches that have read a prompt")
    return like.shape[0]
