"""Where the tokens of an index live, and which of them lie ready on the device.

A tier holds keys and values token by token, so that it grows at its end: in host memory (pinned
where the device is a GPU) or in a memory-mapped file of its own, which goes with the cache. What
the last steps read stays on the device; only what is not among it is copied there. Decides nothing
of what is read.
"""

from __future__ import annotations

import os
import tempfile
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import RecipeError, TierError
from ..kernels.select.ref import gather

TIERS = {
    "host": "in host memory",
    "file": "in a memory-mapped file",
}


@dataclass(frozen=True)
class Tier:
    """A key of `TIERS`; the file's folder (None: the system's for temporary files).

    steps: what so many last steps read stays on the device.
    """

    kind: str = "host"
    folder: str | None = None
    steps: int = 1

    def __post_init__(self) -> None:
        if self.kind not in TIERS:
            raise RecipeError(f"tier kind={self.kind!r} is not one of {', '.join(TIERS)}")
        if self.folder is not None and self.kind != "file":
            raise RecipeError(f'folder={self.folder!r} needs kind="file", not {self.kind!r}')
        if type(self.steps) is not int or self.steps < 0:
            raise RecipeError(f"steps={self.steps!r} must be a whole number, 0 or more")


class Traffic(NamedTuple):
    """Tokens, of each row and head, found on the device and not; bytes copied to it."""

    hits: int = 0
    misses: int = 0
    nbytes: int = 0


