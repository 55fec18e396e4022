"""Decode attention to pages of packed tokens on CUDA tensors: the cases covered, and the call.

Each batch row has its own pages, by a table of blocks; `paged_kernel` does it. A call reads nothing
back from the device: its grid follows from the longest row, which the host knows. Importing this
does not import Triton; the first call does.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from torch import Tensor

from ... import triton_runtime as cuda
from ...arguments import contiguous_rows
from ...limits import Coverage
from ..regions import First, KVView, PageTable
from . import decode
from .arguments import ExactRows, Options
from .decode import Launch, processors, side_arguments, tile_shapes, turn_of

MOST, STAGES = 64, 1  # tokens of a tile, and stages of its loop: with more, some formats spill


def _several_queries(tokens: int, keys: Any, values: Any) -> str | None:
    return None if tokens == 1 else f"{tokens} queries a step are not one"


def _exact_pages(tokens: int, keys: Any, values: Any) -> str | None:
    exact = [side for side, encoding in (("keys", keys), ("values", values)) if encoding is None]
    return (
        f"{' and '.join(exact)}: pages of exact tokens are not read by the table" if exact else None
    )


COVERAGE = Coverage(("one query", _several_queries), ("both sides packed", _exact_pages))


def problems(tokens: int, like: Tensor, keys: Any, values: Any) -> list[str]:
    """Return why no kernel reads pages in these formats, of any number of tokens.

    like: exact keys [blocks, H, page, D]. keys, values: formats of packed tokens, or None.
    """
    return decode.problems(tokens, like, keys, values) + COVERAGE.problems(tokens, keys, values)


@cache
def kernel() -> Any:
    """Import the kernel, and with it Triton."""
    from . import paged_kernel

    return paged_kernel._split_pages


def arguments(
    q: Tensor, keys: KVView, values: KVView, table: PageTable, scale: float, sinks: First | None
) -> Launch:
    """Prepare the call for a case; tensors may be on torch's meta device."""
    b, hq, _, d = q.shape
    heads, like = keys.tail.shape[1], keys.tail.dtype
    ks, vs = side_arguments(keys), side_arguments(values)
    q = q.to(like).contiguous()
    r, count = hq // heads, 0 if sinks is None else sinks[0].shape[2]
    first = [q, q] if sinks is None else [contiguous_rows(x.to(like)) for x in sinks]
    shapes = tile_shapes(d, r, like, min(ks.most, vs.most, MOST))
    programs = b * heads * -(-r // shapes.rows)
    want = max(1, -(-decode.WAVES * processors(q.device) // programs))
    splits = min(table.longest // table.page, want)
    blocks, packed, tokens, tails = table.contiguous
    given = {
        "q_ptr": q, "turn_ptr": turn_of(q, ks), "k": ks.side, "v": vs.side,
        "k_sinks": ExactRows.of(first[0]), "v_sinks": ExactRows.of(first[1]),
        "blocks_ptr": blocks, "packed_ptr": packed,
        "tokens_ptr": tokens, "tails_ptr": tails, "scale": float(scale), "h": heads, "r": r,
        "width": blocks.shape[1], "sinks": count, "splits": splits,
    }  # fmt: skip
    constants = {
        "K": ks.form, "V": vs.form, "D": d, "DP": cuda.padded_size(d), "BM": shapes.rows,
        "BN0": shapes.tokens, "BN1": shapes.alone, "PAGE": table.page, "OPTIONS": Options(),
    }  # fmt: skip
    return Launch(
        programs * (splits + 1), given, constants, shapes.warps, STAGES, shapes.registers, q,
        vs.rotation_size, splits + 1, splits if vs.rotation_size else 0,
    )  # fmt: skip
