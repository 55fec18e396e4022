"""Attention of one layer to packed pages and exact tails, and what it stores.

A step stores first and attends then: a request may share pages that another one fills in the same
step. Every token attends to earlier pages as they are packed, and to the tokens of its own page and
step exactly.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..kernels import AttentionState, KVView, OpPlan, Paged, PageTable, Region, merge, ops
from ..kernels.attend.prompt import attend_tokens
from ..store import PackedView
from .page import PackedPages
from .step import PagedRow, PagedStep, SingleTokenRows

UNPACK_TOKENS = 1024
"""Tokens of the past that a prompt's chunk unpacks at a time."""


class PagedAttention:
    """Attention of one layer.

    pages: its packed pages. tail: exact tokens by block, [blocks, H, N, 2 D].
    """

    def __init__(self, pages: PackedPages, tail: Tensor, scale: float) -> None:
        self.pages, self.tail, self.scale = pages, tail, scale
        layout = pages.layout
        self.page, self.head_dim = layout.tokens, layout.head_dim
        self.sinks = layout.plan.sinks
        self.exact_first = (pages.sinks[:, 0], pages.sinks[:, 1]) if self.sinks else None
        self.nothing = tail.new_empty(1, layout.heads, 0, layout.head_dim)
        self.plan = OpPlan(ops.attend)
        tails = tail.split(layout.head_dim, dim=-1)
        keys, values = (
            KVView(pages.whole(side), x, layer_encoding and layer_encoding.encoding)
            for side, (x, layer_encoding) in enumerate(zip(tails, layout.encodings, strict=True))
        )
        self.views = keys, values

    def run(
        self, step: PagedStep, tails: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor
    ) -> None:
        """Store k, v [tokens, H, D] of all rows of a step, and attend q [tokens, Hq, D] to `out`.

        tails: int64, the block of each row's tail, by `PagedRow.table_row`.
        """
        spans = [slice(row.batch_begin, row.batch_end) for row in step.multi_token_rows]
        exact = [
            self.store(row, tails[row.table_row], k[span], v[span])
            for row, span in zip(step.multi_token_rows, spans, strict=True)
        ]
        if (rows := step.single_rows) is not None:
            index = rows.tokens
            attended = self.decode(rows, rows.table(tails), q[index], k[index], v[index])
            out[index] = attended if isinstance(index, slice) else attended.to(out.dtype)
        for row, span, (seen_k, seen_v) in zip(step.multi_token_rows, spans, exact, strict=True):
            out[span] = self.attend(row, q[span], seen_k, seen_v)
            self.keep(row, tails[row.table_row], seen_k, seen_v)

    # --- one token each

    def decode(
        self, rows: SingleTokenRows, table: PageTable, q: Tensor, k: Tensor, v: Tensor
    ) -> Tensor:
        """Store one token of each row, and attend: q [R, Hq, D], k, v [R, H, D].

        table: of the rows, by the layer's own tails. Returns fp32 [R, Hq, D].
        """
        queries = q.unsqueeze(2)
        new = k.unsqueeze(2), v.unsqueeze(2)
        where = Paged(table, self.exact_first, new)
        keys, values = self.views
        regions = [Region(keys, values, where)]
        bound = self.plan.choose(queries, regions)
        if bound.kernel is None or rows.completes_page:  # a row may read what another one packs
            self.tail[table.tails, :, rows.page_offset] = torch.cat([k, v], dim=-1)
        if rows.completes_page:
            full_k, full_v = self.tail[table.tails[rows.completed_rows]].chunk(2, dim=-1)
            self.pages.write(rows.completed_blocks, full_k, full_v, rows.completed_page_indices)
        if bound.kernel is None:
            return self._one_by_one(rows, table.tails, queries)
        state: AttentionState = bound.run(queries, regions, self.scale)
        return state.out[:, :, 0]

    def _one_by_one(self, rows: SingleTokenRows, blocks: Tensor, q: Tensor) -> Tensor:
        """Attend q [R, Hq, 1, D] to pages that no kernel reads by a table: fp32 [R, Hq, D]."""
        unrolled = rows.unrolled
        exact, seen = self.tail[blocks, :, : unrolled.longest], unrolled.seen
        exact.masked_fill_(~seen[:, None, :, None], 0)  # other bytes of the pool: NaN times 0
        k, v = exact.split(self.head_dim, dim=-1)
        state = ops.attend(q, [Region.exact(k, v, visible=seen.unsqueeze(1))], self.scale)
        if not len(unrolled.pages):
            return state.out[:, :, 0]
        states = [(state, torch.arange(len(q)))]
        hidden = None
        if self.sinks:
            hidden = torch.ones(len(unrolled.pages), 1, self.page, dtype=torch.bool)
            hidden[unrolled.first_pages, :, : self.sinks] = False
            having = rows.rows_with_pages
            states.append((self._sinks(q[having], rows.first_blocks), having))
        owners = unrolled.owners
        packed = self._packed(q[owners], unrolled.pages, unrolled.page_indices, hidden)
        states.append((packed, owners))
        return _merged(states, len(q))

    def _packed(
        self, q: Tensor, blocks: Tensor, numbers: Tensor, visible: Tensor | None
    ) -> AttentionState:
        """Attend one row q [n, Hq, 1, D] to each of the pages int64 [n], with their numbers."""
        keys, values = (self._view(side, blocks, numbers) for side in (0, 1))
        return ops.attend(q, [Region(keys, values, visible=visible)], self.scale)

    def _view(self, side: int, blocks: Tensor, numbers: Tensor) -> KVView:
        """Return keys (0) or values (1) of the pages int64 [n], with their numbers."""
        stored = self.pages.gathered(side, blocks, numbers)
        if not isinstance(stored, PackedView):
            return KVView(None, stored)
        empty_tail = self.nothing.expand(len(blocks), -1, -1, -1)
        return KVView(stored, empty_tail, stored.layer_encoding.encoding)

    def _sinks(self, q: Tensor, blocks: Tensor) -> AttentionState:
        """Attend q [n, Hq, T, D] to the sinks of each row's first page, int64 [n]."""
        k, v = self.pages.sinks[blocks].unbind(1)
        return ops.attend(q, [Region.exact(k, v)], self.scale)

    # --- many tokens of one request

    def store(self, row: PagedRow, block: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Pack the pages that a row's tokens k, v [T, H, D] fill; return what begins exact.

        block: of the row's tail. Returns keys and values [1, H, before + T, D]: the tail before
        these tokens, and them. `keep` stores the rest after the step's attention.
        """
        before = row.token_begin % self.page
        k, v = k.transpose(0, 1)[None], v.transpose(0, 1)[None]
        if before:
            old_k, old_v = self.tail[block, :, :before][None].split(self.head_dim, dim=-1)
            k, v = torch.cat([old_k, k], dim=2), torch.cat([old_v, v], dim=2)
        full, begin = k.shape[2] // self.page, row.token_begin // self.page
        if full:
            whole_k, whole_v = (
                x[0, :, : full * self.page].unflatten(1, (full, self.page)).transpose(0, 1)
                for x in (k, v)
            )
            numbers = torch.arange(begin, begin + full)
            self.pages.write(row.blocks[numbers], whole_k, whole_v, numbers)
        return k, v

    def keep(self, row: PagedRow, block: Tensor, k: Tensor, v: Tensor) -> None:
        """Store the exact tokens after the last full page, of what `store` returned."""
        rest = row.token_end % self.page
        if rest:
            begin = k.shape[2] - rest
            self.tail[block, :, :rest] = torch.cat([k[0, :, begin:], v[0, :, begin:]], dim=-1)

    def attend(self, row: PagedRow, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend a row's tokens q [T, Hq, D]: to its pages before them, and to k, v causally.

        k, v: what `store` returned. Returns [T, Hq, D].
        """
        queries = q.transpose(0, 1)[None]
        state = attend_tokens(queries, k, v, self.scale, causal=True)
        pages = row.blocks[: row.token_begin // self.page]
        if not len(pages):
            return state.out[0].transpose(0, 1).to(q.dtype)
        states = [state]
        if self.sinks:
            states.append(self._sinks(queries, pages[:1]))
        at_once = max(1, UNPACK_TOKENS // self.page)
        for i in range(0, len(pages), at_once):
            these = pages[i : i + at_once]
            k, v = (self._unpacked(side, these, i) for side in (0, 1))
            states.append(attend_tokens(queries, k, v, self.scale, causal=False))
        return merge(states).out[0].transpose(0, 1).to(q.dtype)

    def _unpacked(self, side: int, pages: Tensor, first: int) -> Tensor:
        """Return keys (0) or values (1) of pages `first` and on, but no sinks: [1, H, N, D]."""
        stored = self.pages.gathered(side, pages, torch.arange(first, first + len(pages)))
        x = stored.tensor() if isinstance(stored, PackedView) else stored
        return x.transpose(0, 1).flatten(1, 2)[None, :, 0 if first else self.sinks :]


def _merged(states: list[tuple[AttentionState, Tensor]], rows: int) -> Tensor:
    """Merge states whose rows belong to `rows` rows, int64 each: fp32 [rows, Hq, D]."""
    lse = torch.cat([state.lse[:, :, 0] for state, _ in states])  # [n, Hq]
    out = torch.cat([state.out[:, :, 0] for state, _ in states])
    owner = torch.cat([each for _, each in states])
    top = lse.new_full((rows, lse.shape[1]), -torch.inf)
    top = top.scatter_reduce(0, owner[:, None].expand_as(lse), lse, "amax")
    weights = (lse - top[owner]).exp()
    total = torch.zeros_like(top).index_add(0, owner, weights)
    summed = out.new_zeros(rows, *out.shape[1:]).index_add(0, owner, out * weights[..., None])
    return summed / total[..., None]