class Rows:
    """Rows [tokens, width] in host memory that grow at their end."""

    def __init__(self, pinned: bool = False) -> None:
        self.pinned = pinned
        self.data: Tensor | None = None
        self.tokens = 0

    @property
    def nbytes(self) -> int:
        """Bytes reserved."""
        return 0 if self.data is None else self.data.nbytes

    def view(self) -> Tensor:
        """The rows [tokens, width], a view."""
        self.check()
        assert self.data is not None
        return self.data[: self.tokens]

    def append(self, x: Tensor) -> None:
        """Add rows [T, width]."""
        need = self.tokens + x.shape[0]
        if self.data is None or need > self.data.shape[0]:
            self.check()
            spare = 0 if self.data is None else max(16, need // 16)
            self.data = self._room(need + spare, x)
        self.data[self.tokens : need] = x
        self.tokens = need

    def check(self) -> None:
        """Raise `TierError` where the rows cannot be read any more."""

    def _room(self, tokens: int, like: Tensor) -> Tensor:
        grown = torch.empty(tokens, like.shape[1], dtype=like.dtype, pin_memory=self.pinned)
        if self.data is not None:
            grown[: self.tokens] = self.data[: self.tokens]
        return grown


class FileRows(Rows):
    """Rows in a memory-mapped file, made in `folder` and removed with this object."""

    def __init__(self, folder: str | None) -> None:
        super().__init__()
        self.folder = folder
        try:
            number, name = tempfile.mkstemp(".kv", "kvloom-", folder)
        except OSError as error:
            where = folder or tempfile.gettempdir()
            raise TierError(
                f"no file for the cache can be made in {where!r} ({error.strerror}); give a folder "
                "that exists and may be written"
            ) from error
        os.close(number)
        self.path = Path(name)
        self._gone = weakref.finalize(self, self.path.unlink, missing_ok=True)

    def __deepcopy__(self, memo: dict) -> FileRows:
        """Copy the rows into a file of their own."""
        twin = FileRows(self.folder)
        if self.data is not None:
            twin.append(self.view())
        return twin

    def check(self) -> None:
        """Raise `TierError` where the file is gone or cut off: reading it would end the process."""
        size = self.path.stat().st_size if self.path.exists() else -1
        if size < self.nbytes:
            raise TierError(
                f"{self.path} has {'vanished' if size < 0 else 'been cut off'}, and the tokens in "
                "it with it; start with a new cache"
            )

    def _room(self, tokens: int, like: Tensor) -> Tensor:
        size = tokens * like.shape[1]
        try:
            with self.path.open("r+b") as file:  # a hole that cannot be filled would end us later
                os.posix_fallocate(file.fileno(), 0, max(1, size * like.element_size()))
        except OSError as error:
            raise TierError(
                f"{self.path} cannot hold {tokens} tokens ({error.strerror}); make room, or give "
                "another folder, and start with a new cache"
            ) from error
        rows = torch.from_file(str(self.path), shared=True, size=size, dtype=like.dtype)
        return rows.view(tokens, like.shape[1])


class Far:
    """Keys and values of the indexed tokens, by slot, in a tier.

    On the device: `near` [B, H, steps * M, 2 D], what the last steps read, M tokens each; `place`
    int32 [B, H, N], where in `near` a slot's token lies, -1 for nowhere.
    """

    def __init__(self, tier: Tier) -> None:
        self.tier = tier
        self.rows: Rows | None = FileRows(tier.folder) if tier.kind == "file" else None
        self.shape: tuple[int, int, int] | None = None  # B, Hk, D
        self.device = torch.device("cpu")
        self.traffic = Traffic()
        self.forget()

    @property
    def tokens(self) -> int:
        """Tokens held."""
        return 0 if self.rows is None else self.rows.tokens

    @property
    def nbytes(self) -> int:
        """Bytes held in all, wherever they are."""
        return self.device_nbytes + (0 if self.rows is None else self.rows.nbytes)

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

    def append(self, k: Tensor, v: Tensor) -> None:
        """Add k, v [B, Hk, T, D]."""
        b, h, t, d = k.shape
        if self.rows is None:
            self.rows = Rows(pinned=k.is_cuda)
        self.shape, self.device = (b, h, d), k.device
        rows = torch.cat([k, v], dim=-1).permute(2, 0, 1, 3).reshape(t, -1)
        self.rows.append(rows.to("cpu"))

    def view(self, lo: int, hi: int) -> tuple[Tensor, Tensor]:
        """Keys and values [B, Hk, hi - lo, D] of tokens lo to hi, on the device."""
        assert self.rows is not None
        assert self.shape is not None
        b, h, d = self.shape
        x = self.rows.view()[lo:hi].to(self.device, non_blocking=True)
        self._count(0, (hi - lo) * b * h)
        x = x.view(-1, b, h, 2 * d).permute(1, 2, 0, 3)
        return x[..., :d].contiguous(), x[..., d:].contiguous()

    def read(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [B, H, M, D] at slots int64 [B, H, M], H a multiple of Hk."""
        assert self.shape is not None
        b, h, m = slots.shape
        d = self.shape[-1]
        self._fit(slots)
        if self.near is None or self.place is None:
            x = self._fetch(slots.flatten(), self._heads(slots).flatten()).view(b, h, m, -1)
            self._count(0, slots.numel())
            return x[..., :d], x[..., d:]
        at = self.place.gather(2, slots).long()
        x = gather(self.near, at.clamp_min(0))
        missed = at < 0
        misses = int(missed.sum())
        if misses:
            x[missed] = self._fetch(slots[missed], self._heads(slots)[missed])
        self._count(slots.numel() - misses, misses)
        self._keep(slots, x)
        return x[..., :d], x[..., d:]

    def map(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Apply fn to every tensor held, along the batch dimension."""
        self.forget()  # blocks of other rows
        if self.rows is None or self.shape is None or not self.tokens:
            return
        b, h, d = self.shape
        by_row = self.rows.view().view(-1, b, h * 2 * d).transpose(0, 1)
        moved = fn(by_row).transpose(0, 1)
        self.shape = (moved.shape[1], h, d)
        rows = FileRows(self.tier.folder) if self.tier.kind == "file" else Rows(self.rows.pinned)
        rows.append(moved.reshape(moved.shape[0], -1))
        self.rows = rows

    def _fit(self, slots: Tensor) -> None:
        """Make room for blocks like this one, and places for tokens that came since."""
        b, h, m = slots.shape
        if self.tier.steps == 0:
            return
        if self.near is None or self.near.shape[1:3] != (h, m * self.tier.steps):
            self.forget()
            assert self.rows is not None
            assert self.shape is not None
            d = 2 * self.shape[-1]
            like = self.rows.view()
            self.near = like.new_empty(b, h, m * self.tier.steps, d, device=self.device)
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

    def _fetch(self, slots: Tensor, heads: Tensor) -> Tensor:
        """Rows [n, 2 D] of tokens at slots [n] of row-and-heads [n], copied to the device."""
        assert self.rows is not None
        assert self.shape is not None
        b, h, d = self.shape
        rows = self.rows.view().view(-1, 2 * d)
        found = rows.index_select(0, (slots * (b * h) + heads).to("cpu"))
        if self.rows.pinned:
            found = found.pin_memory()
        return found.to(self.device, non_blocking=True)

    def _heads(self, slots: Tensor) -> Tensor:
        """Which of the B * Hk rows and heads each of slots [B, H, M] belongs to."""
        assert self.shape is not None
        b, h, m = slots.shape
        hk = self.shape[1]
        head = torch.arange(b * hk, device=slots.device).repeat_interleave(h // hk)
        return head.view(b, h, 1).expand(b, h, m)

    def _count(self, hits: int, misses: int) -> None:
        assert self.rows is not None
        assert self.shape is not None
        token = 2 * self.shape[-1] * self.rows.view().element_size()
        old = self.traffic
        self.traffic = Traffic(old.hits + hits, old.misses + misses, old.nbytes + misses * token)
