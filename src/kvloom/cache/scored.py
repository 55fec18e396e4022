"""A layer whose tokens stay by score.

The prompt is scored from its own queries, and the budget's best tokens stay. Later, `when="step"`
scores every step and drops down to the budget again (a single token in `Slots`, where nothing
moves); `when="prompt"` keeps all that comes after and may pack it. While tokens can still be taken
back, the queries wait and score when it is known which of them stay.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..errors import CacheMisuse
from ..positions.alibi import Alibi
from ..positions.rope import Rope
from ..recipe.spec import Recipe
from ..store import NOTHING, Known, Lane
from .keeper import Keeper
from .layer import Asked, LayerCache, attend_pieces
from .recalled import RecalledLayer
from .segment import Piece, Segment, take
from .slots import Slots
from .spared import SparedLayer


class ScoredLayer(LayerCache):
    """A `LayerCache` with a `Keeper`; sinks stay in their place among the other tokens."""

    keeper: Keeper

    def reset(self) -> None:
        """Forget everything."""
        assert self.recipe.keep is not None
        self.keep = self.recipe.keep
        super().reset()
        self.sinks, self.body.first = None, 0
        self.keeper = Keeper(self.keep, self.recipe.protect.sinks, self.place)
        self.slots: Slots | None = None
        self.fresh: Tensor | None = None  # scores that wait for the other layers'
        self.see: Tensor | None = None  # the padding mask of the running step
        self.choice: tuple[Tensor, Tensor] | None = None  # the last one's, while `trace`
        self.together: list[ScoredLayer] = getattr(self, "together", [self])

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors held."""
        slots = 0 if self.slots is None else self.slots.nbytes
        waiting = 0 if self.held is None else self.held.q.nbytes
        return self.body.nbytes + self.keeper.nbytes + slots + waiting

    @property
    def parts(self) -> list[Any]:
        """The objects that a step changes."""
        own = [*super().parts, self.keeper, self.keeper.scores]
        return own if self.slots is None else [*own, self.slots]

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
        """Attend as `LayerCache` does, in the slots where one token comes and one goes."""
        if self.slots is not None and (k.shape[2] > 1 or self.recording):
            self._unroll()
        if self.slots is None:
            return super()._attend(q, k, v, scale, valid, softcap, alibi)
        self.check(k, v)
        see = None if valid is None else valid[:, None, :]
        most = None if k.is_cuda else self.most  # see check_range
        if not self.slots.append(k.detach(), v.detach(), self.seen, most):
            raise self._beyond(k, v)
        alibi = None if alibi is None else self._spaced(alibi)
        piece, index = self.slots.piece(see, alibi), self.slots.index
        if self.rope is not None:
            piece = piece._replace(keys=self._moved(piece.exact_keys, index, self.seen))
        products: list[Tensor] | None = [] if self._scores_steps else None
        out = attend_pieces(q, [piece], scale, softcap, products, self.plans)
        self.seen, self.read = self.seen + 1, piece.tokens
        self.see = see
        k, real = piece.exact_keys, None
        scores = self.keeper.step(
            q.detach(), k, scale, softcap, piece.valid, real, index, self.seen, piece.bias,
            products[0] if products else None,
        )  # fmt: skip
        self._vote(scores)
        return out

    def logical(self) -> Tensor:
        """Logical indices as `LayerCache.logical` gives them, in slots in no order."""
        return super().logical() if self.slots is None else self.slots.logical()

    def check(self, k: Tensor, v: Tensor) -> None:
        """Refuse what `LayerCache.check` does, and a prompt too short for the layers' budgets."""
        super().check(k, v)
        if self.like is None:
            self.keep.rooms(k.shape[2], self.place[1])

    def check_crop(self, tokens: int) -> None:
        """Refuse what `LayerCache.check_crop` does, and to go back behind what was chosen once."""
        super().check_crop(tokens)
        later = len(self.body) - self.body.kept
        if self.body.kept and later < tokens < self.seen:
            raise CacheMisuse(
                f"{self.name}: crop of {tokens} tokens reaches into the prompt, of which some were "
                f"dropped; the newest {later} can be removed"
            )

    def map(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Apply fn to every tensor held, along the batch dimension."""
        super().map(fn)
        self.keeper.map(fn)
        if self.slots is not None:
            self.slots.map(fn)

    @property
    def dropped(self) -> int:
        """Tokens seen, of every row and head, that are not held any more."""
        return self.seen - len(self.body if self.slots is None else self.slots)

    @property
    def _final(self) -> bool:
        return self.keep.when != "prompt" and self.dropped > 0

    @property
    def _scores_steps(self) -> bool:
        scores = self.seen > 0 and not self.keeper.done and not self.recording
        return scores and self.keep.scorer.weighs and self.keep.when != "prompt"

    @property
    def _dense(self) -> bool:
        return not self.keeper.done and self.recipe.store.exact

    def _hold(self, asked: Asked) -> None:
        before = self.held
        super()._hold(asked)
        if self.keeper.done or (self.keep.when == "prompt" and len(self.keeper.scores)):
            return
        if before is not None:
            asked = asked._replace(q=torch.cat([before.q, asked.q], dim=2))
        self.held = asked

    def _take(self, k: Tensor, v: Tensor, asked: Asked) -> None:
        t = k.shape[2]
        if self.seen > t:  # later turns of a packed store: everything stays
            super()._take(k, v, asked)
            return
        self.keeper.begin(t)
        if self.recording or self.keeper.waits:
            recording, self.recording = self.recording, True
            super()._take(k, v, asked)
            self.recording = recording
            if not recording:
                self._settle(self.held)
            return
        index = torch.arange(t, device=k.device).expand(1, 1, -1)
        scores = self._scores(asked, k, asked.see, index)
        self.keeper.observe(scores, asked.see)
        self._note()
        slots = self._choose(t, asked.see)
        if slots is not None:
            self.body.chosen(slots, t, self._needs_index(asked))
            k, v = self._closed_up(take(k, slots), slots, t), take(v, slots)
        super()._take(k, v, asked)
        self._after_choice()

    def _settle(self, asked: Asked | None) -> None:
        if asked is None or self.keeper.done or not asked.q.shape[2]:
            super()._settle(asked)
            return
        self.held = asked
        see, keys = self.body.see(asked.see), self.body.exact_keys()
        index = self.body.logical(0, len(self.body), keys.device)
        if self._reads_moved:
            keys = self._moved(keys, index, self.seen - 1)
        self._vote(self._scores(asked, keys, see, index))

    def _scores(self, asked: Asked, k: Tensor, see: Tensor | None, index: Tensor) -> Tensor:
        """How the queries score the tokens k [B, Hk, N, D] at index; see: bool [B, 1 or Hk, N]."""
        real = None if asked.see is None else asked.see[:, :, -asked.q.shape[2] :]
        bias = None if asked.alibi is None else self.body.bias(asked.alibi, 0, k.shape[2])
        return self.keeper.step(
            asked.q, k, asked.scale, asked.softcap, see, real, index, self.seen, bias,
            asked.products,
        )  # fmt: skip

    @property
    def _reads_moved(self) -> bool:
        """Whether the keys held stand where they were given, and every step moves them.

        What is chosen once moves once, when it is stored.
        """
        return self.rope is not None and self.keep.when != "prompt"

    def _moved(self, k: Tensor, index: Tensor, newest: int) -> Tensor:
        """Keys k [B, Hk, N, D] of tokens at index [B or 1, Hk or 1, N], renumbered up to newest."""
        assert self.rope is not None
        rank = index.argsort(dim=-1).argsort(dim=-1)
        return self.rope.turn(k, newest + 1 - index.shape[-1] + rank - index)

    def _closed_up(self, k: Tensor, slots: Tensor, tokens: int) -> Tensor:
        """Keys k [B, Hk, M, D], chosen once from `tokens` tokens at slots, renumbered for good."""
        if self.rope is None or self.keep.when != "prompt":
            return k
        m = slots.shape[-1]
        return self.rope.turn(k, torch.arange(tokens - m, tokens, device=k.device) - slots)

    def _past(self, see: Tensor | None, alibi: Alibi | None, present: int) -> list[Piece]:
        pieces = super()._past(see, alibi, present)
        if not self._reads_moved or not pieces:
            return pieces
        (piece,) = pieces  # all exact
        index = self.body.logical(0, len(self.body), piece.exact_keys.device)
        newest = self.seen + present - 1
        return [piece._replace(keys=self._moved(piece.exact_keys, index, newest))]

    def _vote(self, scores: Tensor) -> None:
        """Decide by these scores, at once or when the last layer has its own."""
        if not self.keeper.waits:
            self._decide(scores)
            return
        self.fresh = scores
        if self is self.together[-1]:
            votes = [layer.fresh for layer in self.together if layer.fresh is not None]
            if self.keep.shared:
                total = torch.stack([vote.to(scores.device) for vote in votes]).sum(dim=0)
                votes = [total.to(vote.device) for vote in votes]
            if self.keeper.budget_waits:
                variances = [vote.var(dim=-1).mean().item() for vote in votes]
                for layer in self.together:
                    layer.keeper.divide(variances)
            for layer, vote in zip(self.together, votes, strict=True):
                layer.fresh = None
                layer._decide(vote)

    def _decide(self, scores: Tensor) -> None:
        """Take a step's scores [B, Hk, N] into account and drop down to the budget."""
        if self.slots is not None:
            total = self.keeper.add(self.slots.scores, scores)
            if self.trace:
                self.choice = self.slots.index.long(), total
            self.slots.evict(total, self.slots.see(self.see), self.seen - self.keeper.recent)
            return
        asked = self.held
        see = None if asked is None else self.body.see(asked.see)
        self.keeper.observe(scores, see)
        self._note()
        slots = self._choose(len(self.body), see)
        if slots is not None:
            tokens = len(self.body)
            self.body.keep(slots, self._needs_index(asked))
            tail = self.body.keys.tail
            tail.replace(self._closed_up(tail.view(), slots, tokens))
        self._after_choice()
        if self.slots is None and self.keeper.done:  # the prompt, which has waited
            self.body.seal(None if asked is None else asked.see, prompt=True)
        super()._settle(asked)

    def _choose(self, tokens: int, see: Tensor | None) -> Tensor | None:
        """Slots [B, Hk, M] of `tokens` tokens that stay, None: all of them."""
        return self.keeper.choose(tokens, see)

    def _surplus(self, tokens: int) -> int:
        return 0  # age decides nothing here

    def _needs_index(self, asked: Asked | None) -> bool:
        """Whether somebody will ask which stayed: padding, ALiBi, RoPE, a later choice, a trace."""
        hidden = asked is not None and not (asked.see is None and asked.alibi is None)
        placed = self.trace or self.recipe.store.pre_rope
        return placed or hidden or self.keep.when != "prompt"

    def _note(self) -> None:
        """Let a trace see what the choice is made from: logical indices and scores [B, Hk, N]."""
        if self.trace:
            scores = self.keeper.scores.view()[..., 0].clone()
            index = self.body.logical(0, scores.shape[-1], scores.device)
            self.choice = index.expand_as(scores), scores

    def _after_choice(self) -> None:
        if self.keep.when == "prompt":
            self.keeper.finish()
        elif self.keep.when == "step" and len(self.body) == self.keeper.room and not self.recording:
            self._roll()

    def _roll(self) -> None:
        """Move a full body into slots."""
        body, keys = self.body, self.body.exact_keys()
        index = body.logical(0, len(body), keys.device).expand(*keys.shape[:3])
        self.slots = Slots(
            keys,
            body.values.tail.view(),
            self.keeper.scores.view()[..., 0],
            index.int(),
        )
        self.body = Segment(Lane(None, 0), Lane(None, 0))
        self.keeper.forget()

    def _unroll(self) -> None:
        """Move the slots back into a body, oldest first."""
        assert self.slots is not None
        keys, values, scores, index = self.slots.unroll()
        self.body = Segment(Lane(None, 0), Lane(None, 0))
        self.body.append(keys, values)
        self.body.index, self.body.kept = index, keys.shape[2]
        self.body.first = self.seen - keys.shape[2]
        self.keeper.scores.replace(scores.unsqueeze(-1))
        self.slots = None


class ThinnedLayer(RecalledLayer, ScoredLayer):
    """Drops tokens of the prompt by score, once, and recalls from what stayed and what came after.

    Sinks lie at the front of the body, where every step reads them; then padding, if any stayed.
    """

    def _choose(self, tokens: int, see: Tensor | None) -> Tensor | None:
        sink = self.keeper.scores.view()[..., 0] == torch.inf
        slots = super()._choose(tokens, see)
        if see is None:
            return slots
        if slots is None:
            slots = torch.arange(tokens, device=see.device).expand(*sink.shape[:2], -1)
        rest = torch.where(see.expand(-1, sink.shape[1], -1), 2, 1)
        first = rest.masked_fill_(_longer(sink, tokens), 0).gather(2, slots)
        return slots.gather(2, first.argsort(dim=-1, stable=True))

    def _decide(self, scores: Tensor) -> None:
        super()._decide(scores)
        self._index()  # where layers wait for each other, the last of them decides for all

    def _index(self) -> None:
        if self.keeper.done:
            super()._index()


def _longer(x: Tensor, tokens: int) -> Tensor:
    """Bool x [B, Hk, N] with False behind it, up to `tokens`."""
    return torch.cat([x, x.new_zeros(*x.shape[:2], tokens - x.shape[2])], dim=2)


def layer_cache(
    recipe: Recipe,
    name: str,
    place: tuple[int, int],
    rope: Rope | None = None,
    known: Known = NOTHING,
) -> LayerCache:
    """The cache of one layer: by score where the recipe has one, else by age; or with a rule.

    Or it recalls, from all tokens or from those that stayed.
    """
    scored = recipe.keep is not None and not recipe.keep.by_age
    if recipe.recall is not None and place[0] >= recipe.recall.full_layers:
        recalls = ThinnedLayer if scored else RecalledLayer
        return recalls(recipe, name, place, rope, known)
    spared = recipe.protect.spare is not None
    kind = ScoredLayer if scored else SparedLayer if spared else LayerCache
    return kind(recipe, name, place, rope, known)


def link(layers: list[LayerCache]) -> None:
    """Tell the layers of a cache of each other, first to last."""
    together = [layer for layer in layers if isinstance(layer, ScoredLayer)]
    for layer in together:
        layer.together = together
