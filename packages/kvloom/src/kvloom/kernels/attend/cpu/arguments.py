"""The arguments of the attention kernels: addresses, strides and lookup tables.

Decides how keys and values are described to a kernel; the kernels decide what is computed. Strides
are in bytes. Importing this does not import Numba.
"""

from __future__ import annotations

from functools import cache, lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ....positions.rope import Rope
from ...arguments import (
    MATRIX,
    TOKENS,
    Arguments,
    Block,
    DescribedStorage,
    address,
    on_cpu,
    strides,
)
from ...quantize.hadamard import levels, matrix
from ...quantize.packed_view import PackedView
from ..regions import KVView

ABSENT = (0, 0, 0)  # a `MATRIX` that is not given

PREFIX = Block(  # packed tokens
    codes=TOKENS,  # uint8 [B, Hk, rows, D]
    scale=MATRIX,
    zero=MATRIX,
    meta_row=int,  # bytes of a row of scales
    table=int,  # int32 [Hk, D], each channel's group; or fp32 [16], levels
    table_head=int,  # bytes of a head's table
    first_group=int,  # int64 [Hk], a head's first group among a token's scales
)
_NO_PREFIX = (0,) * PREFIX.numbers
SIDE = Block(  # keys or values: a packed prefix and an exact tail
    prefix=PREFIX,
    packed_tokens=int,  # of the prefix
    tail=TOKENS,  # [B, Hk, N - packed, D]
)

_STEP: dict[str, Any] = {  # what both kernels take
    "batch": int,
    "heads": int,  # heads that see the same tokens: of keys and values, or those that choose
    "rows": int,  # query rows per such head
    "queries": int,
    "tokens": int,  # tokens read of keys and values
    "lead_tokens": int,  # exact tokens that are read before them
    "lead_keys": TOKENS,  # [B, Hk, lead_tokens, D]
    "lead_values": TOKENS,
    "causal": int,
    "splits": int,  # tasks per head
    "scale": float,
    "softcap": float,  # 0: none
    "q": int,  # fp32 [B, Hq, T, D]
    "q_packed": int,  # the same in the space of packed keys
    "query_rotation": int,  # fp32 [D, D], q times it stands in for q_packed; 0: none
    "out": int,  # result: fp32 [B, heads, sets, rows, D]
    "value_rotation": int,  # fp32 [D, D] for packed sums, see `rotated_out`; 0: none
    "rotated_out": int,  # result: exact plus rotated sums, fp32 [B, heads, rows, D]
    "lse": int,  # result: fp32 [B, Hq, T]
    "states": int,  # one state per task
    "sink_logits": int,  # fp32 [Hq], address 0: none
    "bias": MATRIX,  # fp32 [B, Hq, N padded], address 0: none
    "visible": MATRIX,  # bool [B, heads, N padded], address 0: none
    "keys": SIDE,
    "near": int,  # rope_tables, for keys packed before RoPE
    "far": int,
    "positions": MATRIX,  # int64 [B, Hk, packed], or of the first token
    "position_per_token": int,  # 0: tokens follow the first one without gaps
    "values": SIDE,
    "logits": int,  # result: fp32 [B, Hq, T, N padded], scale * q @ k; 0: not wanted
    "logits_row": int,
}
PROMPT = Arguments(
    batch=int,
    group=int,  # query heads per key/value head
    queries=int,
    tokens=int,
    causal=int,  # 1: the queries are those of the last tokens
    head_dim=int,
    kv_heads=int,
    q=int,  # pairs of bf16 [B, Hq, blocks, D / 2, rows], [B, Hq, blocks, rows, D / 2] for tiles
    keys=int,  # pairs [B, Hk, N / panel, D / 2, panel], whole tiles
    values=int,  # pairs [B, Hk, tiles, D / panel, tile / 2, panel]
    visible=MATRIX,  # bool [B, Hk, N], False hides a key
    out=int,  # bf16 [B, Hq, T, D]
    lse=int,  # fp32 [B, Hq, T]
    scale=float,
    scratch=int,  # one area per thread
    scratch_bytes=int,
)

DECODE = Arguments(**_STEP)

