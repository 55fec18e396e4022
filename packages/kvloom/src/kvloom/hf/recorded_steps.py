"""Steps of a cache that are recorded once, and replayed for the tokens after that.

Decides which steps are recorded; the first results of each model are compared with those of steps
that run. The tokens of recorded steps wait (`cache.waiting`): a cache stores up to `ROOM` of them
at once, before anything else reads it. `cuda_graphs` decides how a step is recorded.
"""

from __future__ import annotations

import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any
from weakref import WeakSet, ref

import torch
from torch import Tensor

from ..cache.waiting import WaitingTokens
from ..errors import first_line
from . import compat, shard
from .guard import used_by_threads
from .implementation import use_kvloom
from .routed_cache import RoutedCache

if TYPE_CHECKING:
    from .forward import RoutedForward

ROOM = 64
"""Tokens that wait at most: then they are packed, one step runs, the next is recorded."""

_INPUTS = "input_ids", "position_ids", "cache_position"
"""The tensors that a call may have, besides a padding mask."""

_PLAIN = type(None), bool, int, float, str
_ROUNDING = 0.02  # at most, between a step that runs and its replay
_LARGE = 1e4  # larger logits hide tokens
_LOCK = threading.Lock()  # one step is recorded at a time

Record = Callable[[Callable[[], Any]], tuple[Callable[[], object], Any]]
"""Records a function; returns what replays it, and its result, which a replay overwrites."""


class Graphs:
    """The recorded steps of one model's caches. Its text says how many steps were replayed.

    Attributes:
        record: How a step is recorded.
        room: Tokens of a cache that wait at most.
        refused: Why no step of the model is replayed any more; "" if they are.
        checked: Whether a replay for another token than the recorded one was right.
        replayed: The steps that were replayed.
        run: The steps that were run before others could be recorded.
        others: How many calls were not recorded, by reason.
    """

    def __init__(self, record: Record, room: int = ROOM) -> None:
        self.record, self.room = record, room
        self.refused, self.checked = "", False
        self.replayed = self.run = 0
        self.others: Counter[str] = Counter()
        self._caches: WeakSet[RoutedCache] = WeakSet()

    def __str__(self) -> str:
        reasons = "".join(f"; {count} as outside: {why}" for why, count in self.others.items())
        return f"{self.replayed} steps replayed, {self.run} run between them{reasons}"

    def __reduce__(self) -> Any:
        """Copy as None: a copied model is not in the block."""
        return type(None), ()

    def begin(
        self, forward: RoutedForward, cache: RoutedCache, kwargs: dict[str, Any]
    ) -> RecordedSteps | None:
        """Return steps that begin with this call; None if the call must run by itself."""
        with cache.guard.step():
            why = self.refused or _reason(forward, cache, kwargs)
            if why:
                self.others[why] += 1
                return None
            for layer in cache.compressed:
                layer.cache.forget_undo()
            steps = cache.steps = RecordedSteps(self, forward, cache, kwargs)
        self._caches.add(cache)
        return steps

    def refuse(self, why: str) -> None:
        """Replay no more steps, and say so."""
        self.refused = why
        warnings.warn(f"kvloom.cuda_graphs: {why}; steps run one by one", stacklevel=2)

    def close(self) -> None:
        """Store the tokens that wait in all caches; raise the first error after the last cache."""
        errors = []
        for cache in list(self._caches):
            try:
                cache.store_waiting()
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]


