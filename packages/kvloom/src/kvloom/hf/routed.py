"""kvloom's caches as transformers sees them: one `RoutedLayer` per compressed layer.

Decides how the calls of transformers map onto `LayerCache`; computes nothing.
"""

from __future__ import annotations

import copy
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property, partial, wraps
from typing import Any, TypeVar

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import (
    CacheLayerMixin,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
)

from ..cache.layer import LayerCache
from ..cache.step import StepInputs
from ..errors import CacheMisuse, KvloomError
from ..recall import Traffic
from ..recipe.layers import listed
from ..recipe.spec import Recipe
from . import compat, stock
from .guard import Guard, ModelRef

_F = TypeVar("_F", bound=Callable[..., Any])


def outside_inference_mode(method: _F) -> _F:
    """Run a method outside inference mode, so that its tensors can be changed later."""

    @wraps(method)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_inference_mode_enabled():
            return method(*args, **kwargs)
        with torch.inference_mode(False):
            return method(*args, **kwargs)

    return wrapper  # type: ignore[return-value]


_expanding = threading.local()
"""layer: a weak reference to the one whose latents the model of this thread is expanding.

Other layers mark their key, as layers that share keys attend without an `update` of their own. The
mark on a latent would be lost where the model expands it.
"""


def expanding_layer(module: torch.nn.Module) -> RoutedLayer | None:
    """Return the layer whose latents a module has expanded; None if it attends to none."""
    reference = getattr(_expanding, "layer", None)
    layer: RoutedLayer | None = None if reference is None else reference()
    waits = layer is not None and layer.latents is not None and hasattr(module, "expand_kv")
    return layer if waits else None


