"""The cache of one attention layer: append → attend → commit (score → evict → pack → index).

A step is always past + present: the T new queries attend to every stored token and causally to the
T new keys, exactly as given; the states are merged; then the layer stores the new tokens, and
drops or packs what is due. A prompt, a decode step, a second turn, a chunk and a speculative draft
differ in T alone. Decides the order of this; its parts decide everything else.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..errors import CacheMisuse, TierError
from ..positions.alibi import Alibi
from ..positions.rope import Rope
from ..recipe.spec import Recipe
from ..store import KVSide, LayerMetadata
from .age_evictor import AgeEvictor
from .checks import check_crop, check_range, check_shapes, out_of_range
from .commit import commit, index, settle
from .coordinator import Coordinator
from .draft import Draft
from .outliers import Outliers
from .part import AttendPlans, Part, attend_parts
from .reading import logical, past_parts
from .retriever import Retriever
from .score_evictor import ScoreEvictor
from .segment import Segment
from .sinks import Sinks
from .slots import Slots
from .step import StepInputs
from .trace import Trace
from .undo import Undo

# Up to this many new tokens are appended to the tail before attention, so that tail and present
# are contiguous. More would make the tail of a packed store large for a moment.
_SHORT = 64


class LayerCache:
    """The tokens of one layer, for all batch rows; the first keys set the number of heads.

    tokens: a `Segment`, or `Slots`. sinks, evictor, retriever, outliers: None where the recipe has
    none. draft: the newest tokens while a crop may still remove them.

    place: (rank, count) of this layer among those of the cache; sharing: among those that divide
    one budget (default: place). rope: rotates keys where the recipe renumbers positions.
    metadata: what the store's formats need of this layer.
    """

    def __init__(
        self,
        recipe: Recipe,
        name: str = "this layer",
        place: tuple[int, int] = (0, 1),
        rope: Rope | None = None,
        metadata: LayerMetadata | None = None,
        sharing: tuple[int, int] | None = None,
    ) -> None:
        self.metadata = metadata or LayerMetadata()
        if recipe.store.pre_rope and self.metadata.rope is None:
            raise CacheMisuse(f"{name}: keys before RoPE need the model's rotary embedding")
        self.recipe, self.name, self.place, self.rope = recipe, name, place, rope
        self.sharing = sharing or place
        sides = recipe.store.keys, recipe.store.values
        self.max_abs = tuple(torch.inf if fmt is None else fmt.largest for fmt in sides)
        self.coordinator: Coordinator | None = None
        self.recording = False  # every step is a draft until `crop`
        self.trace: Trace | None = None
        self.plans = (AttendPlans(), AttendPlans())  # of the first two parts of a step
        self.reset()

    def reset(self) -> None:
        """Remove all tokens."""
        recipe, metadata, layer = self.recipe, self.metadata, self.place[0]
        keep, recents, sinks = recipe.keep, recipe.protect.recents, recipe.protect.sinks
        scored = keep is not None and not keep.by_age  # sinks stay in place: their score is inf
        self.tokens: Segment | Slots = Segment(
            KVSide(recipe.store.keys, recents[0], metadata.keys, metadata.rope),
            KVSide(recipe.store.values, recents[1], metadata.values),
        )
        self.segment.first = 0 if scored else sinks
        self.sinks = Sinks(sinks) if sinks and not scored else None
        self.evictor: AgeEvictor | ScoreEvictor | None = None
        if keep is not None:
            by_score = ScoreEvictor(recipe, layer, self.sharing, self.rope) if scored else None
            self.evictor = by_score or AgeEvictor(recipe)
        recalls = recipe.recall is not None and layer >= recipe.recall.full_layers
        self.retriever = Retriever(recipe) if recalls else None
        rule = recipe.protect.outliers
        self.outliers = None if rule is None else Outliers(rule, layer)
        self.draft: Draft | None = None
        self.waiting: StepInputs | None = None  # its scores wait for those of other layers
        self.settled = False  # whether a step was settled; the first one is the prompt
        self.seen = 0
        self.read = 0  # tokens that the last step read, of each row and head
        self.like: Tensor | None = None  # an empty tensor with the keys' shape, dtype and device
        self._traits: tuple[Any, ...] = ()  # shape, dtype and device of the last keys
        self.unusable = ""  # why no step can follow
        self.undo: Undo | None = None  # of the running step
        self._undone: tuple[Any, list[Any]] = (None, [])  # see `_mutable`

    @property
    def segment(self) -> Segment:
        """The tokens, where they are not in slots."""
        assert isinstance(self.tokens, Segment)
        return self.tokens

    @property
    def score_evictor(self) -> ScoreEvictor:
        """The evictor, where it evicts by score."""
        assert isinstance(self.evictor, ScoreEvictor)
        return self.evictor

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(part.nbytes for part in self._parts_held)

    @property
    def dropped(self) -> int:
        """Tokens seen that the layer has dropped, of every row and head."""
        if isinstance(self.evictor, ScoreEvictor):
            return self.seen - len(self.tokens)
        return self.segment.first - self.recipe.protect.sinks

    # --- a step -----------------------------------------------------------------------------------

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float,
        valid: Tensor | None = None,
        softcap: float | None = None,
        alibi: Alibi | None = None,
    ) -> Tensor:
        """Attend q [B, Hq, T, D] to all stored tokens and to k, v [B, Hk, T, D]; store k, v.

        valid: bool [B, seen + T], False for padding. alibi: of seen + T tokens, where the model has
        it. Returns [B, Hq, T, D] in q's dtype. Raises `CacheMisuse` or `NotFinite`. After any
        exception, an interrupt included, the layer is as it was before the call.
        """
        self._begin_step()
        try:
            return self._attend(*self._inputs(q, k, v, scale, valid, softcap, alibi))
        except BaseException as error:
            self._fail(error)
            raise

    def prefill(
        self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, valid: Tensor | None = None
    ) -> None:
        """Store a first prompt k, v [B, Hk, T, D] as `attend` does, without its attention.

        q [B, Hq, T or fewer, D]: the last queries, for recipes that score the prompt. Raises
        `CacheMisuse` or `NotFinite`; the layer is then as it was before the call.
        """
        self._begin_step()
        try:
            if self.seen:
                raise CacheMisuse(f"{self.name}: prefill is for the first prompt; use attend")
            step, k, v = self._inputs(q, k, v, scale, valid, None, None)
            check_range(self.name, self.max_abs, k, v)
            self.seen = k.shape[2]
            commit(self, step, (k, v), [])
        except BaseException as error:
            self._fail(error)
            raise

    def roll_back(self) -> None:
        """Undo the last step, unless `end_step` was called since."""
        if self.undo is None:
            return
        if self.retriever is not None:
            self.retriever.side_stream.wait()
        undo, self.undo = self.undo, None
        undo.restore()
        undo.forget()
        if self.retriever is not None and self.retriever.store is not None:
            self.retriever.store.forget()  # its copies on the device are changed in place

    def end_step(self) -> None:
        """Release the tensors that undoing the last step would need."""
        if self.undo is not None:
            self.undo.forget()
            self.undo = None

    def _begin_step(self) -> None:
        """Check that the layer is usable; note how to undo this step."""
        if self.unusable:
            self.check_usable()
        if self.retriever is not None:
            self.retriever.side_stream.wait()
        self.undo = Undo(self._mutable())

    def _fail(self, error: BaseException) -> None:
        """Undo the running step; a tier that has lost tokens makes the cache unusable."""
        self.roll_back()
        if isinstance(error, TierError):
            self.unusable = str(error)

    def _inputs(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float,
        valid: Tensor | None,
        softcap: float | None,
        alibi: Alibi | None,
    ) -> tuple[StepInputs, Tensor, Tensor]:
        """Check keys and values; return the step, k and v with padding set to 0 (it may be NaN)."""
        traits = (*k.shape, k.dtype, k.device)
        if traits != self._traits or v.shape != k.shape or v.dtype != k.dtype:
            check_shapes(self.name, self.like, k, v)
            self._traits = traits
        tokens = self.seen + k.shape[2]
        scored = isinstance(self.evictor, ScoreEvictor) and not self.evictor.begun
        if scored and tokens > self.recipe.start:
            self.score_evictor.check_prompt(tokens)
        visible = None
        if valid is not None:
            visible = valid[:, None, :]
            padding = ~visible[:, :, self.seen :, None]
            k, v = k.masked_fill(padding, 0.0), v.masked_fill(padding, 0.0)
        if alibi is not None:
            keep = self.recipe.keep
            if keep is not None and keep.positions != "original":
                position = alibi.position - self.dropped  # models that round depend on it
                alibi = replace(alibi, position=position, closed_up=True)
        return StepInputs(q, scale, softcap, visible, alibi), k, v

    def _attend(self, step: StepInputs, k: Tensor, v: Tensor) -> Tensor:
        """Append, attend and commit; returns [B, Hq, T, D]."""
        stored = self._append(k, v)
        parts = self._parts(step, k, v, stored)
        evictor = self.evictor
        scores_step = (
            isinstance(evictor, ScoreEvictor)
            and evictor.scores_steps
            and self.seen > 0
            and not self.recording
        )
        products: list[Tensor] | None = [] if scores_step else None
        out = attend_parts(step.q, parts, step.scale, step.softcap, products, self.plans)
        self.seen += k.shape[2]
        self.read = parts[0].tokens if len(parts) == 1 else sum(part.tokens for part in parts)
        if products or step.q.requires_grad:
            step = step._replace(q=step.q.detach(), products=products[0] if products else None)
        commit(self, step, None if stored else (k.detach(), v.detach()), parts)
        return out

    def _append(self, k: Tensor, v: Tensor) -> bool:
        """Store a short step's tokens before attention, which then reads all tokens in one part.

        Returns whether they were stored. Attention reads a long step's tokens as they are given.
        Raises `NotFinite`.
        """
        t, tokens = k.shape[2], self.tokens
        if isinstance(tokens, Slots) and (t > 1 or self.recording):
            tokens = self.tokens = self.score_evictor.in_segment(tokens, self.seen)
        fits = t <= _SHORT or self._all_exact
        if not self.seen or not fits or not (self.sinks is None or self.sinks.full(self.seen)):
            check_range(self.name, self.max_abs, k, v)
            return False
        max_abs = None if k.is_cuda and t == 1 else self.max_abs  # see check_range
        new = k.detach(), v.detach()
        if isinstance(tokens, Slots):
            appended = tokens.append(*new, self.seen, max_abs)
        else:
            appended = tokens.append(*new, max_abs)
        if not appended:
            raise out_of_range(self.name, self.max_abs, k, v)
        return True

    def _parts(self, step: StepInputs, k: Tensor, v: Tensor, stored: bool) -> list[Part]:
        """Return the parts that the step attends to: stored or recalled tokens, and its own."""
        t, past = k.shape[2], self.seen
        present = t if stored else 0
        parts = past_parts(self, step, present) if past else []
        if stored:
            return parts
        bias = None
        if step.alibi is not None:
            index = torch.arange(past, past + t, device=k.device)
            bias = step.alibi.bias(index.expand(1, 1, -1))
        return [*parts, Part(k, v, step.visible_queries, causal=t, bias=bias)]

    # --- other changes ----------------------------------------------------------------------------

    def observe(self) -> Trace:
        """Return a `Trace` of each later step's decisions; call this before the first prompt."""
        if self.trace is None:
            self.trace = Trace()
        return self.trace

    def crop(self, tokens: int) -> None:
        """Remove the newest `tokens` tokens, then drop and pack what waited for the crop.

        Raises `CacheMisuse` if they cannot be removed, before anything is changed.
        """
        check_crop(self, tokens)
        if tokens >= self.seen:
            self.reset()
            return
        try:
            retriever, draft = self.retriever, self.draft
            if retriever is not None:
                retriever.side_stream.wait()
                if tokens > len(self.segment) - self.segment.offloaded:
                    retriever.restore(self.segment)
            self.seen -= tokens
            if tokens and len(self.tokens):
                self.segment.drop_back(min(tokens, len(self.tokens)))
            if draft is not None and self.seen <= self.recipe.start:
                left = draft.step.without_newest(tokens)
                self.draft = Draft(max(0, draft.tokens - tokens), left)
            elif draft is not None:
                settle(self, draft.step.without_newest(tokens), None)
            else:
                index(self)
        except TierError as error:
            self.unusable = str(error)
            raise

    def logical(self) -> Tensor:
        """Return logical indices of all stored tokens, int64 [B, Hk, N]: see `reading.logical`."""
        return logical(self)

    def map(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Apply fn to every tensor, along the batch dimension."""
        if self.like is None:
            return
        if self.retriever is not None:
            self.retriever.side_stream.wait()
        self.like, self._traits = fn(self.like), ()
        for part in self._parts_held:
            part.map(fn)

    # --- checks -----------------------------------------------------------------------------------

    def check_usable(self) -> None:
        """Raise `CacheMisuse` after a failure that could not be undone."""
        if self.unusable:
            raise CacheMisuse(f"{self.name}: this cache cannot be used any more: {self.unusable}")

    @property
    def _all_exact(self) -> bool:
        """Whether all tokens stay, and stay exact: then the tail holds all of them."""
        if not self.recipe.store.exact:
            return False
        if isinstance(self.evictor, ScoreEvictor):
            return not self.evictor.done
        return self.evictor is None

    @property
    def _parts_held(self) -> list[Any]:
        """The parts with tensors."""
        scores = self.evictor if isinstance(self.evictor, ScoreEvictor) else None
        parts = (self.tokens, self.sinks, scores, self.retriever, self.outliers, self.draft)
        return [part for part in parts if part is not None]

    def _mutable(self) -> list[Any]:
        """Return the objects that a step changes; cached while no part is replaced."""
        tokens, found = self._undone
        if tokens is self.tokens:
            return found
        found = [self, *self.tokens.mutable]
        for part in (self.sinks, self.evictor, self.retriever, self.outliers):
            if part is not None:
                found += part.mutable
        fixed = self.retriever is None and self.recipe.store.fixed_buffers
        self._undone = (self.tokens if fixed else None, found)
        return found
