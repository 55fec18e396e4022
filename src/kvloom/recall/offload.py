"""The oldest tokens of a layer in a tier, and which of them lie ready on the device.

A token's keys and values lie side by side where both are exact; packed ones lie as they were
packed, codes and metadata, whole groups together. What the last steps read stays on the device,
unpacked, and only what is not among it is copied there. Beams move numbers of rows, not rows.
Decides nothing of what is read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..kernels.select.reference import gather, gather_packed
from .tiers import FileRows, Rows, Tier, Traffic

Part = Tensor | Sequence[Tensor]
"""Keys or values of tokens [B, Hk, T, D]: exact, or their codes, scales and zeros."""


class Form(NamedTuple):
    """How a side of the cache is packed: group channels of a token, or tokens of a channel."""

    bits: float
    axis: str
    group: int
    meta: torch.dtype


class Shelf:
    """Keys, values, or both side by side, in bricks: `unit` tokens of one row and head."""

    def __init__(self, rows: Callable[[], Rows], form: Form | None, unit: int) -> None:
        self.form, self.unit = form, unit
        self.rows = [rows() for _ in range(1 if form is None else 3)]
        self.widths: list[int] = []  # last dimensions of what lies in each of the rows

    @property
    def nbytes(self) -> int:
        """Bytes reserved."""
        return sum(rows.nbytes for rows in self.rows)

    def put(self, part: Part, bricks: int) -> None:
        """Add whole bricks."""
        parts = [part] if isinstance(part, Tensor) else part
        self.widths = [x.shape[-1] for x in parts]
        for rows, x in zip(self.rows, parts, strict=True):
            b, h = x.shape[:2]
            by_brick = x.reshape(b, h, bricks, -1).permute(2, 0, 1, 3)
            rows.append(by_brick.reshape(bricks * b * h, -1))

    def get(self, bricks: Tensor) -> list[Tensor]:
        """What lies in bricks int64 [B, Hk, n]: parts [B, Hk, rows, width]."""
        return [
            rows.view().index_select(0, bricks.flatten()).view(*bricks.shape[:2], -1, width)
            for rows, width in zip(self.rows, self.widths, strict=True)
        ]

    def fetch(self, at: Tensor, dtype: torch.dtype) -> Tensor:
        """Tokens [n, D] at places int64 [n]: brick * unit + token."""
        flat = [
            rows.view().view(-1, width) for rows, width in zip(self.rows, self.widths, strict=True)
        ]
        if self.form is None:
            return flat[0].index_select(0, at)
        form = self.form
        codes, scale, zero = (x[None, None] for x in flat)
        scale, zero = scale.view(form.meta), zero.view(form.meta)
        group = form.group or self.widths[0]
        slots = at[None, None]
        return gather_packed(codes, scale, zero, form.bits, form.axis, group, slots, dtype)[0, 0]


class Far:
    """Keys and values of the oldest tokens, by slot, in a tier.

    forms: of keys and of values, None where they are exact. unit: tokens come in multiples of it,
    so that a format's bytes and groups are whole.

    On the device: `near` [B, H, steps * M, 2 D], what the last steps read, M tokens each; `place`
    int32 [B, H, N], where in `near` a slot's token lies, -1 for nowhere.

    Tokens put away while the batch stayed as it was are a stretch. `stretches` int64 [E, 3]: its
    first slot, batch rows, first brick; `source` int64 [B, E]: which of these rows is b's own.
    """

    def __init__(self, tier: Tier, forms: tuple[Form | None, Form | None], unit: int) -> None:
        self.tier, self.forms, self.unit = tier, forms, unit
        self.shelves = [] if tier.kind == "host" else self.empty_shelves(pinned=False)
        self.stretches = torch.empty(0, 3, dtype=torch.long)
        self.source = torch.empty(1, 0, dtype=torch.long)
        self.tokens = 0
        self.like: Tensor | None = None  # an empty tensor with the keys' shape, dtype and device
        self.traffic = Traffic()
        self.forget()

    @property
    def nbytes(self) -> int:
        """Bytes held in all, wherever they are."""
        return self.device_nbytes + sum(shelf.nbytes for shelf in self.shelves)

    @property
    def parts(self) -> list[Any]:
        """The objects that a step changes; tensors on the device are changed in place."""
        rows = [rows for shelf in self.shelves for rows in shelf.rows]
        return [self, *self.shelves, *rows]

    @property
    def device_nbytes(self) -> int:
        """Bytes of the tensors that lie ready."""
        held = (self.near, self.place, *self.blocks)
        return sum(x.nbytes for x in held if x is not None)

    def forget(self) -> None:
        """Let nothing lie ready."""
        self.near: Tensor | None = None
        self.place: Tensor | None = None
        self.blocks: list[Tensor] = []  # slots of each block of `near`
        self.turn = 0

    def append(self, parts: Sequence[Part], tokens: int, like: Tensor) -> None:
        """Add keys and values of `tokens` tokens, whole units; like: an empty tensor of such keys.

        Raises `TierError` where a file cannot hold them: nothing here is of use then.
        """
        self.like, b = like, like.shape[0]
        if not self.shelves:
            self.shelves = self.empty_shelves(pinned=like.is_cuda)
        here, bricks = torch.arange(b)[:, None], tokens // self.unit
        if self.source.shape[1] == 0 or not torch.equal(self.source[:, -1:], here):
            new = torch.tensor([[self.tokens, b, self._bricks]])
            self.source = torch.cat([self.source.expand(b, -1), here], dim=1)
            self.stretches = torch.cat([self.stretches, new])
        for shelf, part in zip(self.shelves, self._joined(parts), strict=True):
            shelf.put(part, bricks)
        self.tokens += tokens

    def raw(self, lo: int, hi: int) -> list[Part]:
        """Keys and values of tokens lo to hi, whole units, as `append` took them, on the device."""
        assert self.like is not None
        b, h, _, d = self.like.shape
        bricks = torch.arange(lo // self.unit, hi // self.unit) * self.unit
        row, head = torch.arange(b)[:, None, None], torch.arange(h)[:, None]
        at = self._places(bricks.expand(b, h, -1), row, head) // self.unit
        found: list[Part] = []
        nbytes = 0
        for shelf in self.shelves:
            got = [x.to(self.like.device, non_blocking=True) for x in shelf.get(at)]
            nbytes += sum(x.nbytes for x in got)
            joint = len(self.shelves) == 1
            halves = (x.contiguous() for x in got[0].split(d, dim=-1))
            found += halves if joint else [got if shelf.form else got[0]]
        self._count(0, (hi - lo) * b * h, nbytes)
        return found

    def read(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [B, H, M, D] at slots int64 [B, H, M], H a multiple of Hk."""
        assert self.like is not None
        b, h, m = slots.shape
        d = self.like.shape[-1]
        self._fit(slots)
        if self.near is None or self.place is None:
            x = self._fetch(slots, torch.ones_like(slots, dtype=torch.bool)).view(b, h, m, -1)
            self._count(0, slots.numel(), x.nbytes)
            return x[..., :d], x[..., d:]
        at = self.place.gather(2, slots).long()
        x = gather(self.near, at.clamp_min(0))
        missed = at < 0
        misses, nbytes = int(missed.sum()), 0
        if misses:
            fetched = self._fetch(slots, missed)
            x[missed], nbytes = fetched, fetched.nbytes
        self._count(slots.numel() - misses, misses, nbytes)
        self._keep(slots, x)
        return x[..., :d], x[..., d:]

    def map(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Apply fn along the batch dimension: to what lies ready, and to the numbers of rows.

        Rows that nobody follows any more stay, unless the batch has become smaller.
        """
        if self.near is not None and self.place is not None:
            self.near, self.place = fn(self.near), fn(self.place)
            self.blocks = [fn(x) for x in self.blocks]
        if self.like is None:
            return
        batch = self.like.shape[0]
        self.source, self.like = fn(self.source), fn(self.like)
        if self.like.shape[0] < batch:
            self._compact()

    def fresh(self) -> Far:
        """Return an empty tier like this one; what was counted stays."""
        new = Far(self.tier, self.forms, self.unit)
        new.traffic = self.traffic
        return new

    def empty_shelves(self, pinned: bool) -> list[Shelf]:
        """Return empty shelves: one where keys and values are exact, else one for each."""

        def rows() -> Rows:
            return FileRows(self.tier.folder) if self.tier.kind == "file" else Rows(pinned)

        forms = (None,) if self.forms == (None, None) else self.forms
        return [Shelf(rows, form, self.unit) for form in forms]

    @property
    def _bricks(self) -> int:
        """Bricks held."""
        if not len(self.stretches):
            return 0
        assert self.like is not None
        begin, batch, brick = self.stretches[-1].tolist()
        return brick + (self.tokens - begin) // self.unit * batch * self.like.shape[1]

    def _joined(self, parts: Sequence[Part]) -> Sequence[Part]:
        """The parts as the shelves hold them."""
        if len(self.shelves) == 2:
            return parts
        k, v = parts
        assert isinstance(k, Tensor)
        assert isinstance(v, Tensor)
        return [torch.cat([k, v], dim=-1)]

    def _compact(self) -> None:
        """Put all tokens away anew, those of the rows that there are."""
        assert self.like is not None
        new, counted = self.fresh(), self.traffic
        step = max(1, 8192 // self.unit) * self.unit
        for lo in range(0, self.tokens, step):
            hi = min(lo + step, self.tokens)
            new.append(self.raw(lo, hi), hi - lo, self.like)
        self.shelves, self.stretches, self.source = new.shelves, new.stretches, new.source
        self.traffic = counted

    def _places(self, slots: Tensor, row: Tensor, head: Tensor) -> Tensor:
        """Where in the shelves tokens lie, at slots of batch rows' key/value heads, on the host."""
        assert self.like is not None
        begin, batch, brick = self.stretches.unbind(1)
        e = torch.searchsorted(begin.contiguous(), slots.contiguous(), right=True) - 1
        bricks = (slots - begin[e]) // self.unit * batch[e] + self.source[row, e]
        return (brick[e] + bricks * self.like.shape[1] + head) * self.unit + slots % self.unit

    def _fetch(self, slots: Tensor, which: Tensor) -> Tensor:
        """Tokens [n, 2 D] at those of the slots [B, H, M] that `which` names, on the device."""
        assert self.like is not None
        per = slots.shape[1] // self.like.shape[1]  # heads that choose for each key/value head
        row, head, _ = which.nonzero().to("cpu").unbind(1)
        at = self._places(slots[which].to("cpu"), row, head // per)
        found = [shelf.fetch(at, self.like.dtype) for shelf in self.shelves]
        x = found[0] if len(found) == 1 else torch.cat(found, dim=-1)
        if x.device == self.like.device:
            return x
        return x.pin_memory().to(self.like.device, non_blocking=True)

    def _fit(self, slots: Tensor) -> None:
        """Make room for blocks like this one, and places for tokens that came since."""
        b, h, m = slots.shape
        if self.tier.steps == 0:
            return
        if self.near is None or self.near.shape[1:3] != (h, m * self.tier.steps):
            self.forget()
            assert self.like is not None
            self.near = self.like.new_empty(b, h, m * self.tier.steps, 2 * self.like.shape[-1])
            self.place = slots.new_full((b, h, self.tokens), -1, dtype=torch.int32)
        assert self.place is not None
        if self.place.shape[2] < self.tokens:
            new = self.place.new_full((b, h, self.tokens - self.place.shape[2]), -1)
            self.place = torch.cat([self.place, new], dim=2)

    def _keep(self, slots: Tensor, x: Tensor) -> None:
        """Let a block lie ready in the place of the oldest."""
        assert self.near is not None
        assert self.place is not None
        m, block = slots.shape[2], self.turn % self.tier.steps
        lo = block * m
        if len(self.blocks) == self.tier.steps:
            old = self.blocks[block].long()
            at = self.place.gather(2, old)
            left = (at >= lo) & (at < lo + m)  # others lie in newer blocks as well
            self.place.scatter_(2, old, at.masked_fill(left, -1))
            self.blocks[block] = slots.int()
        else:
            self.blocks.append(slots.int())
        self.near[:, :, lo : lo + m] = x
        here = torch.arange(lo, lo + m, device=slots.device, dtype=torch.int32)
        self.place.scatter_(2, slots, here.expand_as(slots))
        self.turn += 1

    def _count(self, hits: int, misses: int, nbytes: int) -> None:
        old = self.traffic
        self.traffic = Traffic(old.hits + hits, old.misses + misses, old.nbytes + nbytes)
