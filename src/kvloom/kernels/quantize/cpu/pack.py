"""Packing and unpacking on CPU tensors by compiled kernels: which cases, and how they are called.

What is not covered is said in sentences, which `dispatch` shows. Importing this does not import
Numba, the first call does.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ... import dispatch
from .. import rotated
from ..reference import ATOM, top
from ..spec import Held, Scheme, Turn

_NUMBERS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
_METAS = {**_NUMBERS, torch.float8_e4m3fn: 3}
_CHANNEL, _TOKEN, _MAPPED, _STATIC, _ROTATED = range(5)  # as in `tiles`, which imports Numba
# Numbers of a tile: fp32 copies of them stay near a core.
_TILE = 1 << 14
# Numbers that are worth a thread.
_WORTH = 1 << 17


def problems(scheme: Scheme, device: torch.device, dtype: torch.dtype) -> list[str]:
    """Why no kernel packs tokens of a dtype so, or unpacks them; empty if one does."""
    found = []
    if device.type != "cpu":
        found.append(f"the tensors are on {device.type}")
    if dtype not in _NUMBERS:
        found.append(f"tokens are {dtype}, not fp32, fp16 or bf16")
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
    done to each token first. Only cases without `problems`; per channel, `at` and T are multiples
    of the group. Raises `ValueError` where rows of the storage do not lie side by side.
    """
    if not x.numel():
        return
    codes, scale, zero = held
    if not (_side_by_side(codes) and _side_by_side(scale) and _side_by_side(zero)):
        raise ValueError("rows of codes, scales and zeros must lie side by side to be written to")
    where: tuple[int, ...] = (0, 0, 0)
    if real is not None and scheme.axis == "channel":
        real = real if real.stride(2) == 1 else real.contiguous()
        where = (real.data_ptr(), real.stride(0), real.stride(1) if real.shape[1] > 1 else 0)
    table = _table(scheme, x.shape[1], x.shape[3])
    _run(_kernels()[0], x, at, held, table, table.given, where, turn)


def unpack(
    held: Held,
    scheme: Scheme,
    lo: int,
    hi: int,
    dtype: torch.dtype,
    turn: Turn | None = None,
) -> Tensor:
    """Tokens lo..hi of what `pack` wrote, [B, Hk, hi - lo, D]; turn: done to each of them then."""
    b, h, _, d = held.codes.shape
    out = held.codes.new_empty(b, h, hi - lo, d, dtype=dtype)
    if not out.numel():
        return out
    held = Held(*(part if _side_by_side(part) else part.contiguous() for part in held))
    table = _table(scheme, h, d)
    _run(_kernels()[1], out, lo, held, table, table.stored, (0, 0, 0), turn)
    return out


class _Table(NamedTuple):
    """What a job says of a scheme, for heads of one size."""

    across: int  # heads that share groups
    numbers: tuple[int, ...]
    tables: tuple[int, ...]  # addresses, or 0: groups of channels, channels of groups, their ends,
    given: tuple[int, int]  # alphas, divisors; scales and zeros that are given, to divide by
    stored: tuple[int, int]  # and to multiply by
    rotation: tuple[int, ...]  # a power of 2 and addresses: signs, matrix, levels, their ends
    alive: tuple[Tensor, ...]


def _table(scheme: Scheme, heads: int, d: int) -> _Table:
    found = scheme.made.get(("cpu", heads, d))
    if found is None:
        found = scheme.made["cpu", heads, d] = _made(scheme, heads, d)
    return found


