"""The rows of one step: where their tokens, pages and tails are. Built once for all layers."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from vllm.v1.attention.backend import AttentionMetadataBuilder


@dataclass
class Row:
    """One request's tokens of a step.

    at: its row in vLLM's block tables. begin, end: of its tokens in the step's tensors. start,
    stop: the numbers of these tokens in the request. blocks: int64, of its pages.
    """

    at: int
    begin: int
    end: int
    start: int
    stop: int
    blocks: Tensor


@dataclass
class Step:
    """All rows of a step; `single` are those of one token, in the order of `Rows` of them."""

    rows: list[Row]
    page: int
    many: list[Row] = field(init=False)

    def __post_init__(self) -> None:
        self.single = [row for row in self.rows if row.end - row.begin == 1]
        self.many = [row for row in self.rows if row.end - row.begin > 1]

    @cached_property
    def decode(self) -> Decode | None:
        """The rows of one token together; None if there are none."""
        return Decode(self.single, self.page) if self.single else None


class Decode:
    """The rows of one token each, as tensors.

    at, tokens: int64 [R], the rows in block tables and in the step's tensors. inside: int64 [R],
    the token's place in its page. pages: int64 [P], all full pages of all rows; owner: int64 [P],
    their rows; first: int64, the places of first pages among these. full: the rows whose page this
    token fills, with the blocks that it fills and whether that is the request's first page.
    """

    def __init__(self, rows: list[Row], page: int) -> None:
        self.at = torch.tensor([row.at for row in rows])
        self.tokens = torch.tensor([row.begin for row in rows])
        starts = torch.tensor([row.start for row in rows])
        self.inside = starts % page
        self.longest = int(self.inside.max()) + 1
        self.seen = torch.arange(self.longest) <= self.inside[:, None]  # [R, longest]
        self.counts = starts // page
        found = [row.blocks[: row.start // page] for row in rows]
        self.pages = torch.cat(found)
        self.owner = torch.repeat_interleave(torch.arange(len(rows)), self.counts)
        self.paged = (self.counts > 0).nonzero()[:, 0]  # rows with a page
        self.first = (self.counts.cumsum(0) - self.counts)[self.paged]
        self.full = (self.inside == page - 1).nonzero()[:, 0]
        self.filled = torch.tensor([int(rows[i].blocks[self.counts[i]]) for i in self.full.tolist()])
        self.filled = self.filled.long()
        self.fills_first = self.counts[self.full] == 0


class StepBuilder(AttentionMetadataBuilder):
    """Makes the step of vLLM's metadata."""

    def __init__(self, kv_cache_spec: Any, layer_names: Any, vllm_config: Any, device: Any) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.page = kv_cache_spec.block_size

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> Step:
        """Return the step that vLLM has scheduled."""
        m, page = common_attn_metadata, self.page
        ends = m.query_start_loc_cpu.tolist()
        lengths = m.seq_lens[: m.num_reqs].tolist()
        table = m.block_table_tensor[: m.num_reqs].long()
        rows = []
        for at, stop in enumerate(lengths):
            begin, end = ends[at], ends[at + 1]
            if end > begin:
                start = stop - (end - begin)
                rows.append(Row(at, begin, end, start, stop, table[at, : -(-stop // page)]))
        return Step(rows, page)
