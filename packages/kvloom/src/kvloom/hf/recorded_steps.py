"""Steps of a cache that are recorded once, and replayed for the tokens after that.

Decides which steps are recorded; the first results of each model are compared with those of steps
that run. The tokens of recorded steps wait (`cache.waiting`): a cache stores up to `ROOM` of them
at once, before anything else reads it. `cuda_graphs` decides how a step is recorded.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..cache.waiting import WaitingTokens
from ..errors import CacheMisuse
from . import compat, shard
from .implementation import use_kvloom
from .routed_cache import RoutedCache

if TYPE_CHECKING:
    from .forward import RoutedForward

ROOM = 64
"""Tokens that wait at most. Each time, one step runs, one is recorded, and tokens are packed."""

_INPUTS = "input_ids", "position_ids", "cache_position"
_PLAIN = type(None), bool, int, float, str
_LOCK = threading.Lock()  # one step is recorded at a time

Record = Callable[[Callable[[], Any]], tuple[Callable[[], object], Any]]
"""Records a function; returns what replays it, and its result, which a replay overwrites."""


class Graphs:
    """The recorded steps of one model's caches.

    refused: why no step of the model is replayed any more; "" if they are.
    """

    def __init__(self, record: Record, room: int = ROOM) -> None:
        self.record, self.room = record, room
        self.refused = ""
        self.noise: float | None = None  # between a step that runs and its replay
        self.compared = False  # a replay at another place was right
        self._caches: WeakSet[RoutedCache] = WeakSet()

    def __reduce__(self) -> Any:
        """Copy as None: a copied model is not in the block."""
        return type(None), ()

    def begin(
        self, forward: RoutedForward, cache: RoutedCache, kwargs: dict[str, Any]
    ) -> RecordedSteps | None:
        """Return steps that begin with this call; None if it runs as without graphs."""
        if self.refused or not _may_begin(forward, cache, kwargs):
            return None
        cache.steps = RecordedSteps(self, forward, cache, kwargs)
        self._caches.add(cache)
        return cache.steps

    def refuse(self, why: str) -> None:
        """Replay no more steps, and say so."""
        self.refused = why
        warnings.warn(f"kvloom.cuda_graphs: {why}; steps run one by one", stacklevel=6)

    def close(self) -> None:
        """Store the tokens that wait in all caches."""
        for cache in list(self._caches):
            cache.finish_steps()


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
        self.graphs, self.forward, self.cache = graphs, forward, cache
        ids: Tensor = kwargs["input_ids"]
        self.names = frozenset(kwargs)
        self.plain = {name: x for name, x in kwargs.items() if isinstance(x, _PLAIN)}
        self.before, self.count = cache.get_seq_length(), 0
        self.autocast = torch.is_autocast_enabled("cuda")
        self.replay: Callable[[], object] | None = None
        self.out: Any = None
        with torch.inference_mode(False), torch.no_grad():  # so that later calls can change them
            visible = _padding(kwargs, self.before)
            self.waiting = WaitingTokens(graphs.room, len(ids), ids.device, visible)
            self.inputs = {
                name: torch.empty_like(kwargs[name]) for name in _INPUTS if _is_given(kwargs, name)
            }
            if "position_ids" not in self.inputs:
                self.inputs["position_ids"] = torch.empty_like(ids[:1])
            for layer in cache.compressed:
                layer.cache.reserve(graphs.room)

    @property
    def seen(self) -> int:
        """The tokens of the cache, those that wait included."""
        return self.before + self.count

    def takes(self, forward: RoutedForward, kwargs: dict[str, Any]) -> bool:
        """Return whether a call is one more of these steps."""
        return (
            forward is self.forward
            and self.count < self.graphs.room
            and not self.graphs.refused
            and self.names == kwargs.keys()
            and all(_equal(kwargs[name], x) for name, x in self.plain.items())
            and torch.is_autocast_enabled("cuda") == self.autocast
            and all(_alike(kwargs.get(name), x) for name, x in self.inputs.items())
            and _is_inference(forward.model)
            and self._has_padding_of(kwargs)
        )

    def _has_padding_of(self, kwargs: dict[str, Any]) -> bool:
        """Return whether a call's mask hides the tokens that these steps hide, and no other."""
        mask, visible = kwargs.get("attention_mask"), self.waiting.visible
        if mask is None or visible is None:
            return visible is None and _padding(kwargs, self.before) is None
        return _fits(mask, self.seen) and torch.equal(
            mask.bool(), torch.nn.functional.pad(visible[:, 0], (0, self.count + 1), value=True)
        )

    def run(self, kwargs: dict[str, Any]) -> Any:
        """Run one step; if it fails, the tokens that wait stay as they were."""
        cache, ids = self.cache, kwargs["input_ids"]
        with cache.guard.step():
            if cache.steps is not self:
                raise CacheMisuse(
                    "another thread has read this cache before its step; give each thread its own "
                    "cache, or a copy.deepcopy of this one"
                )
            for name, x in self.inputs.items():
                given = kwargs.get(name)
                x.fill_(self.seen) if given is None else x.copy_(given)
            self.waiting.place.fill_(self.count)
            try:
                out = self._result()
            except BaseException:
                for layer in cache.compressed:
                    layer.roll_back()
                raise
            self.count += 1
        hashed = {"input_ids": ids}
        cache.token_hash = cache.token_hash.after(
            hashed, kwargs.get("position_ids"), self.seen - 1, 1
        )
        return out

    def finish(self) -> None:
        """Store the tokens that wait in their layers, and pack what is due."""
        with self.cache.undoable_step():
            for layer in self.cache.compressed:
                layer.store_waiting(self.waiting, self.count)
        self.cache.steps = None

    def _result(self) -> Any:
        """Return the result of a step that runs, or a copy of that of a replay."""
        graphs = self.graphs
        if not self.count:
            return self._step()
        if self.replay is None:
            try:
                with _LOCK:
                    self.replay, self.out = graphs.record(self._step)
            except Exception as error:
                for layer in self.cache.compressed:
                    layer.roll_back()
                kind = type(self.forward.model).__name__
                graphs.refuse(f"a step of {kind} cannot be recorded ({_first_line(error)})")
                return self._step()
        self.replay()
        out = _copied(self.out)
        return out if graphs.compared else self._compared(out)

    def _compared(self, out: Any) -> Any:
        """Return the result of a replay, or that of a step that runs if they differ.

        The replay of a model that computes from numbers on the host is right only for the step that
        was recorded, which shows how much rounding differs.
        """
        graphs, ran = self.graphs, self._step()
        difference = _difference(out, ran)
        if graphs.noise is None:
            graphs.noise = difference
        elif difference > 4 * graphs.noise + 1e-3:
            kind = type(self.forward.model).__name__
            graphs.refuse(
                f"a replayed step of {kind} differs by {difference:.1%} from one that ran"
            )
            return ran
        else:
            graphs.compared = True
        return out

    def _step(self) -> Any:
        """Run the model on the inputs; every operation is on the same tensors each time."""
        cache, configs = self.cache, self.forward.model._kvloom.configs
        kwargs = {**self.plain, **self.inputs, "past_key_values": cache, "attention_mask": None}
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


