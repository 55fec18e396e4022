"""Quantizing, packing and unpacking on CUDA tensors: which cases, and how they are called.

The results are those of `ref`, to the last bit. What is not covered is said in sentences. Importing
this does not import Triton, the first call does.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .. import cuda
from .ref import ATOM, rows_for, top

if TYPE_CHECKING:
    from ..ahead import Form

_META = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2, torch.float8_e4m3fn: 3}
_TILE = 2048  # numbers a program owns, about


def problems(x: Tensor) -> list[str]:
    """Why tokens like x [B, Hk, N, D] are packed and unpacked by another backend."""
    return cuda.problems(x)


def pack(
    x: Tensor,
    bits: float,
    axis: str,
    group: int,
    meta: torch.dtype,
    real: Tensor | None = None,
    last: Tensor | None = None,
    begun: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize and pack x [B, Hk, N, D]: `ref.pack_codes` of `ref.quantize`, metadata as there.

    last: uint8 [B, Hk, rows of an atom, D], bytes that hold `begun` tokens and have room for more:
    the bytes returned begin with these. Returns (bytes uint8 [B, Hk, rows_for(begun + N, bits), D],
    scale, zero).
    """
    b, h, n, d = x.shape
    if axis == "token":
        scale, zero = _metadata(x, meta, b, h, n, d // group)
        return _pack(x, bits, 0, group, scale, zero, None, last, begun), scale, zero
    scale, zero = _metadata(x, meta, b, h, n // group, d)
    if group % ATOM[bits][0] == 0 and not begun:
        return _pack(x, bits, group, group, scale, zero, real, None, 0), scale, zero
    # 1.5 bits: groups and atoms do not end together, so metadata first, with codes as bytes
    _pack(x, 8, group, group, scale, zero, real, None, 0, top(bits))
    column = torch.arange(d, device=x.device).expand(h, d)
    return pack_given(x, bits, scale, zero, column, group, last, begun), scale, zero


def pack_mapped(
    x: Tensor,
    bits: float,
    group_of: Tensor,
    meta: torch.dtype,
    clip: Tensor | float = 1.0,
    groups: int | None = None,
    last: Tensor | None = None,
    begun: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize and pack x [B, Hk, N, D] as `ref.quantize_mapped` does; last, begun as in `pack`.

    groups: how many there are, where the caller knows; else it is read back from the device.
    """
    b, h, n, d = x.shape
    groups = int(group_of.max()) + 1 if groups is None else groups
    scale, zero = _metadata(x, meta, b, 1, n, groups)
    if x.numel():
        clip = torch.as_tensor(clip, dtype=torch.float32, device=x.device).expand(groups)
        db = cuda.tile(d)
        tokens = max(1, _TILE // db)
        cuda.launch(
            _kernels().ranges, (-(-n // tokens), b, groups), x,
            x, group_of.int().contiguous(), clip.contiguous(), _stored(scale), _stored(zero),
            n, h, *x.stride(), d, groups,
            TOP=top(bits), META=_META[meta], TB=tokens, DB=db, contract=False,
        )  # fmt: skip
    return pack_given(x, bits, scale, zero, group_of, 1, last, begun), scale, zero


def pack_given(
    x: Tensor,
    bits: float,
    scale: Tensor,
    zero: Tensor,
    column: Tensor,
    per: int = 1,
    last: Tensor | None = None,
    begun: int = 0,
) -> Tensor:
    """Pack x [B, Hk, N, D] with what is stored of its groups already, as `ref.encode` does.

    scale, zero: [B or 1, Hk or 1, N / per or 1, columns], of which a channel's is `column`
    [Hk, D]. last, begun and what is returned as in `pack`.
    """
    codes = _bytes(x, bits, begun)
    if x.numel():
        tile, grid = _tile(x, bits, begun + x.shape[2])
        cuda.launch(
            _kernels().pack_given, grid, x,
            x, codes, _stored(scale), _stored(zero), codes if last is None else last.contiguous(),
            column.int().contiguous(), x.shape[2], codes.shape[2], begun, x.shape[1],
            *x.stride(), *_steps(scale), x.shape[3],
            BITS2=int(2 * bits), TOP=top(bits), META=_META[scale.dtype], PER=per, **tile,
            BEGUN=last is not None, contract=False,
        )  # fmt: skip
    return codes


def unpack(
    codes: Tensor,
    scale: Tensor,
    zero: Tensor,
    bits: float,
    column: Tensor,
    lo: int,
    hi: int,
    dtype: torch.dtype,
    per: int = 1,
) -> Tensor:
    """Tokens lo to hi of what `pack` returned, [B, Hk, hi - lo, D] in dtype.

    column: int [Hk, D], the column of scale and zero that is a channel's (see `columns`); per:
    tokens that share a line of them. As `ref.dequantize` of `ref.unpack_codes`.
    """
    b, h, _, d = codes.shape
    out = codes.new_empty(b, h, hi - lo, d, dtype=dtype)
    if out.numel():
        if codes.stride(3) != 1:
            codes = codes.contiguous()
        atom = ATOM[bits][0]
        tile, grid = _tile(out, bits, hi - lo // atom * atom)
        cuda.launch(
            _kernels().unpack, grid, out,
            codes, _stored(scale), _stored(zero), column.int().contiguous(), out, lo, hi, h,
            *codes.stride()[:3], *_steps(scale), d,
            BITS2=int(2 * bits), META=_META[scale.dtype], PER=per, **tile, contract=False,
        )  # fmt: skip
    return out


def columns(axis: str, group: int, heads: int, dim: int, device: torch.device) -> Tensor:
    """The column of scale and zero that is a channel's, int32 [heads, dim]."""
    each = torch.arange(dim, dtype=torch.int32, device=device)
    return (each if axis == "channel" else each // group).expand(heads, dim)


def _pack(
    x: Tensor,
    bits: float,
    tokens: int,
    group: int,
    scale: Tensor,
    zero: Tensor,
    real: Tensor | None,
    last: Tensor | None,
    begun: int,
    highest: int | None = None,
) -> Tensor:
    """Launch `pack`; tokens: those of a group per channel, else 0. highest: the top code."""
    codes = _bytes(x, bits, begun)
    if x.numel():
        d, h = x.shape[3], x.shape[1]
        tile, grid = _tile(x, bits, begun + x.shape[2], tokens, whole=not tokens)
        steps = (0, 0)
        if real is not None:
            real = real.contiguous().view(torch.uint8)
            steps = _steps(real)[:2]
        cuda.launch(
            _kernels().pack, grid, x,
            x, codes if real is None else real, codes, _stored(scale), _stored(zero),
            codes if last is None else last.contiguous(), x.shape[2], codes.shape[2], begun, h,
            *x.stride(), *steps, d, scale.shape[2 if tokens else 3],
            BITS2=int(2 * bits), TOP=highest or top(bits), META=_META[scale.dtype],
            CHANNEL=tokens > 0, **tile, G=tile["DB"] if group == d else group,
            REAL=real is not None, BEGUN=last is not None, contract=False,
        )  # fmt: skip
    return codes


def _tile(
    x: Tensor, bits: float, tokens: int, group: int = 0, whole: bool = False
) -> tuple[dict[str, int], tuple[int, int, int]]:
    """The shape of a tile of tokens like x, and the grid; group: tokens that a tile has."""
    d, atom = x.shape[3], ATOM[bits][0]
    p = cuda.tile(atom, 1)
    db = cuda.tile(d)
    if not whole:
        db = min(db, 128)
    a = group // atom if group else cuda.tile(max(1, min(_TILE // (db * p), -(-tokens // atom))), 1)
    tile = {"ATOM": atom, "A": a, "P": p, "DB": db}
    return tile, (-(-tokens // (a * atom)), x.shape[0] * x.shape[1], -(-d // db))


def _bytes(x: Tensor, bits: float, begun: int) -> Tensor:
    b, h, n, d = x.shape
    return x.new_empty(b, h, rows_for(begun + n, bits), d, dtype=torch.uint8)


def _metadata(x: Tensor, meta: torch.dtype, *shape: int) -> tuple[Tensor, Tensor]:
    return x.new_empty(shape, dtype=meta), x.new_empty(shape, dtype=meta)


def _stored(meta: Tensor) -> Tensor:
    """Scales or zeros as kernels take them: fp8 as bytes."""
    return meta.view(torch.uint8) if meta.dtype == torch.float8_e4m3fn else meta


def _steps(meta: Tensor) -> tuple[int, ...]:
    """From a row, head and token to the next, 0 where all share one."""
    if meta.stride(-1) != 1:
        raise ValueError("columns of metadata must lie side by side; call contiguous()")
    return tuple(0 if meta.shape[i] == 1 else meta.stride(i) for i in range(meta.dim() - 1))


@cache
def _kernels() -> Any:
    """The kernels; importing them imports Triton."""
    from . import gpu_pack

    return gpu_pack


def forms() -> Iterator[Form]:
    """What is compiled ahead of time; imports Triton."""

    def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    for bits in ATOM:
        for axis, group, d, held in (
            ("channel", 32, 128, torch.float16),
            ("token", 32, 128, torch.float16),
            ("channel", 128, 80, torch.bfloat16),
            ("token", 80, 80, torch.float8_e4m3fn),
        ):
            x, real = meta(1, 2, 256, d), meta(1, 1, 256, dtype=torch.bool)
            last = meta(1, 2, ATOM[bits][1], d, dtype=torch.uint8)
            begun = 1 if axis == "token" and ATOM[bits][0] > 1 else 0
            extra = (None, last, 1) if begun else (real if axis == "channel" else None, None, 0)
            name, brief = f"{bits} bit per {axis} {group}", bits in (2, 3) and d == 128
            yield from cuda.forms(
                name, lambda x=x, extra=extra, g=group, a=axis, h=held, b=bits: pack(
                    x, b, a, g, h, *extra), brief,
            )  # fmt: skip
            lines = 256 // group if axis == "channel" else 256
            codes = meta(1, 2, rows_for(256, bits), d, dtype=torch.uint8)
            scale = meta(1, 2, lines, d if axis == "channel" else d // group, dtype=held)
            column = columns(axis, group, 2, d, torch.device("meta"))
            per = group if axis == "channel" else 1
            yield from cuda.forms(
                name, lambda c=codes, s=scale, o=column, b=bits, per=per: unpack(
                    c, s, s, b, o, 0, 256, torch.bfloat16, per), brief,
            )  # fmt: skip
    group_of = meta(2, 128, dtype=torch.int64)
    yield from cuda.forms(
        "mapped", lambda: pack_mapped(
            meta(1, 2, 256, 128), 2, group_of, torch.float8_e4m3fn, groups=8), True,
    )  # fmt: skip
