"""The cache of one attention layer: what models call, and how a change that fails is undone.

Decides no step itself: `cycle` runs one, `verification` takes the tokens of a speculative draft
one by one, and `LayerState` has what is stored. `LayerState` is of this package: `hf` and
`calibrate` ask a `LayerCache`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch import Tensor

from ..errors import CacheMisuse, TierError
from ..keep.query_predictor import Examples, QueryPredictor
from ..positions.alibi import Alibi
from ..positions.rope import Rope
from ..recall import Traffic
from ..recipe.parts import BudgetGroup
from ..recipe.spec import Recipe
from ..state import StepParts, Undo
from ..store import LayerFacts
from . import checks, commit, cycle, reading
from .evictor import Phase
from .layer_state import LayerState
from .scoring import RepetitionScores
from .segment import Segment
from .step import Queries, StepInputs, Trace, Uncommitted
from .verification import Verification
from .waiting import WaitingTokens

Result = TypeVar("Result")


class LayerCache:
    """The cache of one layer, for all batch rows.

    Args:
        recipe: The recipe of this layer alone, without overrides for other layers.
        name: The name of the layer in errors.
        place: The number of the layer among the `count` layers of the cache.
        count: The layers of the cache.
        rope: Rotates keys where the recipe renumbers positions.
        facts: What the store's formats need of this layer.
        budget_group: The layer's place among those that share one budget (default: all).
        window: The tokens that a query sees, its own included (None: all); the recipe is then
            `Recipe.in_windows`.
    """

    def __init__(
        self,
        recipe: Recipe,
        name: str = "this layer",
        place: int = 0,
        count: int = 1,
        rope: Rope | None = None,
        facts: LayerFacts | None = None,
        budget_group: BudgetGroup | None = None,
        window: int | None = None,
    ) -> None:
        self._state = LayerState(
            recipe, name, place, budget_group or BudgetGroup(place, count), rope,
            facts or LayerFacts(), window,
        )  # fmt: skip
        self._verification = Verification()
        self.unusable = ""  # why no step can follow
        self.undo: Undo | None = None  # of the running step
        self._open_step: cycle.OpenStep | None = None  # waits for `finish`
        self._step_parts: StepParts | None = None  # while no part is replaced

    def reset(self) -> None:
        """Remove all tokens."""
        self._state.reset()
        self._verification = Verification()
        self.unusable, self.undo, self._step_parts, self._open_step = "", None, None, None

    @property
    def recipe(self) -> Recipe:
        """The plain recipe of this layer."""
        return self._state.recipe

    @property
    def name(self) -> str:
        """The name of this layer in errors."""
        return self._state.name

    @property
    def window(self) -> int | None:
        """The tokens that a query sees, its own included; None: all."""
        return self._state.window

    @property
    def seen(self) -> int:
        """The number of tokens seen, dropped ones included."""
        return self._state.seen

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, those that only a running draft holds included."""
        return self._state.nbytes + self._verification.nbytes(self._state)

    @property
    def like(self) -> Tensor | None:
        """An empty tensor with the stored keys' B, Hk, D, dtype and device; None before a step."""
        return self._state.like

    @property
    def facts(self) -> LayerFacts:
        """What the store's formats need of this layer."""
        return self._state.facts

    @property
    def rope(self) -> Rope | None:
        """What rotates keys where the recipe renumbers positions."""
        return self._state.rope

    @property
    def latent(self) -> bool:
        """Whether the layer stores latents: see `latents`."""
        return self.facts.latent

    @property
    def token_numbers(self) -> int:
        """The numbers in one token's keys and values, of all rows and heads; 0 before a step."""
        like = self._state.like
        if like is None:
            return 0
        b, h, _, d = like.shape
        return b * h * (d + (self.facts.value_dim or d))

    @property
    def dropped(self) -> float:
        """Tokens seen that the layer has dropped, of every row and head, or on average."""
        return self._state.dropped

    @property
    def tokens_read(self) -> float:
        """Tokens that the last step read, of each row and head, on average."""
        return self._state.tokens_read

    @property
    def traffic(self) -> Traffic:
        """What steps found on the device; of zeros where the layer has no tier."""
        store = self._state.offload_store
        return Traffic() if store is None else store.traffic

    @property
    def max_abs(self) -> tuple[float, ...]:
        """The largest magnitudes of keys and of values that the layer can store."""
        return self._state.max_abs

    @property
    def needs_ids(self) -> bool:
        """Whether the next step needs token ids, for a rule that protects tokens."""
        return self._state.needs_ids

    @property
    def uses_input_norms(self) -> bool:
        """Whether the next step may need the norms of the layer's input, for a score."""
        evictor = self._state.evictor
        return evictor is not None and evictor.scoring and self.recipe.uses_input_norms

    @property
    def recording(self) -> bool:
        """Whether `crop` may remove the tokens of each step."""
        return self._state.recording

    @recording.setter
    def recording(self, value: bool) -> None:
        self._state.recording = value

    @property
    def accepted_tokens(self) -> int:
        """The tokens, those of the next step included, that no `crop` will remove."""
        return self._verification.accepted_tokens

    @accepted_tokens.setter
    def accepted_tokens(self, value: int) -> None:
        self._verification.accepted_tokens = value

    @property
    def removable(self) -> int:
        """The number of newest tokens that `crop` may still remove, because a draft is running."""
        draft = self._state.uncommitted
        if self._verification.running:
            return self._verification.tokens
        if draft is None or self.seen <= self.recipe.compress_after:
            return 0
        return draft.tokens

    def observe(self) -> Trace:
        """Return a `Trace` of each later step's decisions; call this before the first prompt."""
        if self._state.trace is None:
            self._state.trace = Trace()
        return self._state.trace

    def past_window(self) -> tuple[Tensor, Tensor]:
        """Return the keys and values [B, Hk, N, D] that the next token of a window sees."""
        segment, window = self._state.segment, self._state.window
        assert window is not None
        keys, values = segment.views()
        begin = max(0, len(segment) - (window - 1))
        return keys.tensor(begin), values.tensor(begin)

    def logical(self) -> Tensor:
        """Return logical indices of all stored tokens, int64 [B, Hk, N]: see `reading.logical`."""
        return reading.logical(self._state)

    def exact_tokens(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return exact keys and values [B, Hk, N, D], and logical indices [B or 1, Hk or 1, N].

        For a layer that packs nothing. Sinks are among them where tokens are evicted by score.
        """
        segment = self._state.segment
        keys, values = segment.exact()
        return keys, values, segment.logical(0, keys.shape[2], keys.device)

    # --- a step -----------------------------------------------------------------------------------

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float,
        visible: Tensor | None = None,
        softcap: float | None = None,
        alibi: Alibi | None = None,
        ids: Tensor | None = None,
        sink_logits: Tensor | None = None,
        norms: Tensor | None = None,
    ) -> Tensor:
        """Attend q [B, Hq, T, D] to all stored tokens and to k, v [B, Hk, T, D]; store k, v.

        scale: factor of q @ k. visible: bool [B, seen + T], False for padding. softcap: bound of
        the logits, where the model has one. alibi: the bias by position, where the model has it.
        ids: int64 [B, T], token ids, where a rule reads them. sink_logits: fp32 [Hq], of attention
        sinks that the model has learned. norms: fp32 [B, T], of the layer's input, where a score
        reads them. Returns and raises as `run` does.
        """
        visible = None if visible is None else visible[:, None]
        queries = Queries(
            q, scale, visible, softcap, alibi, ids, sink_logits=sink_logits, norms=norms
        )
        return self.run(StepInputs(queries, k, v))

    def run(self, step: StepInputs, leave_open: bool = False) -> Tensor:
        """Attend to all stored tokens and to the new ones, and store these.

        leave_open: other layers attend to the same tokens, by `read`; `finish` then ends the step.
        Returns [B, Hq, T, D] in q's dtype. Raises `CacheMisuse` or `NotFinite`. After any
        exception, an interrupt included, the layer is as it was before the call.
        """
        return self._undoable(self._run, step, leave_open)

    def _run(self, step: StepInputs, leave_open: bool) -> Tensor:
        if self._state.recording and self._verification.applies(self._state):
            if leave_open:
                raise CacheMisuse(
                    f"{self.name}: other layers share its keys and values, and a recipe that "
                    "packs, evicts or recalls reads a draft token by token; use no draft, or "
                    "recipe full"
                )
            return self._verification.attend(self._state, step, self.step_parts)
        if self._verification.steps:
            self._verification.end()
        if not leave_open:
            return cycle.run_step(self._state, step)
        out, self._open_step = cycle.begin(self._state, step)
        return out

    def read(self, step: StepInputs) -> Tensor:
        """Attend by the queries of another layer, within a step that `run` left open.

        step: the keys and values of that step, and the other layer's queries: as many, or the
        newest. Scores do not see them. Returns [B, Hq, T, D].
        """
        assert self._open_step is not None
        return cycle.read(self._state, step, self._open_step.stored)

    def finish(self) -> None:
        """End a step that `run` left open for other layers, if there is one."""
        open_step, self._open_step = self._open_step, None
        if open_step is not None:
            cycle.finish(self._state, open_step)

    @property
    def may_wait(self) -> bool:
        """Whether single tokens may wait for their commit: see `waiting`."""
        state, storage = self._state, self._state.storage
        evictor, keep = state.evictor, self.recipe.keep
        return (
            isinstance(storage, Segment)
            and storage.keys.tail.allocation is not None
            and state.prompt_done
            and state.trace is None
            and not (self.unusable or state.recording or self._verification.running)
            and not (state.window or state.facts.latent or state.retriever or state.uncommitted)
            and (evictor is None or evictor.phase is Phase.DONE)
            and (keep is None or not keep.renumbers)
            and (state.sinks is None or state.sinks.full(state.seen))
        )

    def reserve(self, tokens: int) -> None:
        """Make room for `tokens` tokens that wait: zeros, as hidden NaN would have an effect."""
        for side in (self._state.segment.keys, self._state.segment.values):
            side.tail.reserve(tokens)
            side.tail.reserved(tokens).zero_()

    def attend_waiting(self, step: StepInputs, waiting: WaitingTokens) -> Tensor:
        """Attend as `run` does, for a layer that `may_wait`, but let the step's token wait.

        Returns [B, Hq, 1, D] in q's dtype. The layer stays as it was.
        """
        return cycle.attend_waiting(self._state, step, waiting)

    def commit_waiting(self, waiting: WaitingTokens, tokens: int) -> None:
        """Count the first `tokens` tokens that wait, and pack what is due.

        After an exception, the layer is as it was before.
        """
        self._undoable(cycle.commit_waiting, self._state, waiting, tokens)

    def prefill(self, step: StepInputs) -> None:
        """Store a first prompt as `run` does, without its attention.

        step.queries: the last queries of the prompt, T or fewer, for recipes that score it. Raises
        as `run` does; the layer is then as it was before the call.
        """
        self._undoable(cycle.prefill, self._state, step)

    def mark_seen(self, tokens: int) -> None:
        """Count `tokens` tokens as seen, for a caller that attends to them itself."""
        self._state.seen = tokens

    # --- a repetition of the prompt ---------------------------------------------------------------

    def fit_predictor(self, examples: Examples) -> QueryPredictor:
        """Return what examples of a repetition predict for the layer's queries."""
        return QueryPredictor.fit(examples, self._state.score_evictor.scorer.rope)

    @property
    def repetition(self) -> RepetitionScores | None:
        """What `repeat` has collected; None: the model need not repeat the first prompt."""
        return self._state.repetition

    def repeat(self, step: StepInputs, repeated: tuple[int, int] | None) -> Tensor:
        """Attend as `run` does, but store nothing: the step ends with a repetition of the prompt.

        repeated: (first, end) of the prompt's tokens that are repeated, which the step scores; None
        for the queries of another layer that shares these tokens. Call it after the prompt, and
        `end_repetition` after the last repetition.
        """
        return cycle.repeat(self._state, step, repeated)

    def end_repetition(self) -> None:
        """Evict by the scores that `repeat` collected, then pack and index."""
        commit.end_repetition(self._state)

    # --- undo -------------------------------------------------------------------------------------

    def forget_undo(self) -> None:
        """Release the tensors that undoing the last step would need."""
        if self.undo is not None:
            self.undo.forget()
            self.undo = None
        if self._step_parts is not None and self._step_parts.storage is not self._state.storage:
            self._step_parts = None  # the tokens have moved, and it refers to where they were

    def roll_back(self) -> None:
        """Undo the last step. Does nothing after `forget_undo`."""
        self._open_step = None
        if self.undo is None:
            return
        self._wait()
        undo, self.undo = self.undo, None
        undo.restore()
        undo.forget()
        self._state.forget_resident()

    def step_parts(self) -> StepParts:
        """Return the objects that a step changes; kept while no part is replaced."""
        state, retriever = self._state, self._state.retriever
        finder = None if retriever is None else retriever.finder
        parts = StepParts([self._verification, *state.walk()], state.storage, finder)
        fixed = self.recipe.store.fixed_buffers and state.offload_store is None
        self._step_parts = parts if fixed else None
        return parts

    def _undoable(self, work: Callable[..., Result], *args: Any) -> Result:
        """Return what the work of a step returns; after any exception, undo the step.

        A tier that has lost tokens makes the cache unusable.
        """
        self._begin_step()
        try:
            return work(*args)
        except BaseException as error:
            self.roll_back()
            if isinstance(error, TierError):
                self.unusable = str(error)
            raise

    def _begin_step(self) -> None:
        """Check that the layer is usable; note how to undo this step."""
        if self.unusable:
            self.check_usable()
        state, finder = self._state, None
        if state.retriever is not None:
            state.retriever.side_stream.wait()
            finder = state.retriever.finder
        self.undo = None  # it would keep the tensors of the step before
        parts = self._step_parts
        if parts is None or parts.storage is not state.storage or parts.finder is not finder:
            parts = self.step_parts()
        self.undo = Undo(parts)

    # --- other changes ----------------------------------------------------------------------------

    def crop(self, tokens: int) -> None:
        """Remove the newest `tokens` tokens, then drop and pack what waited for the crop.

        Raises `CacheMisuse` if they cannot be removed, and `RecipeError` if too few of a first
        prompt would stay for its budgets, before anything is changed.
        """
        self.check_crop(tokens)
        state = self._state
        if tokens >= state.seen:
            self.reset()
            return
        try:
            self._wait()
            if self._verification.running:
                self.undo = None
                self._verification.remove_newest(state, tokens)
                return
            retriever, draft = state.retriever, state.uncommitted
            if retriever is not None and tokens > len(state.segment.keys):
                retriever.restore(state.segment)
            state.seen -= tokens
            if tokens and len(state.storage):
                state.segment.drop_back(min(tokens, len(state.storage)))
            if state.evictor is not None:
                state.evictor.forget(max(0, tokens - (0 if draft is None else draft.tokens)))
            if draft is not None and state.seen <= self.recipe.compress_after:
                left = draft.queries.without_newest(tokens)
                state.uncommitted = Uncommitted(max(0, draft.tokens - tokens), left)
            elif draft is not None:
                commit.commit(state, draft.queries.without_newest(tokens), None)
            else:
                commit.index_due(state)
        except TierError as error:
            self.unusable = str(error)
            raise

    def map(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Apply fn to every tensor, along the batch dimension."""
        state = self._state
        if state.like is None:
            return
        self._wait()
        draft: tuple[StepInputs, ...] = ()
        if self._verification.running:
            self.undo, draft = None, self._verification.restore(state)
        state.traits = ()
        state.map(fn)
        for step in draft:
            self._verification.attend(state, step.map(fn), self.step_parts)

    def state(self) -> dict[str, Any]:
        """Return the state between two steps, to save it: see `LayerState.state`."""
        self._wait()
        return self._state.state()

    def load_state(self, state: dict[str, Any]) -> None:
        """Load a state that `state` returned: see `LayerState.load_state`."""
        self._state.load_state(state)

    def _wait(self) -> None:
        """Wait for what a step before has begun on a side stream."""
        if self._state.retriever is not None:
            self._state.retriever.side_stream.wait()

    # --- checks -----------------------------------------------------------------------------------

    def check_usable(self) -> None:
        """Raise `CacheMisuse` after a failure that could not be undone."""
        if self.unusable:
            raise CacheMisuse(
                f"{self.name}: this cache cannot be used any more: {self.unusable}; call reset(), "
                "or make a new cache"
            )

    def check_crop(self, tokens: int) -> None:
        """Raise `CacheMisuse` if the newest `tokens` tokens cannot be removed."""
        if not self._verification.running:
            checks.check_crop(self._state, tokens)
        elif self._verification.tokens < tokens < self.seen:
            raise CacheMisuse(
                f"{self.name}: crop of {tokens} tokens reaches before the draft; crop its "
                f"{self._verification.tokens} tokens first"
            )
