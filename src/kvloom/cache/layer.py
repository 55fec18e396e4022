"""One attention layer's cache: attend, then take in.

A step is always past + present: the T new queries attend to every stored segment and causally to
the T new keys, exactly as given; the states are merged; then the new tokens are taken in and what
is due is dropped or packed. A prompt, a decode step, a second turn, a chunk and a speculative
draft differ in T alone. Decides the order of these; formats, scores and kernels live elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain, repeat
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import CacheMisuse, NotFinite
from ..kernels import ops
from ..kernels.append.reference import within
from ..kernels.attend import reference as ref
from ..kernels.plan import Plan
from ..positions.alibi import Alibi
from ..positions.rope import Rope
from ..recipe.spec import Recipe
from ..store import NOTHING, Known, Lane
from .segment import Piece, Segment
from .sinks import Sinks
from .undo import Undo

# Up to this many new tokens are written behind the tail before attention, so that tail and
# present are one stretch; more would make the tail of a packed store large for a moment.
_SHORT = 64


class Asked(NamedTuple):
    """The queries of a step and how they attended: q [B, Hq, T, D], see bool [B, 1, seen + T].

    products: what their attention has left behind, as `kernels.score.run.step_mass` takes it.
    """

    q: Tensor
    scale: float
    softcap: float | None
    see: Tensor | None
    alibi: Alibi | None = None
    products: Tensor | None = None

    def without(self, tokens: int) -> Asked:
        """Without the newest `tokens` tokens."""
        q = self.q[:, :, : max(0, self.q.shape[2] - tokens)]
        see = None if self.see is None else self.see[:, :, : self.see.shape[2] - tokens]
        return self._replace(q=q, see=see)  # alibi may count from a token that is gone

    def map(self, fn: Callable[[Tensor], Tensor]) -> Asked:
        """Apply fn to the tensors, along the batch dimension."""
        see = None if self.see is None else fn(self.see)
        alibi = None if self.alibi is None else self.alibi.map(fn)
        return self._replace(q=fn(self.q), see=see, alibi=alibi)


class LayerCache:
    """The cache of one layer, batch rows together, head counts taken from the first keys.

    Tokens stay by age; `scored.ScoredLayer` chooses by score. place: (number of this layer, layers
    of the model). rope: how the keys are rotated, where the recipe renumbers positions. known: what
    the store's formats need to know of this layer.
    """

    def __init__(
        self,
        recipe: Recipe,
        name: str = "this layer",
        place: tuple[int, int] = (0, 1),
        rope: Rope | None = None,
        known: Known = NOTHING,
    ) -> None:
        if recipe.store.pre_rope and known.rope is None:
            raise CacheMisuse(f"{name}: keys before RoPE need the model's rotary embedding")
        self.recipe, self.name, self.place = recipe, name, place
        sides = recipe.store.keys, recipe.store.values
        self.most = tuple(torch.inf if fmt is None else fmt.largest for fmt in sides)
        self.rope, self.known = rope, known
        self.recording = False
        self.trace = False  # remember which tokens stay, for `logical`; set before the first prompt
        self.plans = [(Plan(ops.attend), Plan(ops.attend_gathered)) for _ in range(2)]
        self.reset()

    def reset(self) -> None:
        """Forget everything."""
        store, recents = self.recipe.store, self.recipe.protect.recents
        known = self.known
        self.body = Segment(
            Lane(store.keys, recents[0], known.keys, known.rope),
            Lane(store.values, recents[1], known.values),
        )
        count = self.recipe.protect.sinks
        self.sinks = Sinks(count) if count else None
        self.seen = 0
        self.body.first = count
        self.pending = 0  # newest tokens not yet settled, while recording
        self.held: Asked | None = None  # how they attended
        self.budget: int | None = None
        self.read = 0  # tokens that the last step read, of each row and head
        self.like: Tensor | None = None  # an empty tensor with the keys' shape, dtype and device
        self.undo: Undo | None = None  # of the running step

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors held."""
        return self.body.nbytes + (0 if self.sinks is None else self.sinks.nbytes)

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
        """Attend q [B, Hq, T, D] to all that is held and to k, v [B, Hk, T, D]; take k, v in.

        valid: bool [B, seen + T], False hides padding. alibi: of seen + T tokens, where the model
        has it. Returns [B, Hq, T, D] in q's dtype. Raises `CacheMisuse` or `NotFinite`. After any
        exception, an interrupt included, the layer is as it was before the call.
        """
        self.undo = Undo(self.parts)
        try:
            return self._attend(q, k, v, scale, valid, softcap, alibi)
        except BaseException:
            self.roll_back()
            raise

    def roll_back(self) -> None:
        """Undo the last step, if nothing has happened since and `end_step` was not called."""
        if self.undo is not None:
            undo, self.undo = self.undo, None
            undo.restore()
            undo.forget()

    def end_step(self) -> None:
        """Release what undoing the last step would need."""
        if self.undo is not None:
            self.undo.forget()
            self.undo = None

    @property
    def parts(self) -> list[Any]:
        """The objects that a step changes."""
        own = [self, *self.body.parts]
        return own if self.sinks is None else [*own, self.sinks]

    def _attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float,
        valid: Tensor | None,
        softcap: float | None,
        alibi: Alibi | None,
    ) -> Tensor:
        """Attend as `attend` says, leaving the undoing to it."""
        self.check(k, v)
        alibi = None if alibi is None else self._spaced(alibi)
        t, past = k.shape[2], self.seen
        see = None if valid is None else valid[:, None, :]
        if see is not None:  # whatever padding holds, not even infinity may meet a weight of 0
            pad = ~see[:, :, past:, None]
            k, v = k.masked_fill(pad, 0.0), v.masked_fill(pad, 0.0)
        early = past > 0 and (t <= _SHORT or self._dense) and self._sinks_full
        if early:
            most = None if k.is_cuda and t == 1 else self.most  # see check_range
            if not self.body.append(k.detach(), v.detach(), most):
                raise self._beyond(k, v)
        else:
            self.check_range(k, v)
        if early:
            pieces = self._past(see, alibi, present=t)
        else:
            here = None if see is None else see[:, :, past:]
            bias = None
            if alibi is not None:
                index = torch.arange(past, past + t, device=k.device)
                bias = alibi.bias(index.expand(1, 1, -1))
            pieces = self._past(see, alibi, present=0) if past else []
            pieces.append(Piece(k, v, here, causal=t, bias=bias))
        products: list[Tensor] | None = [] if self._scores_steps else None
        out = attend_pieces(q, pieces, scale, softcap, products, self.plans)
        self.seen, self.read = past + t, sum([piece.tokens for piece in pieces])
        asked = Asked(q.detach(), scale, softcap, see, alibi, products[0] if products else None)
        if not early:
            self._take(k.detach(), v.detach(), asked)
        elif self.recording:
            self._hold(asked)
        else:
            self._settle(asked)
        return out

    def logical(self) -> Tensor:
        """Logical indices of the tokens held, int64 [B, Hk, N], in the order in which they lie.

        Sinks first, then the body, which holds a padded row's sinks once more. -1: a sink that a
        row has not reached yet. Raises `CacheMisuse` where nobody had them remembered.
        """
        if self.like is None:
            return torch.empty(0, 0, 0, dtype=torch.long)
        if self.body.kept and self.body.index is None:
            raise CacheMisuse(
                f"{self.name}: which tokens stayed was not remembered; set trace = True before "
                "the first prompt"
            )
        b, h, device = self.like.shape[0], self.like.shape[1], self.like.device
        parts = []
        if self.sinks is not None:
            parts.append(self.sinks.logical(self.seen)[:, None, :])
        if len(self.body):
            parts.append(self.body.logical(0, len(self.body), device))
        return torch.cat([part.expand(b, h, -1) for part in parts], dim=-1)

    def check(self, k: Tensor, v: Tensor) -> None:
        """Refuse keys or values that do not belong here."""
        if k.shape[2] == 0:
            raise CacheMisuse(f"{self.name}: no tokens to attend with; give at least one")
        if k.shape != v.shape or k.dtype != v.dtype:
            raise CacheMisuse(
                f"{self.name}: keys {tuple(k.shape)} in {k.dtype} and values {tuple(v.shape)} in "
                f"{v.dtype} do not belong together; give one value a key"
            )
        if self.like is not None and (want := _traits(self.like)) != (got := _traits(k)):
            names = "batch size", "key/value heads", "head dimension", "dtype", "device"
            for what, a, b in zip(names, want, got, strict=True):
                if a != b:
                    raise CacheMisuse(
                        f"{self.name}: this cache holds {what} {a} and was given {b}; "
                        "make a new cache for another model, dtype or batch"
                    )

    def check_range(self, k: Tensor, v: Tensor) -> None:
        """Refuse numbers that the store cannot hold."""
        if k.is_cuda and k.shape[2] == 1:
            return  # reading the answer back would stall the device at every step
        if not within((k, v), self.most):
            raise self._beyond(k, v)

    def _beyond(self, k: Tensor, v: Tensor) -> NotFinite:
        """What is wrong with numbers that the store cannot hold."""
        at = 1 if within((k,), self.most[:1]) else 0
        what, x = (("keys", k), ("values", v))[at]
        if torch.isfinite(x).all():
            return NotFinite(f'{self.name}: |x| > {self.most[at]:g} in {what}; use meta="bf16"')
        return NotFinite(f"{self.name}: NaN or infinity in {what}; check the model")

    def check_crop(self, tokens: int) -> None:
        """Refuse to remove the newest `tokens` tokens where that cannot be done."""
        if tokens >= self.seen:
            return
        if self._final and tokens > self.pending:
            raise CacheMisuse(
                f"{self.name}: crop cannot bring back the tokens that were dropped since; "
                "call activate_past_recording() before the step that is to be undone"
            )
        exact = self.body.exact
        if tokens > exact and exact < len(self.body):
            raise CacheMisuse(
                f"{self.name}: crop of {tokens} tokens reaches into packed tokens; the newest "
                f"{exact} are still exact, or call activate_past_recording() before the step"
            )

    def crop(self, tokens: int) -> None:
        """Remove the newest `tokens` tokens, then drop and pack what was held back."""
        self.check_crop(tokens)
        if tokens >= self.seen:
            self.reset()
            return
        self.seen -= tokens
        if tokens and len(self.body):
            self.body.drop_back(min(tokens, len(self.body)))
        self._settle(None if self.held is None else self.held.without(tokens))

    def map(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Apply fn to every tensor held, along the batch dimension."""
        if self.like is not None:
            self.body.map(fn)
            if self.sinks is not None:
                self.sinks.map(fn)
            self.like = fn(self.like)
            self.held = None if self.held is None else self.held.map(fn)

    @property
    def dropped(self) -> int:
        """Tokens seen, of every row and head, that are not held any more."""
        return self.body.first - self.recipe.protect.sinks

    @property
    def _final(self) -> bool:
        """Whether tokens were dropped that a crop would need again."""
        return self.dropped > 0

    @property
    def _scores_steps(self) -> bool:
        """Whether attention is to leave its products behind."""
        return False

    @property
    def _dense(self) -> bool:
        """Whether all tokens stay, exact: then the tail is the whole store."""
        return self.recipe.keep is None and self.recipe.store.exact

    def _spaced(self, alibi: Alibi) -> Alibi:
        """ALiBi with the distances that the recipe asks for."""
        keep = self.recipe.keep
        if keep is None or keep.positions == "original":
            return alibi
        position = alibi.position - self.dropped  # it matters to those who round
        return replace(alibi, position=position, closed_up=True)

    @property
    def _sinks_full(self) -> bool:
        return self.sinks is None or self.sinks.full(self.seen)

    def _past(self, see: Tensor | None, alibi: Alibi | None, present: int) -> list[Piece]:
        pieces = []
        if self.sinks is not None:
            piece = self.sinks.piece(self.seen, see, alibi, self.body.first)
            if self.rope is not None:
                by = self.sinks.behind(self.body.first)
                piece = piece._replace(keys=self.rope.turn(piece.exact_keys, by))
            pieces.append(piece)
            see = self.sinks.hide(see)
        if len(self.body):
            pieces += self._read(see, alibi, present)
        return pieces

    def _read(self, see: Tensor | None, alibi: Alibi | None, present: int) -> list[Piece]:
        """What a step reads of the body, its own `present` tokens among it; see without sinks."""
        return self.body.pieces(see, present, alibi)

    def _take(self, k: Tensor, v: Tensor, asked: Asked) -> None:
        """Take in the present; the prompt of a packed store never lies exact beside its codes."""
        if self.like is None:
            self.like = k.new_empty(k.shape[0], k.shape[1], 0, k.shape[3])
            if self.recipe.keep is not None:
                self.budget = self.recipe.budget_tokens(self.seen)
        if self.sinks is not None:
            skip = self.sinks.take(k, v, self.seen - k.shape[2], asked.see)
            k, v = k[:, :, skip:], v[:, :, skip:]
        if self.recording:
            self._hold(asked)
            if k.shape[2]:
                self.body.append(k, v)
            return
        self.pending, self.held = 0, None
        if k.shape[2]:
            self.body.take(k, v, self._surplus(len(self.body) + k.shape[2]), asked.see)

    def _hold(self, asked: Asked) -> None:
        """Note that this step's tokens may be taken back."""
        self.pending += asked.q.shape[2]
        self.held = asked._replace(q=asked.q[:, :, :0].clone())  # age does not ask who asked

    def _settle(self, asked: Asked | None) -> None:
        """Drop what is over the budget and pack what is due."""
        self.pending, self.held = 0, None
        if self.budget is not None and (surplus := self._surplus(len(self.body))):
            self.body.drop_front(surplus)
        self.body.seal(None if asked is None else asked.see)

    def _surplus(self, tokens: int) -> int:
        """How many of `tokens` tokens in the body are over the budget."""
        if self.budget is None or self.recipe.keep is None:
            return 0
        sinks = self.recipe.protect.sinks
        if not self.recipe.keep.drops(tokens + sinks):
            return 0
        return max(0, tokens - max(0, self.budget - sinks))


def _traits(x: Tensor) -> tuple:
    """What all keys of a cache have in common."""
    b, h, _, d = x.shape
    return b, h, d, x.dtype, x.device


def attend_pieces(
    q: Tensor,
    pieces: list[Piece],
    scale: float,
    softcap: float | None,
    products: list[Tensor] | None = None,
    plans: Sequence[tuple[Plan, Plan] | None] = (),
) -> Tensor:
    """Attend to all pieces and merge; a single exact piece goes to torch's fused kernel.

    products: given a list, those of a single piece are left in it where a kernel can. plans: of the
    first pieces, as in `Piece.fused`.
    """
    only = pieces[0]
    if len(pieces) == 1 and only.causal < only.tokens:
        state = only.fused(q, scale, softcap, products, plans[0] if plans else None)
        if state is not None:
            return state.out.to(q.dtype)
        if only.parts is not None:
            pieces = only.parts()
            only = pieces[0]
    fused = softcap is None and (only.bias is None or q.shape[2] == 1)
    if len(pieces) == 1 and fused and isinstance(only.keys, Tensor):
        k, v, valid = only.keys, only.values, only.valid
        assert isinstance(v, Tensor)
        return ref.sdpa(q, k, v, scale, causal=only.causal > 1, valid=valid, bias=only.bias)
    planned = zip(pieces, chain(plans, repeat(None)), strict=False)
    return ref.merge([p.attend(q, scale, softcap, plan) for p, plan in planned]).out.to(q.dtype)
