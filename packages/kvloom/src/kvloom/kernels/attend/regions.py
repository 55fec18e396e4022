"""The tokens that a step attends to: regions of stored tokens, and how each is addressed.

Decides the form of this description only; when tokens are packed is decided in `store`, and which
are read in `cache`.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...encoding import Encoding
from ..quantize.packed_view import PackedView

First = tuple[Tensor, Tensor]
"""Exact keys and values [B, Hk, S, D]."""


class KVView(NamedTuple):
    """Keys or values: an encoded prefix, and the exact tokens after it.

    Attributes:
        packed: The prefix; None while no token is packed.
        exact: [B, Hk, any, D], of which the `length` tokens from `first` on follow the prefix.
        encoding: None if no token ever will be packed; a format of another distribution where its
            own code packs.
        first: See `exact`.
        length: None: all tokens of `exact`.
    """

    packed: PackedView | Any | None
    exact: Tensor
    encoding: Encoding | Any | None = None
    first: int = 0
    length: int | None = None

    @property
    def tail(self) -> Tensor:
        """The exact tokens after the prefix, [B, Hk, N, D]."""
        if self.length is None:
            return self.exact
        return self.exact[:, :, self.first : self.first + self.length]

    @property
    def prefix(self) -> int:
        """Packed tokens."""
        return 0 if self.packed is None else self.packed.hi

    @property
    def tokens(self) -> int:
        """Tokens of both."""
        exact = self.exact.shape[2] if self.length is None else self.length
        return exact if self.packed is None else exact + self.packed.hi

    def stored(self, lo: int, hi: int) -> PackedView | Any | Tensor:
        """Return tokens lo to hi as they are stored; they must not cross the end of the prefix."""
        if lo < self.prefix:
            assert self.packed is not None
            return self.packed.cut(lo, hi)
        return self.tail[:, :, lo - self.prefix : hi - self.prefix]

    def tensor(self, lo: int = 0, hi: int | None = None) -> Tensor:
        """Return tokens lo to hi [B, Hk, N, D], unpacked."""
        hi = self.tokens if hi is None else hi
        if self.packed is None:
            return self.tail[:, :, lo:hi]
        end, parts = self.packed.hi, []
        if lo < min(hi, end):
            parts.append(self.packed.cut(lo, min(hi, end)).tensor())
        if hi > end or not parts:
            parts.append(self.tail[:, :, max(0, lo - end) : max(0, hi - end)])
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)


class Slots(NamedTuple):
    """Which tokens are read: those at slots int64 [B, H, M], then all from `begin` on.

    H is a multiple of Hk that divides Hq: heads of a group may have chosen alone.
    """

    slots: Tensor
    begin: int

    @property
    def kind(self) -> Hashable:
        """What a kernel is bound to."""
        return self.slots.shape[1]


class Spans(NamedTuple):
    """The tokens of all heads lie one after the other, without padding, in views [1, 1, M, D].

    Each view has all of them packed, or all exact. bounds: int64 [B, Hk, 2], each head's first
    token, and how many it has. longest: the most tokens of a head.
    """

    bounds: Tensor
    longest: int

    @classmethod
    def of(cls, counts: Tensor) -> Spans:
        """Return the spans of heads with so many tokens, int64 [B, Hk], from the first token on."""
        ends = counts.flatten().cumsum(dim=0).view(counts.shape)
        return cls(torch.stack([ends - counts, counts], dim=-1), int(counts.max()))

    @property
    def kind(self) -> Hashable:
        """What a kernel is bound to."""
        return "spans", self.bounds.shape[1]


@dataclass(frozen=True, eq=False)
class PageTable:
    """Where the tokens of each batch row are; the layers of a step may share it.

    An engine with paged memory gives each request a list of blocks. A full page is packed in its
    block; the exact tokens of a page that is not full are in a block of their own.

    Attributes:
        blocks: int64 [B, width], of a row's packed pages in order.
        packed_tokens: int64 [B], in these, whole pages.
        tokens: int64 [B], packed and exact ones.
        tails: int64 [B], the block of the exact tokens.
        page: Tokens of a page.
        longest: The most tokens of a row.
    """

    blocks: Tensor
    packed_tokens: Tensor
    tokens: Tensor
    tails: Tensor
    page: int
    longest: int

    @cached_property
    def contiguous(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The four tensors, contiguous, as kernels read them by address."""
        return (
            self.blocks.contiguous(), self.packed_tokens.contiguous(),
            self.tokens.contiguous(), self.tails.contiguous(),
        )  # fmt: skip


class Paged(NamedTuple):
    """Each batch row has its own pages, of views of all blocks: [blocks, H, page, D].

    sinks: exact keys and values [blocks, H, S, D], S up to `page`: a row reads those of its first
    packed page in place of the page's first S tokens. new: keys and values [B, H, 1, D] of the last
    token of each row, which are stored in its tail before it attends. Keys before RoPE are rotated
    to their places in the row.
    """

    table: PageTable
    sinks: First | None = None
    new: First | None = None

    @property
    def kind(self) -> Hashable:
        """What a kernel is bound to."""
        return "pages", self.table.page


class Region(NamedTuple):
    """Stored tokens of a layer that a step attends to.

    Attributes:
        keys: Views [B, Hk, N, D], as are the values.
        values: Of the same tokens.
        where: Which of them are read, and where they are; None: all of the views.
        visible: bool [B, 1 or heads, tokens read], False hides a token: of each key/value head, or
            of each head that chose.
        bias: fp32 [B or 1, Hq, tokens read], added to the logits (ALiBi).
        step_tokens: The last tokens, which are of the step itself (0: all are in the past of all
            queries).
    """

    keys: KVView
    values: KVView
    where: Slots | Spans | Paged | None = None
    visible: Tensor | None = None
    bias: Tensor | None = None
    step_tokens: int = 0

    @classmethod
    def exact(cls, k: Tensor, v: Tensor, **options: Any) -> Region:
        """Return exact tokens k, v [B, Hk, N, D] as a region."""
        return cls(KVView(None, k), KVView(None, v), **options)

    def masks(self, lo: int, hi: int) -> tuple[Tensor | None, Tensor | None]:
        """Return `visible` and `bias` of the tokens lo to hi that are read."""
        visible, bias = self.visible, self.bias
        return (
            None if visible is None else visible[..., lo:hi],
            None if bias is None else bias[..., lo:hi],
        )

    def unpacked(self, lo: int, hi: int) -> Region:
        """Return the tokens lo to hi of a region without addressing, exact in the model's dtype."""
        k, v = self.keys.tensor(lo, hi), self.values.tensor(lo, hi)
        visible, bias = self.masks(lo, hi)
        step_tokens = self.step_tokens if hi == self.keys.tokens else 0  # they are the newest
        return Region.exact(k, v, visible=visible, bias=bias, step_tokens=step_tokens)

    @property
    def tokens(self) -> float:
        """Tokens that a step reads of each row and head, on average."""
        stored, where = self.keys.tokens, self.where
        if where is None:  # most often
            return stored
        if isinstance(where, Slots):
            return where.slots.shape[2] + stored - where.begin
        if isinstance(where, Spans):
            return stored / (where.bounds.numel() // 2)
        return float(where.table.tokens.float().mean())
