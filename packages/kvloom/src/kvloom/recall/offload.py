"""The oldest tokens of a layer in a tier, and which of them are resident on the device.

Exact keys and values of a token are adjacent. Packed ones are stored as their format packs them, in
whole units. The tokens that the last steps read stay on the device, unpacked; a step copies only
the others. Reordering a batch moves row numbers, not rows. Does not decide which tokens are read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import Tensor

from ..kernels.select.reference import gather
from ..state import Stateful
from .tiers import FileRows, Rows, Tier, Traffic

_AT_ONCE = 8192  # tokens


class PackedFormat(Protocol):
    """What a tier asks of a format in which tokens are packed."""

    def gather(
        self, tensors: Sequence[Tensor], tokens: int, index: Tensor, dtype: torch.dtype
    ) -> Tensor:
        """Return the tokens [n, D] at `index`, int64 [n], of `tokens` packed ones."""
        ...


class OffloadBuffer(Stateful):
    """Keys, values, or both concatenated, in blocks: `unit` tokens of one row and head.

    Attributes:
        fmt: The format in which tokens are packed; None: they are exact, in one tensor.
        rows: One for each tensor; the block is the row number.
        shapes: The dimensions of each tensor after the tokens.
    """

    children = ("rows",)

    def __init__(self, new_rows: Callable[[], Rows], fmt: PackedFormat | None, unit: int) -> None:
        self.new_rows, self.fmt, self.unit = new_rows, fmt, unit
        self.rows = [new_rows()]  # the others follow once their number is known
        self.shapes: list[list[int]] = []

    def put(self, tensors: Sequence[Tensor], blocks: int) -> None:
        """Append a number of whole blocks."""
        self._make_rows(len(tensors))
        self.shapes = [list(x.shape[3:]) for x in tensors]
        for rows, x in zip(self.rows, tensors, strict=True):
            b, h = x.shape[:2]
            by_block = x.reshape(b, h, blocks, -1).permute(2, 0, 1, 3)
            rows.append(by_block.reshape(blocks * b * h, -1))

    def get(self, blocks: Tensor) -> list[Tensor]:
        """Return the contents of blocks int64 [B, Hk, n]: tensors [B, Hk, rows, ...]."""
        return [
            rows.view().index_select(0, blocks.flatten()).view(*blocks.shape[:2], -1, *shape)
            for rows, shape in zip(self.rows, self.shapes, strict=True)
        ]

    def fetch(self, addresses: Tensor, dtype: torch.dtype) -> Tensor:
        """Return tokens [n, D] at addresses int64 [n]: block * unit + token."""
        tensors = [
            rows.view().view(1, 1, -1, *shape)
            for rows, shape in zip(self.rows, self.shapes, strict=True)
        ]
        if self.fmt is None:
            return tensors[0][0, 0].index_select(0, addresses)
        return self.fmt.gather(tensors, self.rows[0].count * self.unit, addresses, dtype)

    def state(self) -> dict[str, Any]:
        """Return the state; `widths` has the number of a shape of one dimension."""
        shapes = [shape[0] if len(shape) == 1 else shape for shape in self.shapes]
        return {**super().state(), "widths": shapes}

    def load_state(self, state: dict[str, Any], like: Tensor | None) -> None:
        """Load a state that `state` returned."""
        self._make_rows(len(state["rows"]))
        super().load_state(state, like)
        self.shapes = [[x] if isinstance(x, int) else list(x) for x in state["widths"]]

    def _make_rows(self, count: int) -> None:
        """Make the rows of `count` tensors, as far as they are missing."""
        self.rows = [*self.rows, *(self.new_rows() for _ in range(count - len(self.rows)))]


class OffloadStore(Stateful):
    """Keys and values of the oldest tokens, by slot, in a tier.

    An extent is a run of tokens offloaded while the batch stayed the same.

    Attributes:
        formats: Of keys and of values, None where they are exact.
        unit: The store appends tokens in multiples of it, so that a format's units are whole.
        resident: [B, H, steps * M, 2 D] on the device, the tokens that the last steps read, M each.
        resident_index: int32 [B, H, N], the index in `resident` of a slot's token, -1 for none.
        extents: int64 [E, 3], of each its first slot, its batch rows and its first block.
        source: int64 [B, E], which of these rows is b's own.
    """

    tensors = ("resident", "resident_index", "read_slots")
    uncounted = ("like", "source")
    counters = ("tokens", "reads", "extents", "traffic")
    children = ("buffers",)

    def __init__(
        self,
        tier: Tier,
        formats: tuple[PackedFormat | None, PackedFormat | None],
        unit: int,
    ) -> None:
        self.tier, self.formats, self.unit = tier, formats, unit
        self.buffers = [] if tier.kind == "host" else self.empty_buffers(pinned=False)
        self.extents = torch.empty(0, 3, dtype=torch.long)
        self.source = torch.empty(1, 0, dtype=torch.long)
        self.tokens = 0
        self.like: Tensor | None = None  # an empty tensor with the keys' shape, dtype and device
        self.traffic = Traffic()
        self.forget()

    def forget(self) -> None:
        """Discard the resident copies on the device."""
        self.resident: Tensor | None = None
        self.resident_index: Tensor | None = None
        self.read_slots: list[Tensor] = []  # int32 [B, H, M], of each of the last steps
        self.reads = 0

    def append(self, sides: Sequence[Sequence[Tensor]], tokens: int, like: Tensor) -> None:
        """Add `tokens` tokens, whole units; like: an empty tensor of such keys.

        sides: the tensors of keys, and of values: one of exact tokens, or those of their format.
        Raises `TierError` if a file cannot store them; the store is then unusable.
        """
        self.like, b = like, like.shape[0]
        if not self.buffers:
            self.buffers = self.empty_buffers(pinned=like.is_cuda)
        rows, blocks = torch.arange(b)[:, None], tokens // self.unit
        if self.source.shape[1] == 0 or not torch.equal(self.source[:, -1:], rows):
            new = torch.tensor([[self.tokens, b, self._blocks]])
            self.source = torch.cat([self.source.expand(b, -1), rows], dim=1)
            self.extents = torch.cat([self.extents, new])
        if len(self.buffers) == 1:
            (k,), (v,) = sides
            sides = [[torch.cat([k, v], dim=-1)]]
        for buffer, tensors in zip(self.buffers, sides, strict=True):
            buffer.put(tensors, blocks)
        self.tokens += tokens

    def raw(self, lo: int, hi: int) -> list[list[Tensor]]:
        """Return keys and values of tokens lo to hi as `append` took them, on the device.

        lo, hi: whole units.
        """
        assert self.like is not None
        b, h, _, d = self.like.shape
        blocks = torch.arange(lo // self.unit, hi // self.unit) * self.unit
        row, head = torch.arange(b)[:, None, None], torch.arange(h)[:, None]
        block_indices = self._addresses(blocks.expand(b, h, -1), row, head) // self.unit
        sides: list[list[Tensor]] = []
        nbytes = 0
        for buffer in self.buffers:
            tensors = [x.to(self.like.device, non_blocking=True) for x in buffer.get(block_indices)]
            nbytes += sum(x.nbytes for x in tensors)
            sides.append(tensors)
        if len(sides) == 1:
            sides = [[x.contiguous()] for x in sides[0][0].split(d, dim=-1)]
        self._count(0, (hi - lo) * b * h, nbytes)
        return sides

    def read(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values [B, H, M, D] at slots int64 [B, H, M], H a multiple of Hk."""
        assert self.like is not None
        b, h, m = slots.shape
        d = self.like.shape[-1]
        self._fit(slots)
        if self.resident is None or self.resident_index is None:
            x = self._fetch(slots, torch.ones_like(slots, dtype=torch.bool)).view(b, h, m, -1)
            self._count(0, slots.numel(), x.nbytes)
            return x[..., :d], x[..., d:]
        places = self.resident_index.gather(2, slots).long()
        x = gather(self.resident, places.clamp_min(0))
        missed = places < 0
        misses, nbytes = int(missed.sum()), 0
        if misses:
            fetched = self._fetch(slots, missed)
            x[missed], nbytes = fetched, fetched.nbytes
        self._count(slots.numel() - misses, misses, nbytes)
        self._keep(slots, x)
        return x[..., :d], x[..., d:]

    def map(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Apply fn along the batch dimension: to resident tokens, and to the row numbers.

        Rows that are no longer in the batch stay, unless the batch has become smaller.
        """
        if self.like is None:
            return
        batch = self.like.shape[0]
        super().map(fn)
        if self.like.shape[0] < batch:
            self._compact()

    def state(self) -> dict[str, Any]:
        """Return the state, see `Stateful.state`."""
        state = super().state()
        return {"host": {name: state.pop(name) for name in _IN_HOST_MEMORY}, **state}

    def load_state(self, state: dict[str, Any], like: Tensor | None) -> None:
        """Load a state that `state` returned; like: an empty tensor such as the layer's keys."""
        if state["host"]["buffers"] and not self.buffers:
            self.buffers = self.empty_buffers(pinned=like is not None and like.is_cuda)
        super().load_state({**state, **state["host"]}, like)
        self.traffic = Traffic(*state["traffic"])

    def fresh(self) -> OffloadStore:
        """Return an empty store like this one, with its traffic."""
        new = OffloadStore(self.tier, self.formats, self.unit)
        new.traffic = self.traffic
        return new

    def empty_buffers(self, pinned: bool) -> list[OffloadBuffer]:
        """Return empty buffers: one where keys and values are exact, else one for each."""
        new_rows: Callable[[], Rows] = partial(Rows, pinned)
        if self.tier.kind == "file":
            new_rows = partial(FileRows, self.tier.folder)
        formats = (None,) if self.formats == (None, None) else self.formats
        return [OffloadBuffer(new_rows, fmt, self.unit) for fmt in formats]

    def ranges(self) -> Iterator[tuple[int, int]]:
        """Yield ranges of whole units, about `_AT_ONCE` tokens each, that together are all."""
        step = max(1, _AT_ONCE // self.unit) * self.unit
        return pairwise([*range(0, self.tokens, step), self.tokens])

    @property
    def _blocks(self) -> int:
        """The number of blocks."""
        if not len(self.extents):
            return 0
        assert self.like is not None
        begin, batch, block = self.extents[-1].tolist()
        return block + (self.tokens - begin) // self.unit * batch * self.like.shape[1]

    def _compact(self) -> None:
        """Offload all tokens again, for the present rows alone."""
        assert self.like is not None
        new, counted = self.fresh(), self.traffic
        for lo, hi in self.ranges():
            new.append(self.raw(lo, hi), hi - lo, self.like)
        self.buffers, self.extents, self.source = new.buffers, new.extents, new.source
        self.traffic = counted

    def _addresses(self, slots: Tensor, row: Tensor, head: Tensor) -> Tensor:
        """Return the addresses in the buffers of tokens at slots of rows' key/value heads."""
        assert self.like is not None
        begin, batch, block = self.extents.unbind(1)
        extent = torch.searchsorted(begin.contiguous(), slots.contiguous(), right=True) - 1
        blocks = (slots - begin[extent]) // self.unit * batch[extent] + self.source[row, extent]
        return (block[extent] + blocks * self.like.shape[1] + head) * self.unit + slots % self.unit

    def _fetch(self, slots: Tensor, which: Tensor) -> Tensor:
        """Return tokens [n, 2 D] at the slots [B, H, M] where `which` is True, on the device."""
        assert self.like is not None
        per = slots.shape[1] // self.like.shape[1]  # heads that choose for each key/value head
        row, head, _ = which.nonzero().to("cpu").unbind(1)
        addresses = self._addresses(slots[which].to("cpu"), row, head // per)
        fetched = [buffer.fetch(addresses, self.like.dtype) for buffer in self.buffers]
        x = fetched[0] if len(fetched) == 1 else torch.cat(fetched, dim=-1)
        if x.device == self.like.device:
            return x
        return x.pin_memory().to(self.like.device, non_blocking=True)

    def _fit(self, slots: Tensor) -> None:
        """Make room for a step that reads these slots, and indices for new tokens."""
        b, h, m = slots.shape
        if self.tier.steps == 0:
            return
        if self.resident is None or self.resident.shape[1:3] != (h, m * self.tier.steps):
            self.forget()
            assert self.like is not None
            self.resident = self.like.new_zeros(b, h, m * self.tier.steps, 2 * self.like.shape[-1])
            self.resident_index = slots.new_full((b, h, self.tokens), -1, dtype=torch.int32)
        assert self.resident_index is not None
        if self.resident_index.shape[2] < self.tokens:
            missing = self.tokens - self.resident_index.shape[2]
            new = self.resident_index.new_full((b, h, missing), -1)
            self.resident_index = torch.cat([self.resident_index, new], dim=2)

    def _keep(self, slots: Tensor, x: Tensor) -> None:
        """Make the tokens of a step resident, in place of those of the oldest step."""
        assert self.resident is not None
        assert self.resident_index is not None
        m, room = slots.shape[2], self.reads % self.tier.steps
        lo = room * m
        if len(self.read_slots) == self.tier.steps:
            old = self.read_slots[room].long()
            places = self.resident_index.gather(2, old)
            replaced = (places >= lo) & (places < lo + m)  # a later step read the others too
            self.resident_index.scatter_(2, old, places.masked_fill(replaced, -1))
            self.read_slots[room] = slots.int()
        else:
            self.read_slots.append(slots.int())
        self.resident[:, :, lo : lo + m] = x
        index = torch.arange(lo, lo + m, device=slots.device, dtype=torch.int32)
        self.resident_index.scatter_(2, slots, index.expand_as(slots))
        self.reads += 1

    def _count(self, hits: int, misses: int, nbytes: int) -> None:
        old = self.traffic
        self.traffic = Traffic(old.hits + hits, old.misses + misses, old.nbytes + nbytes)


_IN_HOST_MEMORY = ("buffers", "extents", "source")