def _may_begin(forward: RoutedForward, cache: RoutedCache, kwargs: dict[str, Any]) -> bool:
    """Return whether a step of this call can be recorded, as far as it shows before it runs."""
    model, ids = forward.model, kwargs.get("input_ids")
    tensors = {name for name, x in kwargs.items() if isinstance(x, Tensor)} - {"attention_mask"}
    plain = {name for name, x in kwargs.items() if isinstance(x, _PLAIN)}
    others = kwargs.keys() - tensors - plain - {"attention_mask", "past_key_values"}
    position = kwargs.get("position_ids")
    return (
        isinstance(ids, Tensor)
        and ids.shape[1:] == (1,)
        and tensors <= {*_INPUTS}
        and not others
        and (position is None or (position.dim() == 2 and position.shape[1] == 1))
        and compat.takes(forward.module, "position_ids")
        and not (forward.refuses_caches or shard.running())
        and not compat.has_adapter(model)
        and not cache.learned_positions
        and not cache.stock_layers
        and all(
            layer.cache.may_wait and not (layer.shared or layer.needs_ids or layer.uses_input_norms)
            for layer in cache.compressed
        )
        and _is_inference(model)
        and _fits(kwargs.get("attention_mask"), cache.get_seq_length())
    )


def _is_inference(model: PreTrainedModel) -> bool:
    return not (model.training or torch.is_grad_enabled())


def _fits(mask: Any, seen: int) -> bool:
    """Return whether a padding mask is of `seen` tokens and a new one that it shows."""
    if mask is None:
        return True
    is_mask = isinstance(mask, Tensor) and mask.dim() == 2 and mask.shape[1] == seen + 1
    return is_mask and bool(mask[:, -1].all())


def _padding(kwargs: dict[str, Any], seen: int) -> Tensor | None:
    """Return the mask of the first `seen` tokens, bool [B, 1, seen]; None if it hides none."""
    mask = kwargs.get("attention_mask")
    return None if mask is None or bool(mask.all()) else mask[:, None, :seen].bool()


def _is_given(kwargs: dict[str, Any], name: str) -> bool:
    return isinstance(kwargs.get(name), Tensor)


def _equal(given: Any, x: Any) -> bool:
    return type(given) is type(x) and bool(given == x)


def _alike(given: Any, x: Tensor) -> bool:
    """Return whether an argument has the shape of an input of recorded steps; None: computed."""
    if given is None:
        return True
    same = isinstance(given, Tensor) and given.shape == x.shape
    return same and given.dtype == x.dtype and given.device == x.device


def _copied(x: Any) -> Any:
    """Return a result with copies of its tensors."""
    if isinstance(x, Tensor):
        return x.clone()
    if isinstance(x, dict):  # an output of transformers
        return type(x)(**{name: _copied(value) for name, value in x.items()})
    if isinstance(x, tuple):
        return tuple(map(_copied, x))
    return x


def _difference(x: Any, y: Any) -> float:
    """Return the distance of two results' first tensors, relative to the second."""
    a, b = (next(_tensors(result)).float() for result in (x, y))
    return float((a - b).norm() / b.norm().clamp(min=1e-9))


def _tensors(x: Any) -> Iterator[Tensor]:
    if isinstance(x, Tensor):
        yield x
    elif isinstance(x, dict):
        for value in x.values():
            yield from _tensors(value)
    elif isinstance(x, tuple):
        for value in x:
            yield from _tensors(value)


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".partition("\n")[0]