GATHERED = Arguments(  # not behind `_STEP`: Numba would take its record for one of DECODE's
    share=int,  # heads that choose per key/value head
    slots_count=int,
    begin=int,  # all tokens from this one on are read, after the chosen ones
    slots=MATRIX,  # int64 [B, heads, slots_count]
    **_STEP,
)

PAGED = Arguments(  # not behind `_STEP`, as GATHERED
    table=int,  # int64 [B, width], the blocks of each row's pages
    table_row=int,  # bytes of a row
    packed_tokens=int,  # int64 [B], in full pages
    lengths=int,  # int64 [B], tokens in all
    tails=int,  # int64 [B], the block of the exact tokens
    sinks=int,  # first tokens of the first page that are read exactly: [blocks, H, sinks, D]
    sink_keys=TOKENS,
    sink_values=TOKENS,
    new_keys=MATRIX,  # [B, H, 1, D], to be stored as each row's last token; address 0: none
    new_values=MATRIX,
    **_STEP,
)

SPANS = Arguments(  # not behind `_STEP`, as GATHERED: the tokens of spans, after the others
    spans=int,  # int64 [B, heads, 2], each head's first token and number
    span_keys=SIDE,
    span_values=SIDE,
    **_STEP,
)


class SidePacker:
    """Packs the arguments of one layer's keys or values, step after step.

    Packs a prefix again only after one of its tensors was replaced.
    """

    def __init__(self) -> None:
        self._storage = DescribedStorage()
        self._prefix = _NO_PREFIX
        self._alive: tuple[Any, ...] = ()  # tables and copies at addresses in `_prefix`
        self._copy: Tensor | None = None  # of exact tokens, if their rows are not contiguous

    def pack(self, view: KVView) -> tuple[int, ...]:
        """Pack a prefix and a tail; both must outlive the kernel's run."""
        packed, exact = view.packed, view.exact
        size, (batch, head, row, channel) = exact.itemsize, exact.stride()
        if channel != 1:
            self._copy = exact = exact.contiguous()
            batch, head, row, _ = exact.stride()
        row *= size
        tail = exact.data_ptr() + view.first * row, batch * size, head * size, row
        if packed is None:
            return SIDE.pack(_NO_PREFIX, 0, tail)
        if not self._storage.holds(packed.codes, packed.scale, packed.zero):
            self._repack(packed, exact.shape[3])
        return SIDE.pack(self._prefix, packed.hi, tail)

    def _repack(self, packed: PackedView, d: int) -> None:
        layer_encoding, table, first, table_head = packed.layer_encoding, None, None, 0
        encoding = layer_encoding.encoding
        stored = packed.codes, packed.scale, packed.zero
        if encoding.rotation == "group":
            table = _levels(encoding.bits)
        elif layer_encoding.group_of is not None:
            groups = layer_encoding.by_layer if encoding.span == "layer" else layer_encoding.by_head
            table, first, table_head = *groups, 4 * d
        read = stored if layer_encoding.static is None else (stored[0], *layer_encoding.multiplied)
        codes, scale, zero = rows = tuple(_rowwise(x) for x in read)
        self._prefix = PREFIX.pack(
            codes=strides(codes, 3), scale=strides(scale, 2), zero=strides(zero, 2),
            meta_row=0 if layer_encoding.static is not None else scale.shape[3] * scale.itemsize,
            table=address(table), table_head=table_head, first_group=address(first),
        )  # fmt: skip
        if all(x is y for x, y in zip(rows, read, strict=True)):
            self._storage.remember(*stored)
            self._alive = (layer_encoding,)
        else:  # tokens appended in place do not reach a copy: make it again at the next step
            self._storage.forget()
            self._alive = (layer_encoding, *rows)


def rope_of(keys: KVView) -> tuple[tuple[int, bool], Any]:
    """Return how a kernel rotates packed keys (channels, interleaved), and the encoding it reads.

    While nothing is packed, keys that will be packed before RoPE are exact keys.
    """
    if keys.packed is None:
        waits = keys.encoding is not None and keys.encoding.pre_rope
        return (0, False), None if waits else keys.encoding
    rope = keys.packed.rope
    rotated = (0, False) if rope is None else (2 * rope.inv_freq.shape[0], rope.interleaved)
    return rotated, keys.encoding


