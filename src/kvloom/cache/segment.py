"""A stretch of tokens in one format.

A segment knows the logical index of each token it holds (its place in the sequence, padding
included); padding, causality and positions follow from it. Knows nothing of recipes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..kernels import ops
from ..kernels.append.reference import within
from ..kernels.attend import reference as ref
from ..kernels.attend.kv_view import KVView
from ..kernels.plan import Plan
from ..kernels.select.reference import gather
from ..positions.alibi import Alibi
from ..store.lane import Lane, Part
from ..store.packed import PackedView

# Packed tokens are unpacked this many at a time: bounds the exact copy a step makes of them.
_UNPACK = 8192


class Choice(NamedTuple):
    """Which tokens of strands a piece is: at slots int64 [B, H, M], and all from `begin` on.

    first: exact keys and values [B, Hk, S, D] before them.
    """

    slots: Tensor
    begin: int
    first: ref.First | None = None

    def tokens(self, held: Any) -> int:
        """How many, of a strand."""
        before = 0 if self.first is None else self.first[0].shape[2]
        return before + self.slots.shape[2] + held.tokens - self.begin


class Piece(NamedTuple):
    """Tokens whose keys share one form and whose values share one form, ready to attend to.

    The last `causal` tokens are those of the step itself (0: all are in the past of all queries).
    valid: bool [B, 1, N], or None when every token may be seen. bias: fp32 [B, Hq, N], added to the
    logits. choice: only these tokens of two strands, in the order named there, for one query.
    parts: gives the same as pieces that the reference attends to one by one, where this is not one.
    """

    keys: Tensor | PackedView | KVView
    values: Tensor | PackedView | KVView
    valid: Tensor | None
    causal: int = 0
    bias: Tensor | None = None
    choice: Choice | None = None
    parts: Callable[[], list[Piece]] | None = None

    @property
    def tokens(self) -> int:
        """How many there are."""
        keys = self.keys
        if isinstance(keys, Tensor):
            return keys.shape[2]
        if isinstance(keys, PackedView):
            return keys.hi - keys.lo
        return keys.tokens if self.choice is None else self.choice.tokens(keys)

    @property
    def exact_keys(self) -> Tensor:
        """The keys [B, Hk, N, D], unpacked if need be."""
        return _exact(self.keys)

    def attend(
        self,
        q: Tensor,
        scale: float,
        softcap: float | None,
        plans: tuple[Plan, Plan] | None = None,
    ) -> ref.State:
        """Attend q [B, Hq, T, D] to this piece; plans: as in `fused`."""
        state = self.fused(q, scale, softcap, plans=plans)
        if state is None and self.parts is not None:
            return ref.merge([part.attend(q, scale, softcap) for part in self.parts()])
        return state or ref.attend(
            q,
            self.exact_keys,
            _exact(self.values),
            scale,
            causal=self.causal > 0,
            valid=self.valid,
            softcap=softcap,
            bias=self.bias,
        )

    def fused(
        self,
        q: Tensor,
        scale: float,
        softcap: float | None,
        products: list[Tensor] | None = None,
        plans: tuple[Plan, Plan] | None = None,
    ) -> ref.State | None:
        """Attend as `attend` does, by a kernel that leaves the tokens as they are, if one does.

        products: as in `kernels.ops.attend`. plans: of `ops.attend` and `ops.attend_gathered`.
        """
        if isinstance(self.keys, PackedView) or isinstance(self.values, PackedView):
            ops.attend_in_parts(q, _format(self.keys), _format(self.values))
            return None
        keys, values = _strand(self.keys), _strand(self.values)
        valid, bias = self.valid, self.bias
        if self.choice is not None:
            slots, begin, first = self.choice
            gathered = (
                ops.attend_gathered.bind(q, keys, values, slots).run
                if plans is None
                else plans[1].bind(q, keys, values, slots)
            )
            return None if gathered is None else gathered(
                q, keys, values, slots, begin, scale,
                first=first, valid=valid, softcap=softcap, bias=bias,
            )  # fmt: skip
        attend = (
            ops.attend.bind(q, keys, values).run
            if plans is None
            else plans[0].bind(q, keys, values)
        )
        return None if attend is None else attend(
            q, keys, values, scale,
            causal=self.causal > 0, valid=valid, softcap=softcap, bias=bias, products=products,
        )  # fmt: skip


class Segment:
    """Tokens in order, keys and values packed on schedules of their own.

    Token j has the logical index first + j, but for the first `kept` ones: those were chosen from
    more, per key/value head, and `index` [B, Hk, kept] says which they are (None: no padding was
    among them, and nobody asks). The first `away` tokens lie elsewhere, where `give` has put them;
    they count in all numbers of tokens.
    """

    def __init__(self, keys: Lane, values: Lane) -> None:
        self.keys, self.values = keys, values
        self.first = 0
        self.kept = 0
        self.away = 0
        self.index: Tensor | None = None
        self.start: Tensor | None = None  # [B], where rows begin; None: at 0, or nobody asks
        self.begun = False  # start is final
        self.append_step = Plan(ops.append)

    def __len__(self) -> int:
        return self.away + len(self.keys)

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors held."""
        more = (self.index, self.start)
        return self.keys.nbytes + self.values.nbytes + sum(x.nbytes for x in more if x is not None)

    @property
    def parts(self) -> list[Any]:
        """The objects that a step changes: this one and its buffers."""
        return [self, *self.keys.parts, *self.values.parts]

    @property
    def exact(self) -> int:
        """Newest tokens whose keys and values are both still exact: those that crop can remove."""
        if self.keys.packed is None and self.values.packed is None:
            return len(self)
        return len(self.keys) - max(self.keys.sealed, self.values.sealed)

    def exact_keys(self) -> Tensor:
        """The exact keys [B, Hk, N, D]: all of them where nothing is packed."""
        return self.keys.tail.view()

    def append(self, k: Tensor, v: Tensor, most: tuple[float, ...] | None = None) -> bool:
        """Add k, v [B, Hk, T, D], exact for now, or nothing where numbers are above `most`.

        most: the largest magnitude of keys and of values; None: nobody looks at the numbers.
        Returns whether they were added.
        """
        keys, values, t = self.keys.tail, self.values.tail, k.shape[2]
        to_keys, to_values = keys.spare(t), values.spare(t)
        if to_keys is None or to_values is None:  # no room is made for what is refused
            if most is not None and not within((k, v), most):
                return False
            most, to_keys, to_values = None, keys.room(k), values.room(v)
        if not self.append_step((k, v), (to_keys, to_values), most):
            return False
        keys.stop += t
        values.stop += t
        return True

    def take(self, k: Tensor, v: Tensor, drop: int, valid: Tensor | None = None) -> None:
        """Add k, v, drop the `drop` oldest tokens, seal what is due.

        valid: bool [B, 1, seen tokens] by logical index, False for padding.
        """
        real = None if valid is None else self._see(valid, self.away, len(self) + k.shape[2])
        self._begin(valid)
        self.keys.take(k, drop, real, self.positions)
        self.values.take(v, drop, real)
        self.first += drop

    def keep(self, slots: Tensor, index: bool) -> None:
        """Keep only slots [B, Hk, M] of the tokens, all exact; index: remember which they are."""
        self.chosen(slots, len(self), index)
        for lane in (self.keys, self.values):
            lane.tail.replace(take(lane.tail.view(), slots))

    def chosen(self, slots: Tensor, tokens: int, index: bool) -> None:
        """Note that slots [B, Hk, M] were chosen from `tokens` tokens, before these are dropped."""
        if index:
            known = self.logical(0, tokens, slots.device).expand(*slots.shape[:2], -1)
            self.index = known.gather(2, slots).int()
        self.kept = slots.shape[-1]
        self.first += tokens - self.kept

    def drop_front(self, n: int) -> None:
        """Drop the n oldest tokens, which must be exact."""
        self.keys.tail.drop_front(n)
        self.values.tail.drop_front(n)
        self.first += n

    def give(self, n: int) -> list[Part]:
        """Give the n oldest tokens that lie here away, their keys and their values."""
        self.away += n
        return [lane.give(n) for lane in (self.keys, self.values)]

    def take_back(self, parts: Sequence[Part]) -> None:
        """Put all tokens that are away back in front: keys and values as `give` gave them."""
        for lane, part in zip((self.keys, self.values), parts, strict=True):
            lane.take_back(part, self.away)
        self.away = 0

    def drop_back(self, n: int) -> None:
        """Drop the n newest tokens, which must be exact."""
        self.keys.tail.drop_back(n)
        self.values.tail.drop_back(n)

    def seal(self, valid: Tensor | None = None, prompt: bool = False) -> None:
        """Pack what the schedules no longer keep exact; valid as in `take`, prompt as in `Lane`."""
        if self.keys.packed is None and self.values.packed is None:
            return
        real = self.see(valid)
        self._begin(valid)
        self.keys.seal(real, prompt, self.positions)
        self.values.seal(real, prompt)

    def pieces(
        self, valid: Tensor | None, present: int, alibi: Alibi | None = None, begin: int = 0
    ) -> list[Piece]:
        """All here in one piece, or cut where a packed prefix ends; what is whole can be cut still.

        The last `present` tokens are the step's. valid: bool [B, 1, seen tokens] by logical index.
        begin: leave out what is before.
        """
        away = self.away
        scattered = self.index is not None and self.keys.placed  # positions with gaps
        if not present or begin > away or scattered:
            return self._cut(valid, present, alibi, max(begin, away))
        keys, values = self.keys.whole(self.positions), self.values.whole()
        see, bias = self.see(valid), None if alibi is None else self.bias(alibi, away, len(self))
        if keys.fmt is None and values.fmt is None:
            return [Piece(keys.tail, values.tail, see, present, bias)]
        cut = partial(self._cut, valid, present, alibi, away)
        return [Piece(keys, values, see, present, bias, parts=cut)]

    def _cut(
        self, valid: Tensor | None, present: int, alibi: Alibi | None, begin: int
    ) -> list[Piece]:
        """What `pieces` gives for the reference: it unpacks, so a long prefix is cut too."""
        n, away = len(self), self.away
        packed = range(0, max(self.keys.sealed, self.values.sealed), _UNPACK)
        ends = {away + end for end in (*packed, self.keys.sealed, self.values.sealed)} | {n}
        cuts = [begin, *sorted(end for end in ends if end > begin)]
        pieces = []
        for lo, hi in pairwise(cuts):
            see = self.see(valid, lo, hi)
            keys = self.keys.view(lo - away, hi - away, self.positions)
            values = self.values.view(lo - away, hi - away)
            bias = None if alibi is None else self.bias(alibi, lo, hi)
            pieces.append(Piece(keys, values, see, present if hi == n else 0, bias))
        return pieces

    def see(
        self, valid: Tensor | None, lo: int | None = None, hi: int | None = None
    ) -> Tensor | None:
        """`valid` by token lo to hi (None: from the first that lies here to the last).

        Returns bool [B, 1 or Hk, hi - lo].
        """
        if valid is None:
            return None
        return self._see(valid, self.away if lo is None else lo, len(self) if hi is None else hi)

    def bias(self, alibi: Alibi, lo: int, hi: int) -> Tensor:
        """ALiBi's bias on tokens lo to hi, fp32 [B, Hq, hi - lo]."""
        device = alibi.position.device
        if alibi.closed_up:
            index = torch.arange(self.first + lo, self.first + hi, device=device).expand(1, 1, -1)
        else:
            index = self.logical(lo, hi, device)
        return alibi.bias(index)

    def map(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Apply fn to every tensor held, along the batch dimension."""
        self.keys.map(fn)
        self.values.map(fn)
        self.index = None if self.index is None else fn(self.index)
        self.start = None if self.start is None else fn(self.start)

    def positions(self, lo: int, hi: int) -> Tensor:
        """Positions of tokens lo..hi, padding not counted, int64 [B or 1, Hk or 1, hi - lo].

        Right for padding in front; behind it a constant too high, which turning there and back
        does not notice.
        """
        held = self.start if self.index is None else self.index
        device = torch.device("cpu") if held is None else held.device
        assert lo >= self.kept or self.index is not None, "chosen tokens need their index"
        at = self.logical(lo, hi, device)
        return at if self.start is None else at - self.start[:, None, None]

    def _begin(self, valid: Tensor | None) -> None:
        """Note where each row's first real token stands, once, if positions are asked for."""
        if self.begun or not self.keys.placed:
            return
        self.begun, self.start = True, None
        if valid is not None and not valid[:, 0, 0].all():
            self.start = valid[:, 0].int().argmax(dim=-1)  # 0 for a row of padding alone, so far
            self.begun = bool(valid[:, 0].any(dim=-1).all())

    def _see(self, valid: Tensor, lo: int, hi: int) -> Tensor:
        rest = valid[:, :, self.first + max(lo, self.kept) : self.first + hi]
        if lo >= self.kept:
            return rest
        if self.index is None:
            chosen = valid.new_ones(valid.shape[0], 1, min(hi, self.kept) - lo)
        else:
            index = self.index[:, :, lo:hi].long()
            chosen = valid.expand(-1, index.shape[1], -1).gather(2, index)
        return torch.cat([chosen, rest.expand(-1, chosen.shape[1], -1)], dim=2)

    def logical(self, lo: int, hi: int, device: torch.device) -> Tensor:
        """Logical indices of tokens lo to hi, int64 [B or 1, Hk or 1, hi - lo]."""
        begin, end = max(lo, self.kept), max(hi, self.kept)
        later = torch.arange(self.first + begin, self.first + end, device=device)
        if self.index is None or lo >= self.kept:
            return later.expand(1, 1, -1)
        index = self.index[:, :, lo:hi].long()
        return torch.cat([index, later.expand(*index.shape[:2], -1)], dim=-1)


def take(x: Tensor, slots: Tensor) -> Tensor:
    """x [B, Hk, N, D] at slots int64 [B, Hk, M]: [B, Hk, M, D]."""
    return gather(x, slots)


def _format(x: Tensor | PackedView | KVView) -> Any:
    return None if isinstance(x, Tensor) else x.fmt


def _exact(x: Tensor | PackedView | KVView) -> Tensor:
    return x if isinstance(x, Tensor) else x.tensor()


def _strand(x: Tensor | KVView) -> KVView:
    return KVView(None, x) if isinstance(x, Tensor) else x