def _made(scheme: Scheme, heads: int, d: int) -> _Table:
    atom, height = ATOM[scheme.bits]
    mapped = scheme.group_of is not None
    across, padded = heads if mapped else 1, -(-d // 16) * 16
    unit = math.lcm(scheme.stretch, atom)
    tile = max(1, _TILE // (across * padded) // unit) * unit
    tables: dict[str, Tensor] = {}
    groups = padded if scheme.axis == "channel" else scheme.scales(heads, d)[1]
    how = _CHANNEL if scheme.axis == "channel" else _ROTATED if scheme.rotated else _TOKEN
    if mapped:
        assert scheme.group_of is not None
        how = _MAPPED if scheme.static is None else _STATIC
        group_of = scheme.group_of
        groups = int(group_of.max()) + 1
        tables["group_of"] = _rows(group_of.int(), 0)
        slot = torch.arange(heads)[:, None] * padded + torch.arange(d)
        by_group = [slot[group_of == g] for g in range(groups)]
        by_group = [torch.cat([s, s[:1].expand(-len(s) % 16)]) for s in by_group]
        tables["slots"] = torch.cat(by_group).int()
        tables["ends"] = torch.tensor([len(s) for s in by_group]).cumsum(0).int()
        tables["clip"] = torch.as_tensor(scheme.clip, dtype=torch.float32).expand(groups).clone()
        if scheme.divisor is not None:
            tables["divisor"] = _rows(scheme.divisor.float(), 1)
    given = stored = (0, 0)
    if scheme.static is not None:
        scale, zero = (_rows(x.float().expand(1, heads, 1, d)[0, :, 0], 0) for x in scheme.static)
        step = torch.where(scale > 0, scale, torch.inf)
        tables |= {"scale": scale, "zero": zero, "step": step}
        given = (step.data_ptr(), zero.data_ptr())
        stored = (scale.data_ptr(), zero.data_ptr())
    rotation: tuple[int, ...] = (0,) * 5
    if scheme.rotated:
        signs, mix = rotated.parts(scheme.group)
        levels = rotated.levels(scheme.bits)
        more = [_rows(signs[None], 0), mix.contiguous(), levels, rotated.ends(levels)]
        tables |= dict(zip(("signs", "mix", "levels", "level ends"), more, strict=True))
        rotation = (scheme.group // len(mix), *(x.data_ptr() for x in more))
    names = ("group_of", "slots", "ends", "clip", "divisor")
    return _Table(
        across,
        (
            tile, how, scheme.group, groups, int(2 * scheme.bits), top(scheme.bits), atom,
            height, _METAS[scheme.meta],
        ),
        tuple(tables[n].data_ptr() if n in tables else 0 for n in names),
        given,
        stored,
        rotation,
        tuple(tables.values()),
    )  # fmt: skip


def _rows(x: Tensor, filler: int) -> Tensor:
    """x [Hk, D], every row with room for whole vectors of 16."""
    return torch.nn.functional.pad(x, (0, -x.shape[1] % 16), value=filler).contiguous()


def _side_by_side(x: Tensor) -> bool:
    """Whether what follows along the last two dimensions of x [B, H, N, D] lies so in memory."""
    if x.is_contiguous():
        return True
    row = x.shape[3]
    return row == 0 or (x.stride(2) == row and (row == 1 or x.stride(3) == 1))


def _run(
    kernel: Any,
    x: Tensor,
    at: int,
    held: Held,
    table: _Table,
    fixed: tuple[int, int],
    real: tuple[int, ...],
    turn: Turn | None,
) -> None:
    """Run a kernel on tokens x [B, Hk, T, D], read or written, and on what holds them from `at` on.

    real: where that is said of tokens, and the bytes to the next row and head; 0 where it is not.
    """
    b, h, t, d = x.shape
    size, (row, head, token, one) = x.itemsize, x.stride()
    codes, scale, zero = held
    meta, scales, zeros = scale.itemsize, scale.stride(), zero.stride()
    turned: tuple[int, ...] = (0,) * 6
    if turn is not None:  # the bytes to the next row and head, 0 where these share
        cos, sin = turn.cos.contiguous(), turn.sin.contiguous()
        steps = (0 if cos.shape[i] == 1 else 4 * cos.stride(i) for i in (0, 1))
        turned = (cos.data_ptr(), sin.data_ptr(), *steps, cos.shape[3], int(turn.interleaved))
    kernel.run(
        (
            b, h, table.across, d, at, t, *table.numbers, _NUMBERS[x.dtype], *table.tables,
            *fixed, x.data_ptr(), row * size, head * size, token * size, one * size,
            codes.data_ptr(), *codes.stride()[:3],
            scale.data_ptr(), scales[0] * meta, scales[1] * meta,
            zero.data_ptr(), zeros[0] * meta, zeros[1] * meta,
            *real, *turned, *table.rotation,
        ),
        0,
        min(torch.get_num_threads(), 1 + x.numel() // _WORTH),
    )  # fmt: skip


@cache
def _kernels() -> tuple[Any, Any]:
    with dispatch.loading():
        from .pack_kernel import kernels
    return kernels()