class RecordedSteps:
    """Steps of one cache, one token each: the first runs, the second is recorded, others replayed.

    count: the tokens that wait.
    """

    def __init__(
        self,
        graphs: Graphs,
        forward: RoutedForward,
        cache: RoutedCache,
        kwargs: dict[str, Any],
    ) -> None:
        self.graphs, self.forward = graphs, forward
        self._cache = ref(cache)  # weak, so that the cache is freed when its last user drops it
        self.argument_names = frozenset(kwargs)
        self.plain_arguments = {
            name: x
            for name, x in kwargs.items()
            if isinstance(x, _PLAIN) and name != "attention_mask"
        }
        self.tokens_before, self.count = cache.get_seq_length(), 0
        self.autocast = _autocast()
        self.replay: Callable[[], object] | None = None
        self.recorded_at, self.rounding = 0, 0.0  # its count; what its replay differs by
        self.out: Any = None
        ids: Tensor = kwargs["input_ids"]
        with torch.inference_mode(False), torch.no_grad():  # so that later calls can change them
            visible = _padding(kwargs, self.tokens_before)
            self.waiting = WaitingTokens(graphs.room, len(ids), ids.device, visible)
            self.inputs = {
                name: torch.empty_like(x)
                for name, x in kwargs.items()
                if name in _INPUTS and isinstance(x, Tensor)
            }
            for layer in cache.compressed:
                layer.cache.reserve(graphs.room)

    @property
    def cache(self) -> RoutedCache:
        """The cache of these steps."""
        cache = self._cache()
        assert cache is not None
        return cache

    @property
    def tokens(self) -> int:
        """The tokens of the cache, those that wait included."""
        return self.tokens_before + self.count

    def takes(self, forward: RoutedForward, kwargs: dict[str, Any]) -> bool:
        """Return whether a call is one more of these steps."""
        graphs = self.graphs
        return (
            forward is self.forward
            and forward.model._kvloom.graphs is graphs
            and self.count < graphs.room
            and not graphs.refused
            and self.argument_names == kwargs.keys()
            and all(_equal(kwargs[name], x) for name, x in self.plain_arguments.items())
            and all(_alike(kwargs[name], x) for name, x in self.inputs.items())
            and _is_inference(forward)
            and self.autocast == _autocast()
            and self._has_padding_of(kwargs)
        )

    def run(self, kwargs: dict[str, Any]) -> Any:
        """Run one step; if it fails, the tokens that wait stay as they were."""
        cache = self.cache
        with cache.guard.step():
            if cache.steps is not self:
                raise used_by_threads("another thread has read this cache before its step")
            for name, x in self.inputs.items():
                x.copy_(kwargs[name])
            self.waiting.slot.fill_(self.count)
            try:
                out = self._result()
            except BaseException:
                for layer in cache.compressed:
                    layer.roll_back()
                raise
            token = {"input_ids": kwargs["input_ids"]}
            token_hash = cache.token_hash.after(token, kwargs["position_ids"], self.tokens, 1)
            self.count += 1
            cache.token_hash = token_hash
        return out

    def store(self) -> None:
        """Store the tokens that wait in their layers, and pack what is due."""
        self.replay = self.out = None  # it reads tensors that packing replaces, even if it fails
        if self.count:
            for layer in self.cache.compressed:
                layer.commit_waiting(self.waiting, self.count)

    def _has_padding_of(self, kwargs: dict[str, Any]) -> bool:
        """Return whether a call's mask hides the tokens that these steps hide, and no other."""
        mask, visible = kwargs.get("attention_mask"), self.waiting.visible
        if not _fits(mask, self.tokens):
            return False
        if visible is None:
            return mask is None or bool(mask.all())
        if mask is None or not bool(mask[:, self.tokens_before :].all()):
            return False
        before = mask[:, : self.tokens_before].to(visible.device)
        return torch.equal(before.bool(), visible[:, 0])

    def _result(self) -> Any:
        """Return the result of a step that runs, or a copy of that of a replay."""
        graphs, cache = self.graphs, self.cache
        if not self.count:
            graphs.run += 1
            return self._step()
        if self.replay is None:
            try:
                with _LOCK:
                    replay, out = graphs.record(self._step)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:
                for layer in cache.compressed:
                    layer.roll_back()
                kind = type(self.forward.model).__name__
                graphs.refuse(f"a step of {kind} cannot be recorded ({first_line(error)})")
                return self._step()
            self.out = _mapped(out, lambda x: _CACHE if x is cache else x)
            self.recorded_at, self.replay = self.count, replay
        self.replay()
        graphs.replayed += 1
        out = _mapped(self.out, lambda x: cache if x is _CACHE else _copied(x))
        return out if graphs.checked else self._checked(out)

    def _checked(self, out: Any) -> Any:
        """Return the result of a replay, or that of a step that runs if they differ.

        A model may compute from numbers on the host, such as the count of tokens. A replay is then
        right for the recorded token, where it differs by rounding alone, and wrong for all others.
        """
        ran, recorded = self._step(), self.count == self.recorded_at
        difference = _difference(out, ran)
        if difference <= (_ROUNDING if recorded else 4 * self.rounding + 1e-3):
            if recorded:
                self.rounding = difference
            else:
                self.graphs.checked = True
            return out
        kind = type(self.forward.model).__name__
        self.graphs.refuse(f"a replayed step of {kind} differs by {difference:.2g} from one run")
        return ran

    def _step(self) -> Any:
        """Run the model on the inputs; every operation is on the same tensors each time."""
        cache, configs = self.cache, self.forward.model._kvloom.configs
        kwargs = {
            **self.plain_arguments,
            **self.inputs,
            "past_key_values": cache,
            "attention_mask": None,
        }
        self.waiting.begin_step()
        try:
            for layer in cache.compressed:
                layer.waiting = self.waiting
            with use_kvloom(configs):
                out = self.forward.run(kwargs)
        finally:
            for layer in cache.compressed:
                layer.waiting = None
        if unreached := cache.unreached():
            raise unreached
        return out


