"""Speculative decoding: a layer attends to a draft token by token, as without speculation.

Decides how a layer takes a draft, and how a crop removes its newest tokens. Before a draft token
attends, the layer has dropped, packed and indexed what was due after the token before it. So a
model accepts exactly the tokens that it would generate alone. A crop restores the layer as it was
before the draft and repeats the steps of the tokens that stay.

The drafts of two kinds of layers wait for the crop instead (`Uncommitted`): layers that keep every
token exact do not need this, and layers whose eviction waits for other layers, or for a repetition
of the prompt, cannot do it until they have evicted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from ..errors import CacheMisuse
from ..state import StepParts, Undo
from .cycle import run_step
from .layer_state import LayerState
from .step import StepInputs


class Verification:
    """The steps of a layer's running draft, and the layer before the first of them.

    accepted_tokens: how many tokens no crop will remove, those of the next step included.
    """

    def __init__(self, accepted_tokens: int = 0) -> None:
        self.accepted_tokens = accepted_tokens
        self.steps: tuple[StepInputs, ...] = ()
        self.before: Undo | None = None  # None: no draft is running

    def __deepcopy__(self, memo: dict[int, Any]) -> Verification:
        """Return a Verification without a draft: copying a cache accepts the running draft."""
        return Verification(self.accepted_tokens)

    @property
    def running(self) -> bool:
        """Whether a crop may still remove the tokens of a draft."""
        return self.before is not None

    @property
    def tokens(self) -> int:
        """The tokens of the draft."""
        return sum(step.tokens for step in self.steps)

    def nbytes(self, state: LayerState) -> int:
        """Return the bytes of the draft's inputs, and of what only the state before it has."""
        if self.before is None:
            return 0
        current = {x.untyped_storage().data_ptr() for x in state.held()}
        before = {x.untyped_storage().data_ptr(): x.nbytes for x in self.before.held()}
        inputs = (x.nbytes for step in self.steps for x in (step.queries.q, step.k, step.v))
        return sum(inputs) + sum(n for pointer, n in before.items() if pointer not in current)

    def applies(self, state: LayerState) -> bool:
        """Return whether a layer that records takes the tokens of its next step one by one."""
        if not (state.seen or self.accepted_tokens):
            return False
        evictor = state.evictor
        if evictor is not None and evictor.defers:
            return False
        return not (state.recipe.store.exact and evictor is None and state.retriever is None)

    def attend(
        self, state: LayerState, step: StepInputs, step_parts: Callable[[], StepParts]
    ) -> Tensor:
        """Attend at once to the tokens that are accepted, then token by token; [B, Hq, T, D].

        step_parts: returns the objects that a step changes.
        """
        accepted = min(step.tokens, max(0, self.accepted_tokens - state.seen))
        outs = []
        state.recording = False
        if accepted:
            self.end()
            outs.append(run_step(state, step.slice(0, accepted)))
        if accepted < step.tokens:
            draft = step.slice(accepted, step.tokens)
            if draft.queries.see_later:
                raise CacheMisuse(
                    f"{state.name}: tokens of this step see later ones (an image), and a draft is "
                    "read token by token; give the image in a call without a draft"
                )
            if self.before is None:
                self.before = Undo(step_parts())
            self.steps = (*self.steps, draft)
            outs += _attend_each(state, draft.one_by_one())
        state.recording = True
        return torch.cat(outs, dim=2)

    def end(self) -> None:
        """Forget the draft: all of its tokens stay."""
        self.steps, self.before = (), None

    def restore(self, state: LayerState) -> tuple[StepInputs, ...]:
        """Restore the layer as it was before the draft, and return the steps of the draft."""
        steps, before = self.steps, self.before
        assert before is not None
        before.restore()
        state.forget_resident()
        self.end()
        state.recording = True
        return steps

    def remove_newest(self, state: LayerState, tokens: int) -> None:
        """Remove the newest `tokens` tokens of the draft, which then has ended."""
        if tokens:
            accepted = self.tokens - tokens
            steps = self.restore(state)
            state.recording = False
            _attend_each(state, _oldest(steps, accepted))
            state.recording = True
        self.end()


def _oldest(steps: tuple[StepInputs, ...], tokens: int) -> Iterator[StepInputs]:
    """Yield the oldest `tokens` tokens, one by one."""
    for step in steps:
        for token in step.one_by_one():
            if tokens == 0:
                return
            tokens -= 1
            yield token


def _attend_each(state: LayerState, steps: Iterator[StepInputs]) -> list[Tensor]:
    state.storage = state.storage.undoable()
    return [run_step(state, step) for step in steps]
