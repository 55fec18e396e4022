"""What is compiled ahead of time of decode attention: main recipes in full, the rest once.

Calls are made of tensors on torch's meta device, so a form is what a launch would compile.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ..ahead import Form, signature
from . import gpu, gpu_packed
from .strand import Channelwise, Strand

FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
_META = {"fp32": FP32, "fp16": FP16, "bf16": BF16, "fp8": torch.uint8}
_B, _HK, _N = 1, 2, 4096


def _packed(bits: float, axis: str, group: int = 32, meta: str = "fp16", kind: str = "") -> Any:
    """A format; kind: "", "mapped", "smooth", "static" or "rotated"."""
    transform = SimpleNamespace(rotate=kind == "rotated") if kind else None
    return SimpleNamespace(
        bits=bits, axis=axis, group=group, meta=meta, kind=kind, transform=transform
    )


def _strand(fmt: Any, d: int, dtype: torch.dtype, sealed: int) -> Strand:
    """`sealed` packed tokens and exact ones behind them, _N together."""

    def empty(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.empty(*shape, dtype=dtype, device="meta")

    tail = empty(_B, _HK, _N - sealed, d)
    if fmt is None:
        return Strand(None, empty(_B, _HK, _N, d))
    group = fmt.group or d
    shape = (_B, _HK, _N // group, d) if fmt.axis == "channel" else (_B, _HK, _N, d // group)
    if fmt.kind and fmt.kind != "rotated":
        shape = (_B, 1, _N, max(1, _HK * d // group))
    meta = empty(*shape, dtype=_META[fmt.meta])
    constant = empty(1, _HK, 1, d, dtype=FP32)
    how = Channelwise(
        group_of=empty(_HK, d, dtype=torch.int64) if fmt.kind in ("mapped", "smooth") else None,
        fixed=(constant, constant) if fmt.kind == "static" else None,
        divisor=empty(_HK, 1, d, dtype=FP32) if fmt.kind == "smooth" else None,
        rotated=group if fmt.kind == "rotated" else 0,
    )
    codes = empty(_B, _HK, _N, d, dtype=torch.uint8)
    packed = SimpleNamespace(codes=codes, scale=meta, zero=meta, hi=sealed, channelwise=how)
    return Strand(packed, tail, fmt)


def _form(
    name: str,
    keys: Any,
    values: Any,
    d: int = 128,
    dtype: torch.dtype = BF16,
    *,
    heads: int = 8,
    t: int = 1,
    ends: tuple[int, int] = (3840, 3968),
    options: bool = False,
    chosen: bool = False,
    brief: bool = False,
) -> Form:
    """One form: heads query heads, t queries, ends of the packed prefixes of keys and values."""
    q = torch.empty(_B, heads, t, d, dtype=dtype, device="meta")
    k, v = (_strand(fmt, d, dtype, end) for fmt, end in zip((keys, values), ends, strict=True))
    masks = gpu._Masks(None, None)
    if options:
        masks = gpu._masks(
            torch.empty(_B, 1, _N, dtype=torch.bool, device="meta"),
            torch.empty(_B, heads, _N, device="meta"),
        )
    slots = torch.empty(_B, _HK, 512, dtype=torch.int64, device="meta") if chosen else None
    call = gpu._call(
        q, k, v, 1.0, t > 1, 5.0 if options else None, masks, slots, 0, 512 if chosen else _N
    )
    parts = {"acc_ptr": call.q.float(), "ml_ptr": call.q.float()}
    short = str(dtype).removeprefix("torch.")
    rows = f"{heads // _HK * t} rows"
    more = " all options" * options + " chosen" * chosen
    return Form(
        f"attend {name} d{d} {short} {rows}{more}", gpu_packed._split,
        signature({**call.arguments, **parts}), call.constants, call.warps, call.stages,
        brief=brief,
    )  # fmt: skip


def forms() -> Iterator[Form]:
    """Main recipes for every head dimension and dtype, every format, every option."""
    kivi = (_packed(2, "channel"), _packed(2, "token"))
    kivi_4 = (_packed(4, "channel"), _packed(4, "token"))
    exact = (None, None)
    rotated = _packed(3, "token", 0, kind="rotated")
    main = {"kivi": kivi, "kivi-4": kivi_4, "exact": exact, "turbo": (rotated, rotated)}
    for name in ("kivi", "exact"):
        for d in (64, 80, 96, 256):
            for dtype in (x for x, most in gpu.WIDEST.items() if d <= most):
                yield _form(name, *main[name], d, dtype)
    for name, formats in main.items():
        yield _form(name, *formats, brief=name in ("kivi", "exact"))
        yield _form(name, *formats, dtype=FP16)
        yield _form(name, *formats, dtype=FP32)
        yield _form(name, *formats, heads=32)
        yield _form(name, *formats, t=8)
        yield _form(name, *formats, t=4, options=True, brief=name == "kivi")
        yield _form(name, *formats, t=4, dtype=FP32, options=True)
        yield _form(name, *formats, t=4, d=256, options=True)
        yield _form(name, *formats, ends=(_N, _N), chosen=True, brief=name == "kivi")
    for bits in (1, 1.5, 2, 3, 4, 8):
        for axis, meta in (("channel", "fp16"), ("token", "fp8")):
            pair = [_packed(bits, side, meta=meta) for side in (axis, "token")]
            brief = bits == 3 and axis == "token"
            yield _form(f"{bits} bit {axis} token {meta}", *pair, brief=brief)
    for meta in ("fp32", "bf16"):
        yield _form(
            f"2 bit {meta}", *(_packed(2, axis, meta=meta) for axis in ("channel", "token"))
        )
    for kind in ("mapped", "smooth", "static", "rotated"):
        for bits in (2, 4):
            one = _packed(bits, "token", 128, "fp8", kind)
            yield _form(f"{bits} bit {kind}", one, one, brief=kind == "mapped" and bits == 2)
    mapped = [_packed(bits, "token", 128, "fp8", "mapped") for bits in (2, 1.5)]
    yield _form("2 and 1.5 bit mapped", *mapped)
    yield _form("3 and 4 bit", _packed(3, "channel"), _packed(4, "token"))
    yield _form("8 and 2 bit", _packed(8, "channel"), _packed(2, "token"))
    for ends in ((3968, 3840), (3968, 3968)):
        yield _form(f"kivi to {ends[0]}, {ends[1]}", *kivi, ends=ends)
    yield _form("axes swapped", _packed(3, "token"), _packed(4, "channel"))
    yield _form("keys only", kivi[0], None)
    yield _form("values only", None, kivi[1])
    out, row = (torch.empty(*shape, device="meta") for shape in ((1, 1, 1, 128), (1, 1, 1)))
    given = {"acc_ptr": out, "ml_ptr": row, "out_ptr": out, "turned_ptr": out, "lse_ptr": row}
    for d in (128, 256):
        for turned in (False, True):
            yield Form(
                f"merge d{d}{' rotated' * turned}", gpu_packed._merge,
                signature({**given, "stretches": 5, "turned": 3}),
                {"D": d, "DP": d, "BS": 16, "TURNED": turned}, brief=turned and d == 128,
            )  # fmt: skip