class RoutedLayer(CacheLayerMixin):
    """A compressed layer: marks the key that `update` returns, so that attention finds it."""

    is_compileable = False
    is_croppable = True
    supports_early_init = False

    def __init__(
        self, cache: LayerCache, kv_heads: int | None = None, shared: bool = False
    ) -> None:
        super().__init__()
        self.cache = cache
        self.window = cache.window
        self.is_sliding = cache.window is not None
        self.shared = shared  # later layers attend to these keys and values, too
        self.kv_heads = kv_heads  # key/value heads of this process, where it is one of several
        self.awaits_attention = False  # between `update` and the attention that must follow it
        self.repeated: tuple[int, int] | None = None  # tokens that a call repeats: see `repetition`
        self.ids: Tensor | None = None  # of the running call: see `needs_ids`
        self.norms: Tensor | None = None  # of this call: see `uses_input_norms`
        self.latents: tuple[Tensor, Tensor] | None = None
        """The step's positional parts and latents, until attention comes."""

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing: the first attention step sets the shapes of the cache."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Return the present keys and values; the past joins them inside attention."""
        if self.awaits_attention:
            raise CacheMisuse(
                f"{self.cache.name}: attention did not reach kvloom after the last update; call "
                "kvloom.detach and kvloom.attach again"
            )
        if self.kv_heads not in (None, key_states.shape[1]):
            raise CacheMisuse(
                f"{self.cache.name}: the model gives {key_states.shape[1]} key/value heads and "
                f"this process should have {self.kv_heads}: the model was divided in another way "
                'than by transformers; load it with tp_plan="auto"'
            )
        self.awaits_attention = True
        if self.cache.latent:
            self.latents = value_states, key_states
            _expanding.layer = weakref.ref(self)
            return key_states, value_states
        key = _alias(key_states)  # the model's own tensor gets no attribute
        key._kvloom_layer = self  # type: ignore[attr-defined]
        return key, value_states

    @property
    def reads_queries(self) -> bool:
        """Whether the layer needs a first prompt's queries although the model attends to it."""
        recipe = self.cache.recipe
        return recipe.reads_queries or self.cache.recording or bool(recipe.compress_after)

    @outside_inference_mode
    def behind_window(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values of the past of a window, and k, v [B, Hk, T, D] after them."""
        past_k, past_v = self.cache.past_window()
        return torch.cat([past_k, k], dim=2), torch.cat([past_v, v], dim=2)

    @property
    def needs_ids(self) -> bool:
        """Whether the next step needs token ids."""
        return self.cache.needs_ids

    @property
    def uses_input_norms(self) -> bool:
        """Whether the next step needs the norms of the layer's input."""
        return self.cache.uses_input_norms

    def check_axes(self) -> None:
        """Raise `CacheMisuse` if positions on several axes, as in an image, do not fit the recipe.

        A score that `rotates_queries` moves them by equal distances on all axes.
        """
        keep = self.cache.recipe.keep
        if keep is None:
            return
        by_order = keep.scorer.needs_rope and not keep.scorer.rotates_queries
        if by_order or keep.positions != "original":
            raise CacheMisuse(
                f"{self.cache.name}: the recipe derives positions from the order of tokens, and "
                "those of this image have positions on several axes; use positions=original and "
                "another score, such as snapkv"
            )

    def arrived(self) -> bool:
        """Note that attention came; return whether it came before, from another layer.

        Raises `CacheMisuse` if no layer shares these keys and values.
        """
        again, self.awaits_attention = not self.awaits_attention, False
        self.latents = None
        if again and not self.shared:
            raise CacheMisuse(
                f"{self.cache.name}: attention came twice for one update (differential attention, "
                "or layers that share keys and values), which kvloom does not compute here; use "
                "transformers' own cache"
            )
        return again

    def attend(self, step: StepInputs) -> Tensor:
        """Attend as `LayerCache.run` does, once after each `update`; masks may be on any device."""
        is_repeated = self.arrived()
        if step.queries.visible is not None or step.queries.later_seen is not None:
            step = on_one_device(step)
        run: Callable[[StepInputs], Tensor] = self.cache.run
        if self.repeated is not None:
            run = partial(self.cache.repeat, repeated=None if is_repeated else self.repeated)
        elif is_repeated:
            run = self.cache.read
        elif self.shared:
            run = partial(self.cache.run, leave_open=True)
        if self.ids is not None or self.norms is not None:
            step = self.with_ids_and_norms(step)
        if torch.is_inference_mode_enabled():
            run = outside_inference_mode(run)
        return run(step)

    def with_ids_and_norms(self, step: StepInputs) -> StepInputs:
        """Return a step with the token ids and the norms of this call, where the layer has them."""
        queries, device = step.queries, step.k.device
        if self.ids is not None and self.repeated is None:
            if self.ids.shape[1] != step.tokens:
                raise CacheMisuse(
                    f"{self.cache.name}: the call gives {self.ids.shape[1]} token ids and the "
                    f"decoder reads {step.tokens} tokens; leave out the rule that reads token ids"
                )
            queries = queries._replace(ids=self.ids.to(device))
        if self.norms is not None:
            queries, self.norms = queries._replace(norms=self.norms.to(device)), None
        return step._replace(queries=queries)

    def get_mask_sizes(self, query_length: Any) -> tuple[int, int]:
        """Return (tokens seen + query tokens, 0): masks are by logical index, not by slot.

        Those of a window begin with the first token that the next one sees, as in transformers.
        """
        n = query_length if isinstance(query_length, int) else len(query_length)
        first = 0 if self.window is None else max(0, self.cache.seen - (self.window - 1))
        return self.cache.seen - first + n, first

    def get_seq_length(self, *args: Any) -> int:
        """Return the number of tokens seen, dropped ones included."""
        return self.cache.seen

    def get_max_length(self) -> int:
        """Return -1: there is no limit."""
        return -1

    get_max_cache_shape = get_max_length  # its name before transformers 5.17

    def activate_past_recording(self) -> None:
        """Record each step, so that `crop` can remove its tokens."""
        self.cache.recording = True

    @outside_inference_mode
    def crop(self, tokens: int) -> None:
        """Remove -tokens tokens (0: none), then drop and pack what waited."""
        self.cache.crop(_removed(tokens, self.cache.seen))

    def reset(self) -> None:
        """Remove all tokens."""
        self.cache.reset()
        self.awaits_attention, self.latents = False, None

    def roll_back(self) -> None:
        """Undo the running step."""
        self.cache.roll_back()
        self.awaits_attention, self.latents = False, None

    @outside_inference_mode
    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Reorder the batch: row i becomes row beam_idx[i], int64 [B]."""
        self.cache.map(lambda x: x.index_select(0, beam_idx.to(x.device)))

    @outside_inference_mode
    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row `repeats` times."""
        self.cache.map(lambda x: x.repeat_interleave(repeats, dim=0))

    @outside_inference_mode
    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep only the rows `indices`."""
        self.cache.map(lambda x: x[indices.to(x.device)])

    def offload(self) -> None:
        """Raise `CacheMisuse`: the recipe decides on tiers."""
        raise CacheMisuse("transformers cannot offload a kvloom cache; use a recipe with tier=host")

    prefetch = offload


class HybridLayer(CacheLayerMixin, LinearAttentionCacheLayerMixin):
    """A compressed layer and the states that its model has beside attention, as one layer.

    `states` is the layer of transformers that would store both; its keys and values stay empty.
    The cache reorders, crops, resets and restores the two parts.
    """

    is_sliding = False
    is_compileable = False
    supports_early_init = False

    def __init__(self, compressed: RoutedLayer, states: LinearAttentionLayer) -> None:
        self.compressed, self.states = compressed, states

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the states: models read some."""
        if name == "states":  # of a copy that has no attributes yet
            raise AttributeError(name)
        return getattr(self.states, name)

    @property
    def is_croppable(self) -> bool:
        """Whether `crop` can remove tokens from the states."""
        return stock.is_croppable(self.states)

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: each part does it."""

    def update(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Return the present keys and values."""
        return self.compressed.update(*args, **kwargs)

    def update_conv_state(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the updated states of a convolution."""
        return self.states.update_conv_state(*args, **kwargs)

    def update_recurrent_state(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the updated recurrent states."""
        return self.states.update_recurrent_state(*args, **kwargs)

    def get_mask_sizes(self, query_length: Any) -> tuple[int, int]:
        """Return (tokens seen + query tokens, 0)."""
        return self.compressed.get_mask_sizes(query_length)

    def get_seq_length(self, *args: Any) -> int:
        """Return the number of tokens seen."""
        return self.compressed.get_seq_length()

    def get_max_length(self) -> int:
        """Return -1: there is no limit."""
        return -1

    get_max_cache_shape = get_max_length

    def activate_past_recording(self) -> None:
        """Record each step, so that `crop` can remove its tokens."""
        self.compressed.activate_past_recording()
        self.states.activate_past_recording()


def compressed_part(layer: Any) -> RoutedLayer | None:
    """Return what kvloom stores of a layer; None if transformers stores all of it."""
    part = layer.compressed if isinstance(layer, HybridLayer) else layer
    return part if isinstance(part, RoutedLayer) else None


def stock_part(layer: Any) -> Any:
    """Return what transformers stores of a layer; None if kvloom stores all of it."""
    if isinstance(layer, HybridLayer):
        return layer.states
    return None if isinstance(layer, RoutedLayer) else layer


def with_compressed(layer: Any, compressed: RoutedLayer) -> Any:
    """Return a compressed layer with the states of `layer`, if that has some."""
    states = stock_part(layer)
    return HybridLayer(compressed, states) if stock.has_states(states) else compressed


class RoutedCache(transformers.Cache):
    """A cache whose layers of full attention are kvloom's; `Cache` makes it from a recipe."""

    recipe: Recipe
    owner = ModelRef()
    read_prompt: Callable[..., Any] | None = None
    """Runs the first step instead, with a prompt store."""

    def __init__(self, layers: list[Any], fingerprint: tuple) -> None:
        super().__init__(layers=layers)
        self.layers = tuple(layers)  # `replace` changes them
        self.guard = Guard()
        self.fingerprint = fingerprint  # of the model's config
        self.learned_positions = False  # the model adds learned position embeddings

    def __bool__(self) -> bool:
        """Return True, for an empty cache too."""
        return True

    @outside_inference_mode
    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Copy the cache, in inference mode too: the copy's tensors can be changed later."""
        new = memo[id(self)] = object.__new__(type(self))
        new.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return new

    @cached_property
    def compressed(self) -> list[RoutedLayer]:
        """The layers that kvloom compresses: `full_layers`, and packed windows."""
        parts = map(compressed_part, self.layers)
        return [layer for layer in parts if layer is not None]

    @cached_property
    def full_layers(self) -> list[RoutedLayer]:
        """The layers of full attention that kvloom compresses."""
        return [layer for layer in self.compressed if layer.window is None]

    @cached_property
    def stock_layers(self) -> list[Any]:
        """The layers that are transformers' own, and the states beside compressed ones."""
        parts = map(stock_part, self.layers)
        return [layer for layer in parts if layer is not None]

    @property
    def packs_windows(self) -> bool:
        """Whether layers with a sliding window are packed."""
        return any(layer.window is not None for layer in self.compressed)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, in every layer, spare room included."""
        return self._stock_nbytes + sum(layer.cache.nbytes for layer in self.compressed)

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
        """Tokens that the last step read in a layer: the mean of `full_layers`."""
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
            for layer in self.compressed:
                layer.cache.forget_undo()
            restore_stock = stock.remember(self.stock_layers)
            try:
                yield
                if unreached := self._unreached():
                    raise unreached
                self.finish_shared()
            except BaseException as error:
                unreached = None if _says_all(error) else self._unreached()
                self.guard.unusable = "a step failed, and undoing it failed too"
                for layer in self.compressed:
                    layer.roll_back()
                restore_stock()
                self.guard.unusable = ""
                if unreached is None or isinstance(error, KvloomError):
                    raise
                raise unreached from error
            for layer in self.compressed:
                layer.cache.forget_undo()

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
        self.layers = tuple(layers)
        for name in ("compressed", "full_layers", "stock_layers"):
            self.__dict__.pop(name, None)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Pass a layer its present keys and values [B, Hk, T, D]; models call this.

        Raises `CacheMisuse` if the calling model is not routed through kvloom.
        """
        self._check_within_step()
        keys_and_values: tuple[Tensor, Tensor] = self.layers[layer_idx].update(
            key_states, value_states, *args, **kwargs
        )
        return keys_and_values

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

    def _unreached(self) -> CacheMisuse | None:
        """Return the error of a step whose attention did not reach some layers, else None."""
        parts = enumerate(map(compressed_part, self.layers))
        missed = tuple(i for i, layer in parts if layer is not None and layer.awaits_attention)
        if not missed:
            return None
        return CacheMisuse(
            f"the attention of layers {listed(missed)} did not reach kvloom, so this step's answer "
            "would be wrong: it bypasses transformers' attention interface, or other code has "
            "replaced it; in that case, call kvloom.detach and kvloom.attach again"
        )

    def check_model(self, model: PreTrainedModel) -> None:
        """Raise `CacheMisuse` for a model with another config than that of this cache."""
        if self.owner.is_model(model):
            return  # reading a config takes longer than the attention of a short context
        other = compat.fingerprint(model)
        if other != self.fingerprint:
            raise CacheMisuse(
                f"this cache was made for another model ({self.fingerprint[0]}); make a new one "
                f"for {other[0]}"
            )

    def check_batch(self, rows: int) -> None:
        """Raise `CacheMisuse` for another batch size, before transformers' layers change."""
        like = next((x.cache.like for x in self.compressed), None)
        if like is not None and like.shape[0] != rows:
            raise CacheMisuse(
                f"this cache holds batch size {like.shape[0]} and was given {rows}; make a new "
                "cache, or repeat its rows with batch_repeat_interleave"
            )

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the newest -tokens_to_remove tokens from every layer, or from none.

        Raises:
            CacheMisuse: A layer cannot remove them.
        """
        seen = self.get_seq_length()
        tokens = _removed(tokens_to_remove, seen)
        for layer in self.compressed:
            layer.cache.check_crop(tokens)
        for layer in self.stock_layers:
            stock.check_crop(layer, tokens, seen)
        self._change("crop", tokens_to_remove)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Reorder the batch: row i becomes row beam_idx[i], int64 [B]."""
        self._change("reorder_cache", beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row `repeats` times."""
        self._change("batch_repeat_interleave", repeats)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep only the rows `indices`."""
        self._change("batch_select_indices", indices)

    def reset(self) -> None:
        """Remove all tokens; a cache that a failure made unusable can be used again."""
        self.guard.unusable = ""
        with self.guard.change("reset"):
            for layer in self.stock_layers:
                stock.reset(layer)
            for compressed in self.compressed:
                compressed.reset()

    def _change(self, method: str, argument: Any) -> None:
        """Call a method of every layer, of transformers' own first: these can be restored."""
        restore_stock = stock.remember(self.stock_layers)
        with self.guard.change(method):
            try:
                for layer in self.stock_layers:
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


def _says_all(error: BaseException) -> bool:
    """Return whether an error has nothing to do with attention that did not reach kvloom."""
    memory = isinstance(error, (MemoryError, torch.OutOfMemoryError))
    return memory or not isinstance(error, Exception) or "tried to allocate" in str(error)


def on_one_device(step: StepInputs) -> StepInputs:
    """Return a step whose masks are on the device of its queries."""
    q, visible, later_seen = step.queries.q, step.queries.visible, step.queries.later_seen
    if all(x is None or x.device == q.device for x in (visible, later_seen)):
        return step
    visible, later_seen = (None if x is None else x.to(q.device) for x in (visible, later_seen))
    return step._replace(queries=step.queries._replace(visible=visible, later_seen=later_seen))


def _removed(tokens: int, seen: int) -> int:
    """Return how many tokens `crop` removes; before 5.17 a positive number is what stays."""
    return -tokens if tokens <= 0 else max(0, seen - tokens)


def _alias(x: Tensor) -> Tensor:
    """Return another tensor with the same storage, and the same gradient if it has one."""
    return x.view(x.shape) if x.requires_grad else x.detach()  # detach takes a sixth of the time


def _values(cache: LayerCache) -> int:
    """Return the count of numbers in all keys and values that a layer has seen."""
    tokens = cache.seen if cache.window is None else min(cache.seen, cache.window)
    return cache.token_numbers * tokens


def _full_nbytes(cache: LayerCache) -> int:
    like = cache.like
    return 0 if like is None else _values(cache) * like.element_size()
