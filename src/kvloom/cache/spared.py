"""A layer some of whose prompt is spared from packing: exact copies beside the packed tokens.

The rule sees the first prompt once, with its queries. What it marks among the tokens that are
packed is copied into a segment of its own and hidden in the packed one, so nothing moves and no
group has gaps. Decides when the rule is asked; what it says is `keep.Outliers`'s.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..keep import Step, choose
from ..positions.alibi import Alibi
from ..store import Lane
from .layer import Asked, LayerCache
from .segment import Piece, Segment, take


class SparedLayer(LayerCache):
    """A `LayerCache` with a rule for tokens that stay exact."""

    def reset(self) -> None:
        """Forget everything."""
        super().reset()
        self.spared = Segment(Lane(None, 0), Lane(None, 0))
        self.asked = False  # whether the rule has been

    @property
    def parts(self) -> list[Any]:
        """The objects that a step changes."""
        return [*super().parts, *self.spared.parts]

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors held."""
        waiting = 0 if self.held is None else self.held.q.nbytes
        return super().nbytes + self.spared.nbytes + waiting

    def map(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Apply fn to every tensor held, along the batch dimension."""
        super().map(fn)
        self.spared.map(fn)

    def _take(self, k: Tensor, v: Tensor, asked: Asked) -> None:
        super()._take(k, v, asked)
        if self.recording or self.asked:
            return
        self.asked = True
        if self.seen == k.shape[2]:
            self._spare(k, v, asked)

    def _hold(self, asked: Asked) -> None:
        before = self.held
        super()._hold(asked)
        if not self.asked:  # the rule will want to know who asked
            q = asked.q if before is None else torch.cat([before.q, asked.q], dim=2)
            self.held = asked._replace(q=q)

    def _settle(self, asked: Asked | None) -> None:
        if self.asked or asked is None or not len(self.body):
            super()._settle(asked)
            return
        self.asked = True
        first = self._all_exact()
        super()._settle(asked)
        self._spare(*first, asked)

    def _all_exact(self) -> tuple[Tensor, Tensor]:
        """Keys and values of all tokens seen, none of which has been packed yet."""
        held = self.body.keys.tail.view(), self.body.values.tail.view()
        sinks = self.sinks
        if sinks is None or sinks.keys is None or sinks.values is None or sinks.start is None:
            return held
        slot = torch.arange(self.body.first, device=held[0].device) - sinks.start[:, None]
        front = slot.clamp_min(0)[:, None].expand(-1, held[0].shape[1], -1)
        k, v = take(sinks.keys, front), take(sinks.values, front)
        return torch.cat([k, held[0]], dim=2), torch.cat([v, held[1]], dim=2)

    def _spare(self, k: Tensor, v: Tensor, asked: Asked) -> None:
        """Ask the rule about all tokens seen, k, v [B, Hk, N, D]; the oldest are packed by now."""
        rule = self.recipe.protect.outliers
        assert rule is not None
        lanes = [lane for lane in (self.body.keys, self.body.values) if lane.packed is not None]
        lo, n = self.body.first, k.shape[2]
        hi = lo + min(lane.sealed for lane in lanes)
        if hi <= lo:
            return
        index = torch.arange(n, device=k.device).view(1, 1, -1)
        real = None if asked.see is None else asked.see[:, :, -asked.q.shape[2] :]
        step = Step(
            asked.q, k, asked.scale, asked.softcap, asked.see, real, index, n, 0, self.place[0],
            rule.group, None if asked.alibi is None else asked.alibi.bias(index),
        )  # fmt: skip
        scores = rule.scorer(step).to(torch.float32)[..., lo:hi]
        may = asked.see if self.sinks is None else self.sinks.hide(asked.see)
        may = None if may is None else may[..., lo:hi]
        slots = choose(scores, min(rule.tokens, hi - lo), 0, may)
        if slots is None:
            slots = torch.arange(hi - lo, device=k.device).expand(*scores.shape[:2], -1)
        slots = slots + lo
        self.spared.append(take(k, slots), take(v, slots))
        self.spared.index, self.spared.kept = slots.int(), slots.shape[-1]

    def _past(self, see: Tensor | None, alibi: Alibi | None, present: int) -> list[Piece]:
        if self.spared.index is None:
            return super()._past(see, alibi, present)
        index = self.spared.index.long()
        b, hk = index.shape[:2]
        if see is None:
            seen = self.seen + present
            rest = torch.ones(b, hk, seen, dtype=torch.bool, device=index.device)
        else:
            rest = see.expand(-1, hk, -1).clone()
        rest.scatter_(2, index, False)
        return [*self.spared.pieces(see, 0, alibi), *super()._past(rest, alibi, present)]