def _reason(forward: RoutedForward, cache: RoutedCache, kwargs: dict[str, Any]) -> str:
    """Return why a call cannot begin recorded steps, as far as its arguments show; "": it can.

    Without positions, each model computes its own.
    """
    ids, position = kwargs.get("input_ids"), kwargs.get("position_ids")
    if not isinstance(ids, Tensor) or ids.shape[1:] != (1,) or not cache.get_seq_length():
        return "a call of several tokens, or of embeddings"
    if not isinstance(position, Tensor) or position.dim() != 2 or position.shape[1] != 1:
        return "a call without position_ids of one axis"
    known = *_INPUTS, "attention_mask", "past_key_values"
    if others := [x for x in kwargs if x not in known and not isinstance(kwargs[x], _PLAIN)]:
        return f"a call with {', '.join(others)}"
    if not _is_inference(forward):
        return "a call with gradients, or of a model in training"
    if not _fits(kwargs.get("attention_mask"), cache.get_seq_length()):
        return "a call whose attention_mask is not of all tokens"
    if cache.stock_layers:
        return "layers that kvloom does not compress"
    if (
        not cache.may_record
        or cache.steps is not None
        or cache.learned_positions
        or forward.refuses_caches
        or shard.running()
        or compat.has_adapter(forward.model)
    ):
        return "a model, or a cache, whose steps are not recorded"
    for layer in cache.compressed:
        if not layer.cache.may_wait or layer.shared or layer.needs_ids or layer.uses_input_norms:
            return f"recipe {layer.cache.recipe.name!r}, or a cache in this state"
    return ""


def _is_inference(forward: RoutedForward) -> bool:
    return not (forward.model.training or torch.is_grad_enabled())


def _autocast() -> tuple[bool, torch.dtype]:
    return torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")


def _fits(mask: Any, tokens: int) -> bool:
    """Return whether a padding mask is of so many tokens and a new one that is no padding."""
    if mask is None:
        return True
    is_mask = isinstance(mask, Tensor) and mask.dim() == 2 and mask.shape[1] == tokens + 1
    return is_mask and bool(mask[:, -1].all())


def _padding(kwargs: dict[str, Any], tokens: int) -> Tensor | None:
    """Return the mask of the first `tokens` tokens, bool [B, 1, N]; None if it hides none."""
    mask = kwargs.get("attention_mask")
    if mask is None or bool(mask.all()):
        return None
    return mask[:, None, :tokens].bool().to(kwargs["input_ids"].device)


def _equal(given: Any, x: Any) -> bool:
    return type(given) is type(x) and bool(given == x)


def _alike(given: Any, x: Tensor) -> bool:
    """Return whether an argument has the traits of an input of recorded steps."""
    same = isinstance(given, Tensor) and given.shape == x.shape
    return same and given.dtype == x.dtype and given.device == x.device


_CACHE = object()
"""In place of the cache in a result that is kept."""


def _mapped(x: Any, fn: Callable[[Any], Any]) -> Any:
    """Return a result with fn applied to all that is in it."""
    if isinstance(x, dict):  # an output of transformers
        return type(x)(**{name: _mapped(value, fn) for name, value in x.items()})
    if isinstance(x, tuple | list):
        return type(x)(_mapped(value, fn) for value in x)
    return fn(x)


def _copied(x: Any) -> Any:
    return x.clone() if isinstance(x, Tensor) else x


def _difference(x: Any, y: Any) -> float:
    """Return the distance of two results' first tensors, relative to the second.

    Infinite, if they differ in the large numbers by which a model hides tokens.
    """
    a, b = (next(_tensors(result)).double() for result in (x, y))
    usual = b.abs() < _LARGE
    if not torch.equal(a.where(~usual, 0), b.where(~usual, 0)):
        return torch.inf
    a, b = a.where(usual, 0), b.where(usual, 0)
    return float((a - b).norm() / b.norm().clamp(min=1e-9))


def _tensors(x: Any) -> Iterator[Tensor]:
    if isinstance(x, Tensor):
        yield x
    elif isinstance(x, dict | tuple | list):
        for value in x.values() if isinstance(x, dict) else x:
            yield from _tensors(value)
