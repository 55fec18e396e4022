"""`RoutedCache`: the layers of a model's cache, which step and change together or not at all.

Decides what a step is, what its failure undoes, and which calls it refuses. Knows no recipe.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import CacheLayerMixin

from ..cache.layer import LayerCache
from ..errors import CacheMisuse, KvloomError
from ..recall import Traffic
from ..recipe.layers import listed
from ..recipe.spec import Recipe
from . import compat, stock
from .guard import CallRef, Guard, ModelRef, outside_inference_mode, used_by_threads
from .hybrid import compressed_part, stock_part, with_compressed
from .masks import padding_mask
from .routed_layer import RoutedLayer, removed_tokens
from .token_hash import TokenHash


class WaitingSteps(Protocol):
    """Steps of a cache that its layers do not count yet, such as those of `kvloom.cuda_graphs`."""

    @property
    def tokens(self) -> int:
        """The tokens of the cache, those of these steps included."""

    def takes(self, forward: Any, kwargs: dict[str, Any]) -> bool:
        """Return whether a call is one more of these steps."""

    def run(self, kwargs: dict[str, Any]) -> Any:
        """Run one more step."""

    def store(self) -> None:
        """Store the tokens of these steps in the layers."""


class _Parts(NamedTuple):
    """The layers of a model, sorted: see the properties of `RoutedCache`."""

    layers: tuple[Any, ...]
    by_index: dict[int, RoutedLayer]
    compressed: list[RoutedLayer]
    full: list[RoutedLayer]
    stock: list[Any]

    @classmethod
    def of(cls, layers: Sequence[Any]) -> _Parts:
        """Sort layers by who stores what."""
        parts = enumerate(map(compressed_part, layers))
        by_index = {i: layer for i, layer in parts if layer is not None}
        compressed = list(by_index.values())
        full = [layer for layer in compressed if layer.window is None]
        stock_layers = [x for x in map(stock_part, layers) if x is not None]
        return cls(tuple(layers), by_index, compressed, full, stock_layers)


class RoutedCache(transformers.Cache):
    """A cache whose layers of full attention are kvloom's; `Cache` makes it from a recipe."""

    recipe: Recipe
    owner = ModelRef()
    read_prompt: Callable[..., Any] | None = None
    """Runs the first step instead, with a prompt store."""
    steps: WaitingSteps | None = None
    """The steps whose tokens wait: see `store_waiting`."""
    recorded_by: CallRef | None = None
    """The call of `generate()` that records each step. None: no such call does."""
    may_record = False
    """Whether `kvloom.cuda_graphs` may record steps; not of a class that joins caches."""

    def __init__(self, layers: list[Any], config_key: dict[str, Any]) -> None:
        self.guard = Guard()
        super().__init__(layers=layers)
        self.config_key = config_key  # of the model
        self.learned_positions = False  # the model adds learned position embeddings
        self.other_attention: tuple[str, Any] | None = None  # of the model, when it was made
        self.token_hash = TokenHash.empty()
        self.hidden: Tensor | None = None  # bool [B, N], tokens stored as padding
        self.moves_positions = False  # the model, which alone knows by how much

    def __bool__(self) -> bool:
        """Return True, for an empty cache too."""
        return True

    @outside_inference_mode
    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Copy the cache, in inference mode too: the copy's tensors can be changed later."""
        self._check_copied()
        new = memo[id(self)] = object.__new__(type(self))
        new.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return new

    def __getstate__(self) -> dict[str, Any]:
        """Return what a pickle holds."""
        self._check_copied()
        return self.__dict__

    def _check_copied(self) -> None:
        """Store the tokens that wait; raise `CacheMisuse` in a recorded step, which cannot."""
        self.store_waiting()
        if self.steps is not None:
            raise CacheMisuse("a cache cannot be copied in a recorded step; copy it after the step")

    @property
    def layers(self) -> tuple[Any, ...]:
        """The layers of the model, with all tokens: those that wait are stored first."""
        return self._parts.layers

    @layers.setter
    def layers(self, layers: Sequence[Any]) -> None:
        """Take the layers of the model, and sort them by who stores what."""
        self._sorted = _Parts.of(layers)

    @property
    def by_index(self) -> dict[int, RoutedLayer]:
        """`compressed`, by the index of the layer in the model."""
        return self._parts.by_index

    @property
    def compressed(self) -> list[RoutedLayer]:
        """The layers that kvloom compresses: `full_layers`, and packed windows."""
        return self._parts.compressed

    @property
    def accepted_tokens(self) -> int:
        """How many first tokens no crop will remove (`record`)."""
        return self.compressed[0].cache.accepted_tokens if self.compressed else 0

    @property
    def full_layers(self) -> list[RoutedLayer]:
        """The layers of full attention that kvloom compresses."""
        return self._parts.full

    @property
    def stock_layers(self) -> list[Any]:
        """The layers that are transformers' own, and the states beside compressed ones."""
        return self._parts.stock

    @property
    def _parts(self) -> _Parts:
        self.store_waiting()
        return self._sorted

    def store_waiting(self) -> None:
        """Store the tokens that wait in recorded steps, if any; within a step they wait on."""
        if self.steps is not None and not self.guard.running:
            with self.guard.step():
                self._store_waiting()

    def _store_waiting(self) -> None:
        """Store the tokens that wait, within the guard; after a failure, they still wait."""
        steps = self.steps
        if steps is not None:
            with self._undone_on_failure():
                steps.store()
                self.steps = None

    @property
    def is_compileable(self) -> bool:
        """Whether `generate` may compile a step, which it asks before each."""
        layers = self._sorted.layers
        return bool(layers) and all(layer.is_compileable for layer in layers)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the number of tokens seen, dropped ones and those that wait included."""
        if self.steps is not None:
            return self.steps.tokens
        return super().get_seq_length(layer_idx)

    @property
    def packs_windows(self) -> bool:
        """Whether layers with a sliding window are packed."""
        return any(layer.window is not None for layer in self.compressed)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, in every layer, spare room included."""
        hidden = 0 if self.hidden is None else self.hidden.nbytes
        return self._stock_nbytes + sum(x.cache.nbytes for x in self.compressed) + hidden

    @property
    def full_nbytes(self) -> int:
        """Bytes of an exact cache of the same tokens, in every layer, without spare room."""
        return self._stock_nbytes + sum(_full_nbytes(layer.cache) for layer in self.compressed)

    @property
    def _stock_nbytes(self) -> int:
        """Bytes of the layers that transformers holds, which a recipe does not change."""
        return sum(map(stock.nbytes, self.stock_layers))

    @property
    def state_nbytes(self) -> int:
        """Bytes of the states that layers carry from token to token; a part of `nbytes`."""
        return sum(map(stock.state_nbytes, self.stock_layers))

    @property
    def tokens_read(self) -> float:
        """Tokens that a head read in the last step: the mean of `full_layers`."""
        read = [layer.cache.tokens_read for layer in self.full_layers]
        return sum(read) / len(read) if read else 0.0

    @property
    def traffic(self) -> Traffic:
        """Tokens found on the device and not, and bytes copied, by all layers with a tier."""
        traffics = [layer.cache.traffic for layer in self.full_layers]
        return Traffic(*(sum(x) for x in zip(*traffics, strict=True)))

    @property
    def bits_per_value(self) -> float:
        """Bits per key or value seen, metadata and exact windows included."""
        nbytes = sum(layer.cache.nbytes for layer in self.compressed)
        values = sum(_values(layer.cache) for layer in self.compressed)
        return 8 * nbytes / values if values else 0.0

    @contextmanager
    def step(self) -> Iterator[None]:
        """Run one step of the model: after any failure in it, all layers are as before.

        Raises `CacheMisuse` while another step runs, and if attention did not reach kvloom.
        """
        with self.guard.step():
            self._store_waiting()
            self._end_recording()
            with self._undone_on_failure():
                yield

    def record(self, call: CallRef | None, accepted_tokens: int) -> None:
        """Record each step of a call, so that `crop` can remove its tokens; None: record no more.

        accepted_tokens: the first tokens, those of the next step included, that stay.
        """
        self.recorded_by = call
        for layer in self.compressed:
            layer.cache.recording = call is not None
            layer.cache.accepted_tokens = accepted_tokens
        for layer in self.stock_layers if call is None else ():
            stock.end_recording(layer)

    def _end_recording(self) -> None:
        """Record no more once the call that recorded has ended: its last crop is done."""
        if self.recorded_by is not None and not self.recorded_by.running:
            self.record(None, 0)

    def activate_past_recording(self) -> None:
        """Record each later step, so that `crop` can remove its tokens."""
        self._end_recording()
        for layer in self.layers:
            if hasattr(layer, "activate_past_recording"):  # layers of older versions lack it
                layer.activate_past_recording()

    @contextmanager
    def _undone_on_failure(self) -> Iterator[None]:
        """Run a step within the guard; after a failure, layers and waiting tokens are as before."""
        for layer in self.compressed:
            layer.cache.forget_undo()
        restore_stock, steps = stock.remember(self.stock_layers), self.steps
        try:
            yield
            if unreached := self.unreached():
                raise unreached
            self.finish_shared()
        except BaseException as error:
            unreached = None if _says_all(error) else self.unreached()
            self.guard.unusable = "a step failed, and undoing it failed too"
            for layer in self.compressed:
                layer.roll_back()
            restore_stock()
            self.steps = steps
            self.guard.unusable = ""
            if unreached is None or isinstance(error, KvloomError):
                raise
            raise unreached from error
        for layer in self.compressed:
            layer.cache.forget_undo()

    @outside_inference_mode
    def finish_shared(self) -> None:
        """Store the step's tokens in layers that others share, once all have attended to them."""
        for layer in self.full_layers:
            if layer.shared:
                layer.cache.finish()

    def replace(self, layer_index: int, layer: Any) -> None:
        """Replace a layer of the model; a `RoutedLayer` leaves the states beside the former one."""
        layers = list(self.layers)
        is_part = isinstance(layer, RoutedLayer)
        layers[layer_index] = with_compressed(layers[layer_index], layer) if is_part else layer
        self.layers = layers

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Pass a layer its present keys and values [B, Hk, T, D]; models call this.

        Raises `CacheMisuse` if the calling model is not routed through kvloom.
        """
        self._check_within_step()
        layer: CacheLayerMixin = self._sorted.layers[layer_idx]  # in a step, no token is stored
        return layer.update(key_states, value_states, *args, **kwargs)

    def update_conv_state(self, *args: Any, **kwargs: Any) -> Tensor:
        """Pass a layer of linear attention its state, with the checks of `update`."""
        self._check_within_step()
        return super().update_conv_state(*args, **kwargs)

    def update_recurrent_state(self, *args: Any, **kwargs: Any) -> Tensor:
        """Pass a layer of linear attention its state, with the checks of `update`."""
        self._check_within_step()
        return super().update_recurrent_state(*args, **kwargs)

    def get_linear_cache(self, layer_idx: int) -> Tensor | None:
        """Return the state of a layer of MiniMax, as its own class of caches does."""
        return stock.recurrent_state(self.layers[layer_idx])

    def set_linear_cache(self, layer_idx: int, linear_cache: Tensor) -> None:
        """Set the state of a layer of MiniMax, with the checks of `update`."""
        self._check_within_step()
        stock.set_recurrent_state(self.layers[layer_idx], linear_cache)

    def _check_within_step(self) -> None:
        """Raise `CacheMisuse` outside a step: a model that kvloom does not route calls."""
        if not self.guard.running and self.compressed:
            raise CacheMisuse(
                "this model's attention is not routed through kvloom, so it would not see the "
                "cache: after kvloom.detach, or with another copy of the model, call "
                "kvloom.attach(model, recipe) again, or make the cache with kvloom.Cache(model)"
            )

    def unreached(self) -> CacheMisuse | None:
        """Return the error of a step whose attention did not reach some layers, else None."""
        missed = tuple([i for i, layer in self.by_index.items() if layer.awaits_attention])
        if not missed:
            return None
        return CacheMisuse(
            f"the attention of layers {listed(missed)} did not reach kvloom, so this step's answer "
            "would be wrong: it bypasses transformers' attention interface, or other code has "
            "replaced it; in that case, call kvloom.detach and kvloom.attach again"
        )

    def check_model(self, model: PreTrainedModel) -> None:
        """Raise `CacheMisuse` for a model with another config than that of this cache."""
        if self.owner.get() is model:
            return  # reading a config takes longer than the attention of a short context
        own, other = self.config_key, compat.config_key(model)
        different = [name for name in {**own, **other} if own.get(name) != other.get(name)]
        if different:
            raise CacheMisuse(
                f"this cache was made for another model, whose {' and '.join(different[:3])} "
                f"differ{'' if len(different) > 1 else 's'}; make a new cache"
            )

    def check_batch(self, rows: int) -> None:
        """Raise `CacheMisuse` for another batch size, before transformers' layers change."""
        like = next((x.cache.like for x in self.compressed), None)
        if like is not None and like.shape[0] != rows:
            self.guard.check()
            raise CacheMisuse(
                f"this cache holds batch size {like.shape[0]} and was given {rows}; make a new "
                "cache, or repeat its rows with batch_repeat_interleave"
            )

    def check_mask(self, mask: Tensor | None) -> None:
        """Raise `CacheMisuse` for a padding mask [B, N] that shows a token stored as padding."""
        if self.hidden is None or not self.compressed:
            return
        shown = None if mask is None else padding_mask(mask, self.hidden.shape[1])
        if shown is None or bool((shown.to(self.hidden.device) & self.hidden).any()):
            raise CacheMisuse(
                "tokens that were padding when the cache stored them are not hidden now, and it "
                "does not have their keys and values; give attention_mask for all tokens"
            )

    def hidden_after(self, mask: Tensor | None, seen: int, tokens: int) -> Tensor | None:
        """Return what `hidden` is after a step that stored `tokens` tokens after `seen`."""
        new = None if mask is None else ~padding_mask(mask[:, seen:], tokens)
        if new is None or not bool(new.any()):
            return self.hidden
        end = int(new.any(dim=0).nonzero().max()) + 1
        old = new[:, :0] if self.hidden is None else self.hidden.to(new.device)
        return torch.cat([F.pad(old, (0, seen - old.shape[1])), new[:, :end]], dim=1)

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the newest -tokens_to_remove tokens from every layer, or from none.

        Raises:
            CacheMisuse: A layer cannot remove them, or it is no whole number.
            RecipeError: Too few tokens of a first prompt would stay for its budgets.
        """
        tokens_to_remove = _whole(tokens_to_remove)
        seen = self.get_seq_length()
        tokens = removed_tokens(tokens_to_remove, seen)
        for layer in self.compressed:
            layer.cache.check_crop(tokens)
        for layer in self.stock_layers:
            stock.check_crop(layer, tokens, seen)
        stock_layers = self.stock_layers if tokens else ()
        self._change("crop", tokens_to_remove, lambda x: x[:, : seen - tokens], stock_layers)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Reorder the batch: row i becomes row beam_idx[i], int64 [B].

        Beam search does so after each step, so later steps are not recorded.
        """
        self.may_record = False
        self._change("reorder_cache", beam_idx, lambda x: x[beam_idx.to(x.device)])

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row `repeats` times."""
        self._change(
            "batch_repeat_interleave", repeats, lambda x: x.repeat_interleave(repeats, dim=0)
        )

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep only the rows `indices`, an int64 or bool tensor.

        Raises:
            CacheMisuse: It is no tensor.
        """
        if not isinstance(indices, Tensor):
            raise CacheMisuse(
                f"batch_select_indices takes a tensor, got a {type(indices).__name__}; give the "
                "numbers of the rows as a tensor"
            )
        self._change("batch_select_indices", indices, lambda x: x[indices.to(x.device)])

    def reset(self) -> None:
        """Remove all tokens; a cache that a failure made unusable can be used again."""
        with self.guard.change("reset", mends=True):
            self.steps, self.may_record = None, type(self).may_record
            self.token_hash, self.hidden = TokenHash.empty(), None
            self.moves_positions = False
            for layer in self.stock_layers:
                stock.reset(layer)
            for compressed in self.compressed:
                compressed.reset()

    def _change(
        self,
        method: str,
        argument: Any,
        of_hidden: Callable[[Tensor], Tensor],
        stock_layers: Sequence[Any] | None = None,
    ) -> None:
        """Call a method of every layer, of transformers' own first: these can be restored.

        of_hidden: the same change of `hidden`. stock_layers: those of transformers' layers that
        change; None: all.
        """
        stock_layers = self.stock_layers if stock_layers is None else stock_layers
        restore_stock = stock.remember(stock_layers)
        with self.guard.change(method):
            if self.steps is not None:
                self.guard.unusable = ""
                raise used_by_threads("another thread has run a step of this cache meanwhile")
            try:
                for layer in stock_layers:
                    stock.change(layer, method, argument)
            except Exception as error:
                restore_stock()
                self.guard.unusable = ""
                raise CacheMisuse(
                    f"{method}: a {type(layer).__name__} of transformers cannot do it "
                    f"({type(error).__name__}: {error}); use transformers' own cache"
                ) from error
            for layer in self.compressed:
                getattr(layer, method)(argument)
            if self.hidden is not None:
                self.hidden = of_hidden(self.hidden)


def _whole(tokens: Any) -> int:
    """Return the argument of `crop` as int, whatever integer it is."""
    try:
        if isinstance(tokens, bool):
            raise TypeError
        return operator.index(tokens)
    except TypeError:
        raise CacheMisuse(
            f"crop takes a whole number, got {tokens!r}; give minus the number of tokens to remove"
        ) from None


def _says_all(error: BaseException) -> bool:
    """Return whether an error has nothing to do with attention that did not reach kvloom.

    Attention to the present tokens alone is of another size than the model expects.
    """
    sizes = isinstance(error, (KvloomError, RuntimeError, IndexError, AssertionError))
    memory = isinstance(error, torch.OutOfMemoryError) or "tried to allocate" in str(error)
    return memory or not sizes


def _values(cache: LayerCache) -> int:
    """Return the count of numbers in all keys and values that a layer has seen."""
    tokens = cache.seen if cache.window is None else min(cache.seen, cache.window - 1)
    return cache.token_numbers * tokens


def _full_nbytes(cache: LayerCache) -> int:
    like = cache.like
    return 0 if like is None else _values(cache) * like.element_size()
