"""Packing and unpacking on CUDA tensors by Triton kernels: which cases, and how they are called.

The results are those of `ref`, to the last bit. What is not covered is said in sentences, which
`dispatch` shows. Importing this does not import Triton, the first call does.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ... import triton_runtime as cuda
from ..reference import ATOM, top
from ..spec import Held, Scheme, Turn

_META = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2, torch.float8_e4m3fn: 3}
_TILE = 2048  # numbers a program owns, about


def problems(scheme: Scheme, device: torch.device, dtype: torch.dtype) -> list[str]:
    """Why no kernel packs tokens of a dtype so, or unpacks them; empty if one does."""
    found = cuda.misplaced(device)
    if dtype not in cuda.DTYPES:
        found.append(f"tokens are {dtype}, not fp32, fp16 or bf16")
    if scheme.rotated:
        found.append("rotated groups are not known to it")
    return found


def pack(
    x: Tensor,
    scheme: Scheme,
    held: Held,
    at: int,
    real: Tensor | None = None,
    turn: Turn | None = None,
) -> None:
    """Write x [B, Hk, T, D] behind `at` packed tokens, in storage that has room.

    Codes, scales and zeros are those of `ref`; filler codes of the last atom are 0. real: bool [B,
    1 or Hk, T], False for padding, which does not enter the range of a group along tokens. turn:
    done to each token first, by torch. Only cases without `problems`; per channel, `at` and T are
    multiples of the group.
    """
    if not x.numel():
        return
    x = x if turn is None else _turned(x.float(), turn)
    (_, h, n, d), bits, kernels = x.shape, scheme.bits, _kernels()
    codes, scale, zero, steps, m_steps = _storage(held, scheme)
    table = _table(scheme, h, d, x.device)
    begun, channel = at % ATOM[bits][0] > 0, scheme.axis == "channel"
    form: dict[str, Any] = {"BITS2": int(2 * bits), "TOP": top(bits), "META": _META[scheme.meta]}
    fused = scheme.group_of is None and (not channel or scheme.group % ATOM[bits][0] == 0)
    if scheme.group_of is None:
        real_steps, given = (0, 0), codes
        if real is not None and channel:
            given = real.contiguous().view(torch.uint8)
            real_steps = given.stride(0), given.stride(1) if given.shape[1] > 1 else 0
        # 1.5 bits per channel: groups and atoms do not end together; here, metadata as if of 8 bit
        tokens = scheme.group if channel else 0
        tile, grid = _tile(x, bits if fused else 8, at, tokens, whole=not channel)
        cuda.launch(
            kernels.pack, grid, x,
            x, given, codes, scale, zero, at, n, h, *x.stride(), *real_steps, *steps, *m_steps,
            d, scale.shape[3], **form, **tile, CHANNEL=channel,
            G=tile["DB"] if scheme.group == d else scheme.group,
            REAL=real is not None and channel, BEGUN=begun, CODES=fused, contract=False,
        )  # fmt: skip
    elif scheme.static is None:
        room = cuda.room(d)
        tokens = max(1, _TILE // room)
        cuda.launch(
            kernels.ranges, (-(-n // tokens), x.shape[0], scale.shape[3]), x,
            x, table.columns, table.clip, table.divisor, scale, zero, at, n, h, *x.stride(),
            m_steps[0], m_steps[2], d, TOP=top(bits), META=_META[scheme.meta],
            TB=tokens, DB=room, DIVISOR=scheme.divisor is not None, contract=False,
        )  # fmt: skip
    if not fused:
        tile, grid = _tile(x, bits, at)
        scale, zero, m_steps, meta = _given(scheme, scale, zero, m_steps, table)
        cuda.launch(
            kernels.pack_given, grid, x,
            x, codes, scale, zero, table.columns, table.divisor, at, n, h, *x.stride(),
            *steps, *m_steps, d, **{**form, "META": meta}, **tile, PER=scheme.stretch,
            BEGUN=begun, DIVISOR=scheme.divisor is not None, contract=False,
        )  # fmt: skip


def unpack(
    held: Held, scheme: Scheme, lo: int, hi: int, dtype: torch.dtype, turn: Turn | None = None
) -> Tensor:
    """Tokens lo..hi of what `pack` wrote, [B, Hk, hi - lo, D], to the last bit those of `ref`.

    turn: done to each of them then, by torch.
    """
    if turn is not None:
        return _turned(unpack(held, scheme, lo, hi, torch.float32), turn).to(dtype)
    b, h, _, d = held.codes.shape
    out = held.codes.new_empty(b, h, hi - lo, d, dtype=dtype)
    if not out.numel():
        return out
    codes, scale, zero, steps, m_steps = _storage(
        Held(*(x if x.stride(3) == 1 or not x.numel() else x.contiguous() for x in held)), scheme
    )
    table = _table(scheme, h, d, out.device)
    scale, zero, m_steps, meta = _given(scheme, scale, zero, m_steps, table)
    tile, grid = _tile(out, scheme.bits, lo)
    cuda.launch(
        _kernels().unpack, grid, out,
        codes, scale, zero, table.columns, table.divisor, out, lo, hi, h, *steps, *m_steps, d,
        BITS2=int(2 * scheme.bits), META=meta, PER=scheme.stretch, **tile,
        DIVISOR=scheme.divisor is not None, contract=False,
    )  # fmt: skip
    return out


def _turned(x: Tensor, turn: Turn) -> Tensor:
    """x fp32 [B, Hk, N, D], its first channels turned, products and sums each rounded."""
    dims = 2 * turn.cos.shape[-1]
    part, rest = x[..., :dims], x[..., dims:]
    a, b = part.unflatten(-1, (-1, 2)).unbind(-1) if turn.interleaved else part.chunk(2, dim=-1)
    pair = a * turn.cos - b * turn.sin, b * turn.cos + a * turn.sin
    part = torch.stack(pair, dim=-1).flatten(-2) if turn.interleaved else torch.cat(pair, dim=-1)
    return torch.cat([part, rest], dim=-1)


class _Table(NamedTuple):
    """A scheme on a device: columns int32 [Hk, D], of the metadata, by channel."""

    columns: Tensor
    clip: Tensor  # fp32 [groups]
    divisor: Tensor  # fp32 [Hk, D]
    static: tuple[Tensor, Tensor] | None  # fp32 [Hk, D]


def _table(scheme: Scheme, heads: int, d: int, device: torch.device) -> _Table:
    key = ("gpu", heads, d, device)
    if key not in scheme.made:
        each = torch.arange(d, device=device).expand(heads, d)
        columns = each if scheme.axis == "channel" else each // (scheme.group or 1)
        nothing = torch.ones(1, device=device)
        clip, divisor, static = nothing, nothing, None
        if scheme.group_of is not None:
            columns, groups = scheme.group_of, scheme.scales(heads, d)[1]
            clip = torch.as_tensor(scheme.clip, dtype=torch.float32, device=device)
            clip = clip.expand(groups or 1).contiguous()
        if scheme.divisor is not None:
            divisor = scheme.divisor.float().to(device).contiguous()
        if scheme.static is not None:
            scale, zero = (
                x.float().to(device).expand(1, heads, 1, d).reshape(heads, d).contiguous()
                for x in scheme.static
            )
            static, columns = (scale, zero), each
        columns = columns.to(device=device, dtype=torch.int32).contiguous()
        scheme.made[key] = _Table(columns, clip, divisor, static)
    return scheme.made[key]


def _given(
    scheme: Scheme, scale: Tensor, zero: Tensor, steps: tuple[int, ...], table: _Table
) -> tuple[Tensor, Tensor, tuple[int, ...], int]:
    """The metadata that tell tokens apart or, where they are given, do not; and their number."""
    if table.static is None:
        return scale, zero, steps, _META[scheme.meta]
    return *table.static, (0, table.static[0].shape[1], 0), 0


def _storage(
    held: Held, scheme: Scheme
) -> tuple[Tensor, Tensor, Tensor, tuple[int, ...], tuple[int, ...]]:
    """Codes, scales, zeros, and from one row, head and line of codes and of scales to the next."""
    scale, zero = (x.view(torch.uint8) if x.element_size() == 1 else x for x in held[1:])
    assert scale.stride() == zero.stride(), "scales and zeros lie alike"
    row, head, line, _ = scale.stride()
    if scheme.group_of is not None:
        head = 0
    return held.codes, scale, zero, held.codes.stride()[:3], (row, head, line)


def _tile(
    x: Tensor, bits: float, at: int, group: int = 0, whole: bool = False
) -> tuple[dict[str, Any], tuple[int, int, int]]:
    """The shape of a tile of tokens like x behind `at`, and the grid; group: tokens of a tile."""
    n, d, atom = x.shape[2], x.shape[3], ATOM[bits][0]
    p, db, atoms = cuda.room(atom, 1), cuda.room(d), (at + n - 1) // atom - at // atom + 1
    if not whole:
        db = min(db, max(32, _TILE // group) if group else 128)
    a = group // atom if group else cuda.room(max(1, min(_TILE // (db * p), atoms)), 1)
    tile: dict[str, Any] = {"ATOM": atom, "A": a, "P": p, "DB": db}
    return tile, (-(-atoms // a), x.shape[0] * x.shape[1], -(-d // db))


@cache
def _kernels() -> Any:
    """The kernels; importing them imports Triton."""
    from . import pack_kernel as gpu_pack

    return gpu_pack
