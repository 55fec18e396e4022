"""`RoutedLayer`: a layer that kvloom compresses, as transformers sees it.

Maps the calls of transformers onto one `LayerCache`. Knows no other layer, and computes nothing.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from ..cache.layer import LayerCache
from ..cache.step import StepInputs
from ..cache.waiting import WaitingTokens
from ..errors import CacheMisuse
from ..keep.query_predictor import QueryPredictor
from . import latents
from .guard import outside_inference_mode


class RoutedLayer(CacheLayerMixin):
    """A compressed layer: marks the key that `update` returns, so that attention finds it.

    While a call runs, these fields carry what transformers does not pass to attention. `reset` and
    `roll_back` clear what an unfinished step has left in the first three and in `predictor`.

    Attributes:
        awaits_attention: Whether attention must follow. `update` sets it, `arrived` clears it.
        latents: The step's positional parts and latents. `update` sets them, and makes this the
            layer that `latents.expanding` names for its thread; `arrived` clears them.
        norms: The norms of this call's input, fp32 [B, T], where the layer `uses_input_norms`.
            `forward.input_norms` sets them, `with_inputs_of_call` takes them.
        ids: The token ids of this call, int64 [B, T], where the layer `needs_ids`.
            `forward.token_ids` sets and clears them.
        predictor: What the layer has learned from the examples of a first prompt. `examples.learn`
            sets it, `with_inputs_of_call` takes it.
        repeated: The tokens of the prompt, first and end, that this call repeats.
            `Repetition.score` sets and clears them.
        waiting: The tokens that wait, this call's among them. `RecordedSteps` sets and clears it.

    `gradients_from` is the first stored token that gradients should reach, and do not; inf: none.
    """

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
        self.awaits_attention = False
        self.latents: tuple[Tensor, Tensor] | None = None
        self.norms: Tensor | None = None
        self.ids: Tensor | None = None
        self.predictor: QueryPredictor | None = None
        self.repeated: tuple[int, int] | None = None
        self.waiting: WaitingTokens | None = None
        self.gradients_from = math.inf

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
            latents.expanding.layer = weakref.ref(self)
            return key_states, value_states
        # an alias, as the model's own tensor gets no attribute; `detach` takes a sixth of the time
        shape, has_gradient = key_states.shape, key_states.requires_grad
        key = key_states.view(shape) if has_gradient else key_states.detach()
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
        if by_order or keep.renumbers:
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
        by_sharer = self.arrived()
        if step.queries.visible is not None or step.queries.later_seen is not None:
            step = on_one_device(step)
        run: Callable[[StepInputs], Tensor] = self.cache.run
        if self.repeated is not None:
            run = partial(self.cache.repeat, repeated=None if by_sharer else self.repeated)
        elif by_sharer:
            run = self.cache.read
        elif self.shared:
            run = partial(self.cache.run, leave_open=True)
        elif self.waiting is not None:
            run = partial(self.cache.attend_waiting, waiting=self.waiting)
        if self.ids is not None or self.norms is not None or self.predictor is not None:
            step = self.with_inputs_of_call(step)
        if torch.is_inference_mode_enabled():
            run = outside_inference_mode(run)
        seen = self.cache.seen
        out = run(step)
        self.note_gradients(out, step, seen)
        return out

    @outside_inference_mode
    def commit_waiting(self, waiting: WaitingTokens, tokens: int) -> None:
        """Store the first `tokens` tokens that wait: see `LayerCache.commit_waiting`."""
        self.cache.commit_waiting(waiting, tokens)

    def note_gradients(self, out: Tensor, step: StepInputs, seen: int) -> None:
        """Refuse gradients of `out` that stored tokens lack; note those that new ones will lack.

        seen: tokens before the step.
        """
        if self.gradients_from >= seen:  # these tokens were removed
            self.gradients_from = math.inf
        elif out.requires_grad:
            out.register_hook(_refuse_gradient)
        if step.k.requires_grad or step.v.requires_grad:
            self.gradients_from = min(self.gradients_from, seen)

    def with_inputs_of_call(self, step: StepInputs) -> StepInputs:
        """Return a step with the token ids, the norms and the predictor of this call, if any."""
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
        if self.predictor is not None:
            queries, self.predictor = queries._replace(predictor=self.predictor), None
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
        self.cache.crop(removed_tokens(tokens, self.cache.seen))

    def reset(self) -> None:
        """Remove all tokens."""
        self.cache.reset()
        self._clear_step()

    def roll_back(self) -> None:
        """Undo the running step."""
        self.cache.roll_back()
        self._clear_step()

    def _clear_step(self) -> None:
        self.awaits_attention, self.latents, self.norms, self.predictor = False, None, None, None

    @outside_inference_mode
    def map_rows(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Apply fn to every tensor, along the batch dimension."""
        self.cache.map(fn)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Reorder the batch: row i becomes row beam_idx[i], int64 [B]."""
        self.map_rows(lambda x: x.index_select(0, beam_idx.to(x.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row `repeats` times."""
        self.map_rows(lambda x: x.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep only the rows `indices`."""
        self.map_rows(lambda x: x[indices.to(x.device)])

    def offload(self) -> None:
        """Raise `CacheMisuse`: the recipe decides on tiers."""
        raise CacheMisuse("transformers cannot offload a kvloom cache; use a recipe with tier=host")

    prefetch = offload


def on_one_device(step: StepInputs) -> StepInputs:
    """Return a step whose masks are on the device of its queries."""
    q, visible, later_seen = step.queries.q, step.queries.visible, step.queries.later_seen
    if all(x is None or x.device == q.device for x in (visible, later_seen)):
        return step
    visible, later_seen = (None if x is None else x.to(q.device) for x in (visible, later_seen))
    return step._replace(queries=step.queries._replace(visible=visible, later_seen=later_seen))


def removed_tokens(tokens: int, seen: int) -> int:
    """Return how many tokens `crop` removes; before 5.17 a positive number is what stays."""
    return -tokens if tokens <= 0 else max(0, seen - tokens)


def _refuse_gradient(gradient: Tensor) -> None:
    """Refuse `backward` through a step after tokens that were stored without their graph."""
    raise CacheMisuse(
        "a kvloom cache stores tokens without gradients, so those of earlier calls would lack "
        "theirs; give the whole text in one call, or read earlier tokens in torch.no_grad()"
    )
