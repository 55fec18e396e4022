"""Tokens in order: a packed prefix and an exact tail, for keys and values each.

Decides which logical index each token of a layer has: its number among all tokens seen, padding
included. Visibility, causality and positions follow from it. Independent of recipes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..kernels import ops
from ..kernels.append.reference import within
from ..kernels.attend.regions import KVView, Region, Slots
from ..kernels.plan import OpPlan
from ..positions.alibi import Alibi
from ..state import Stateful
from ..store import KVSide


class Segment(Stateful):
    """Tokens in order, oldest first.

    The first `kept` tokens survived an eviction, and `logical_index` int32 [B, Hk, kept] is theirs
    (None: no padding was among them, and no part of the layer needs the indices). Every later token
    j has the logical index first + j. The first `offloaded` tokens are in an offload store; all
    numbers of tokens include them.
    """

    tensors = ("logical_index", "start")
    counters = ("first", "kept", "offloaded", "start_final")
    children = ("keys", "values")

    def __init__(self, keys: KVSide | None = None, values: KVSide | None = None) -> None:
        self.keys = KVSide() if keys is None else keys
        self.values = KVSide() if values is None else values
        self.first = 0
        self.kept = 0
        self.offloaded = 0
        self.logical_index: Tensor | None = None
        self.start: Tensor | None = None  # [B], logical index of each row's first token; None: 0
        self.start_final = False
        self.append_plan = OpPlan(ops.append)

    @classmethod
    def kept_of(cls, keys: Tensor, values: Tensor, index: Tensor, seen: int) -> Segment:
        """Return N exact tokens [B, Hk, N, D] as a segment; index: int32 [B, Hk, N], of `seen`."""
        segment = cls()
        segment.append(keys, values)
        segment.logical_index, segment.kept = index, keys.shape[2]
        segment.first = seen - segment.kept
        return segment

    def __len__(self) -> int:
        return self.offloaded + len(self.keys)

    @property
    def exact_newest(self) -> int:
        """The number of newest tokens with exact keys and values, which `drop_back` can drop."""
        if self.keys.packed is None and self.values.packed is None:
            return len(self)
        return len(self.keys) - max(self.keys.packed_count, self.values.packed_count)

    @property
    def has_packed(self) -> bool:
        """Whether any token is packed or offloaded."""
        return bool(self.offloaded or self.keys.packed_count or self.values.packed_count)

    @property
    def packed_oldest(self) -> int:
        """The number of oldest tokens in their final format, offloaded ones included.

        All tokens if the recipe packs nothing.
        """
        sides = [side for side in (self.keys, self.values) if side.packed is not None]
        return min([len(self), *(self.offloaded + side.packed_count for side in sides)])

    def exact_keys(self) -> Tensor:
        """Return the exact keys [B, Hk, N, D]: those of all tokens if nothing is packed."""
        return self.keys.tail.view()

    def exact_values(self) -> Tensor:
        """Return the exact values [B, Hk, N, D]: those of all tokens if nothing is packed."""
        return self.values.tail.view()

    def exact(self) -> tuple[Tensor, Tensor]:
        """Return `exact_keys` and `exact_values`."""
        return self.exact_keys(), self.exact_values()

    def unpacked_keys(self, lo: int, hi: int) -> Tensor:
        """Return the keys [B, Hk, hi - lo, D] of tokens lo to hi, none of which is offloaded."""
        return self.views()[0].tensor(lo - self.offloaded, hi - self.offloaded)

    def unpacked_values(self, lo: int, hi: int) -> Tensor:
        """Return the values [B, Hk, hi - lo, D] of tokens lo to hi, none of which is offloaded."""
        return self.values.kv_view().tensor(lo - self.offloaded, hi - self.offloaded)

    def append(self, k: Tensor, v: Tensor, max_abs: tuple[float, ...] | None = None) -> bool:
        """Add k, v [B, Hk, T, D], exact for now, or nothing where a number is above `max_abs`.

        max_abs: the largest magnitude of keys and of values; None skips the check. Returns whether
        the tokens were added.
        """
        keys, values, t = self.keys.tail, self.values.tail, k.shape[2]
        to_keys, to_values = keys.spare_room(t), values.spare_room(t)
        if to_keys is None or to_values is None:  # check first: a refused step allocates nothing
            if max_abs is not None and not within((k, v), max_abs):
                return False
            max_abs, to_keys, to_values = None, keys.room(k), values.room(v)
        if not self.append_plan((k, v), (to_keys, to_values), max_abs):
            return False
        keys.count += t
        values.count += t
        return True

    def extend(
        self,
        k: Tensor,
        v: Tensor,
        drop: int,
        visible: Tensor | None = None,
        prompt: bool = False,
    ) -> None:
        """Add k, v, drop the `drop` oldest tokens, and pack what is due.

        visible: bool [B, 1, seen tokens] by logical index, False for padding and for sinks that are
        exact elsewhere. prompt: as in `pack`.
        """
        nonpadding = self.mask(visible, hi=len(self) + k.shape[2])
        self.keys.extend(k, drop, nonpadding, self.positions, prompt)
        self.values.extend(v, drop, nonpadding, prompt=prompt)
        self.first += drop

    def replace(self, k: Tensor, v: Tensor) -> None:
        """Replace all tokens, which are exact, by those that `note_kept` was told stay.

        k, v: [B, Hk, M, D], contiguous; the segment owns them from now on.
        """
        self.keys.tail.adopt(k)
        self.values.tail.adopt(v)

    def note_kept(self, slots: Tensor, tokens: int, index: bool) -> None:
        """Note that the tokens at slots [B, Hk, M] of `tokens` tokens stay; moves no tensor."""
        if index:
            all_indices = self.logical(0, tokens, slots.device).expand(*slots.shape[:2], -1)
            self.logical_index = all_indices.gather(2, slots).int()
        self.kept = slots.shape[-1]
        self.first += tokens - self.kept

    def drop_front(self, n: int) -> None:
        """Drop the n oldest tokens; of packed ones whole groups."""
        self.keys.drop_front(n)
        self.values.drop_front(n)
        self.first += n

    def drop_back(self, n: int) -> None:
        """Drop the n newest tokens, which must be exact."""
        self.keys.tail.drop_back(n)
        self.values.tail.drop_back(n)

    def offload(self, n: int) -> list[Sequence[Tensor]]:
        """Remove the n oldest tokens that are not offloaded; return the tensors of each side."""
        self.offloaded += n
        return [side.offload(n) for side in (self.keys, self.values)]

    def restore(self, removed: Sequence[Sequence[Tensor]]) -> None:
        """Prepend all offloaded tokens, as `offload` returned them."""
        for side, tensors in zip((self.keys, self.values), removed, strict=True):
            side.restore(tensors, self.offloaded)
        self.offloaded = 0

    def pack(self, visible: Tensor | None = None, prompt: bool = False, later: int = 0) -> None:
        """Pack the tokens that the schedules no longer keep exact.

        visible: as in `extend`. prompt: whether the exact tokens are those of a prompt, which is
        packed at once. later: newest tokens that the schedules do not know yet.
        """
        if self.keys.packed is None and self.values.packed is None:
            return
        nonpadding = None if visible is None else self.mask(visible)
        self.keys.pack(nonpadding, prompt, self.positions, later)
        self.values.pack(nonpadding, prompt, later=later)

    def trim(self) -> None:
        """Release the spare room of exact tokens."""
        self.keys.tail.trim()
        self.values.tail.trim()

    def region(
        self, visible: Tensor | None, step_tokens: int, alibi: Alibi | None = None, begin: int = 0
    ) -> Region:
        """Return the tokens from `begin` on, without offloaded ones.

        The last `step_tokens` tokens are the step's. visible: bool [B, 1, seen tokens] by logical
        index.
        """
        lo, n = max(begin, self.offloaded), len(self)
        mask = self.mask(visible, lo, n)
        bias = None if alibi is None else self.bias(alibi, lo, n)
        keys, values = self.views()
        where = None
        if lo > self.offloaded:
            no_slots = torch.empty(
                *keys.exact.shape[:2], 0, dtype=torch.long, device=keys.exact.device
            )
            where = Slots(no_slots, lo - self.offloaded)
        return Region(keys, values, where, mask, bias, step_tokens)

    def views(self) -> tuple[KVView, KVView]:
        """Return keys and values as they are stored, without offloaded tokens."""
        gaps = self.logical_index is not None
        return self.keys.kv_view(self.positions, gaps), self.values.kv_view()

    def mask(
        self, visible: Tensor | None, lo: int | None = None, hi: int | None = None
    ) -> Tensor | None:
        """Return the mask of tokens lo to hi (None: of all that are not offloaded).

        visible: bool [B, 1, seen tokens] by logical index. Returns bool [B, 1 or Hk, hi - lo].
        """
        if visible is None:
            return None
        lo, hi = self.offloaded if lo is None else lo, len(self) if hi is None else hi
        later = visible[:, :, self.first + max(lo, self.kept) : self.first + hi]
        if lo >= self.kept:
            return later
        if self.logical_index is None:
            kept = visible.new_ones(visible.shape[0], 1, min(hi, self.kept) - lo)
        else:
            index = self.logical_index[:, :, lo:hi].long()
            kept = visible.expand(-1, index.shape[1], -1).gather(2, index)
        return torch.cat([kept, later.expand(-1, kept.shape[1], -1)], dim=2)

    def bias(self, alibi: Alibi, lo: int, hi: int) -> Tensor:
        """Return ALiBi's bias on tokens lo to hi, fp32 [B, Hq, hi - lo]."""
        device = alibi.position.device
        if alibi.closed_up:
            index = torch.arange(self.first + lo, self.first + hi, device=device).expand(1, 1, -1)
        else:
            index = self.logical(lo, hi, device)
        return alibi.bias(index)

    def undoable(self) -> Segment:
        """Return this segment: steps overwrite no live token."""
        return self

    def step_index(self, device: torch.device) -> Tensor:
        """Return the logical indices of all tokens, int64 [B or 1, Hk or 1, N]."""
        return self.logical(0, len(self), device)

    def logical(self, lo: int, hi: int, device: torch.device) -> Tensor:
        """Return the logical indices of tokens lo to hi, int64 [B or 1, Hk or 1, hi - lo]."""
        begin, end = max(lo, self.kept), max(hi, self.kept)
        later = torch.arange(self.first + begin, self.first + end, device=device)
        if self.logical_index is None or lo >= self.kept:
            return later.expand(1, 1, -1)
        index = self.logical_index[:, :, lo:hi].long()
        return torch.cat([index, later.expand(*index.shape[:2], -1)], dim=-1)

    def positions(self, lo: int, hi: int) -> Tensor:
        """Return positions of tokens lo..hi, padding not counted: int64 [B or 1, Hk or 1, hi - lo].

        Right for padding in front; after padding, too high by a constant, which cancels when a
        key is rotated back and forth.
        """
        like = self.start if self.logical_index is None else self.logical_index
        device = torch.device("cpu") if like is None else like.device
        assert lo >= self.kept or self.logical_index is not None, "chosen tokens need their index"
        index = self.logical(lo, hi, device)
        return index if self.start is None else index - self.start[:, None, None]

    def find_start(self, visible: Tensor | None) -> None:
        """Find the logical index of each row's first token, once, if packing needs positions."""
        if self.start_final or not self.keys.needs_positions:
            return
        self.start_final, self.start = True, None
        if visible is not None and not visible[:, 0, 0].all():
            self.start = visible[:, 0].int().argmax(dim=-1)  # 0 for a row of padding alone, so far
            self.start_final = bool(visible[:, 0].any(dim=-1).all())


def joined_mask(
    masks: Sequence[Tensor | None], counts: Sequence[int], like: Tensor
) -> Tensor | None:
    """Join masks of some tokens and of those after them, bool [B, H, all]; None: none has a mask.

    masks: bool [B, 1 or more heads, n], or None where all tokens are visible. counts: the tokens of
    each. like: any tensor [B, H, ...]; H is a multiple of the heads of all masks.
    """
    if all(mask is None for mask in masks):
        return None
    b, h = like.shape[:2]
    parts = [
        like.new_ones(b, h, n, dtype=torch.bool)
        if mask is None
        else mask.repeat_interleave(h // mask.shape[1], dim=1)
        for mask, n in zip(masks, counts, strict=True)
    ]
    return torch.cat(parts, dim=2)