def positions(
    packed: PackedView, rope: Rope, d: int, tokens: int
) -> tuple[dict[str, Any], tuple[Tensor, ...]]:
    """Return the arguments of rope tables and positions; and tensors that must outlive the run.

    tokens: after the first position, where positions are consecutive.
    """
    assert packed.positions is not None
    per_head, per_token = packed.positions.contiguous(), packed.positions.shape[2] > 1
    last = per_head if per_head.numel() == 1 else per_head.max()
    near, far = rope_tables(rope, d, int(last) + (1 if per_token else tokens))
    numbers = {
        "near": near.data_ptr(), "far": far.data_ptr(), "positions": strides(per_head, 2),
        "position_per_token": int(per_token),
    }  # fmt: skip
    return numbers, (near, far, per_head)


def multiplied(q: Tensor, divisor: Tensor) -> Tensor:
    """Multiply queries fp32 [B, Hq, T, D] by what packed keys were divided by, [Hk, D]."""
    by_head = q.view(q.shape[0], len(divisor), -1, q.shape[3])
    return (by_head * divisor[:, None]).view(q.shape)


def _rowwise(x: Tensor) -> Tensor:
    """Return x [., ., rows, .] with contiguous rows."""
    if x.is_contiguous():
        return x
    _, _, row, channel = x.stride()
    return x if channel == 1 and row == x.shape[3] else x.contiguous()


@cache
def rotation(group: int, d: int, back: bool = False) -> Tensor:
    """Return M fp32 [d, d] with x M = R x for each group of x; back: transposed. Never freed."""
    blocks = torch.block_diag(*[matrix(group)] * (d // group))
    return (blocks.T if back else blocks).contiguous()


@cache
def _levels(bits: float) -> Tensor:
    """Return the levels of a code, fp32 [16]."""
    table = levels(bits)
    return F.pad(table, (0, 16 - len(table)))


FAR = 128
BEFORE = 8  # multiples of FAR below position 0, for padding
_NEAR = FAR + 640  # rows for any step within the longest tile


def rope_tables(rope: Rope, d: int, tokens: int) -> tuple[Tensor, ...]:
    """Return rows for 0, 1, 2 … and for FAR times -BEFORE … tokens / FAR: fp32 [rows, 2, d].

    A query rotated back by p has the same product with a key rotated by j as with that key rotated
    by p + j. So a kernel rotates the query once per tile, to the tile's first token, in two table
    look-ups: a multiple of `FAR`, then the remainder. It rotates keys by their distance from that
    token. The tables are few enough to stay in the core's cache.

    A row holds the cosines of all channels, 1 for a channel that does not rotate, and then the
    sines, negated for the first of a pair: x rotates to x * cosine + its partner * sine.
    """
    far = BEFORE + 2 + tokens // FAR
    return _tables(tuple(rope.inv_freq.tolist()), rope.interleaved, d, 1 << (far - 1).bit_length())


@lru_cache(maxsize=8)
@on_cpu
def _tables(inv_freq: tuple[float, ...], interleaved: bool, d: int, far: int) -> tuple[Tensor, ...]:
    steps = FAR * torch.arange(-BEFORE, far - BEFORE)
    return tuple(_rows(inv_freq, interleaved, d, n) for n in (torch.arange(_NEAR), steps))


def _rows(inv_freq: tuple[float, ...], interleaved: bool, d: int, steps: Tensor) -> Tensor:
    angle = steps.double()[:, None] * torch.tensor(inv_freq, dtype=torch.float64)
    half, table = len(inv_freq), torch.zeros(len(steps), 2, d, dtype=torch.float32)
    table[:, 0] = 1.0
    if interleaved:
        first, second = slice(0, 2 * half, 2), slice(1, 2 * half, 2)
    else:
        first, second = slice(0, half), slice(half, 2 * half)
    for place, sign in ((first, -1.0), (second, 1.0)):
        table[:, 0, place] = angle.cos().float()
        table[:, 1, place] = (sign * angle.sin()).float()
    return table
