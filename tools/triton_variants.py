"""The variants of Triton kernels that `compile_triton` compiles: main recipes in full, others once.

Calls are made with tensors on torch's meta device, so a variant is what a launch would compile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from kvloom.encoding import PACK_BLOCK, Encoding, LayerEncoding, rows_for
from kvloom.kernels import triton_runtime
from kvloom.kernels.attend.regions import KVView, PageTable, Slots, Spans
from kvloom.kernels.attend.triton import decode, decode_kernel, paged, paged_kernel, prompt
from kvloom.kernels.limits import DTYPES
from kvloom.kernels.quantize import triton as quantize_pack
from kvloom.kernels.quantize.reference import PackedTensors
from kvloom.kernels.score import triton as mass
from kvloom.kernels.score.noise import Noise
from triton_signature import Variant, signature

FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
_META = {"fp32": FP32, "fp16": FP16, "bf16": BF16, "fp8": torch.float8_e4m3fn}
_B, _HK, _N = 1, 2, 4096


_KINDS: dict[str, dict[str, Any]] = {
    "": {},
    "mapped": {"span": "layer", "reorder": True},
    "smooth": {"span": "layer", "reorder": True, "smooth": True},
    "static": {"span": "layer", "reorder": True, "static": True},
    "rotated": {"rotation": "group"},
}


def _packed(
    bits: float, axis: str, group: int = 32, meta: str = "fp16", kind: str = ""
) -> Encoding:
    """An encoding of a kind."""
    return Encoding(bits, axis, group, meta, **_KINDS[kind])


def _strand(fmt: Any, d: int, dtype: torch.dtype, packed_end: int, heads: int = _HK) -> KVView:
    """`packed_end` packed tokens and exact ones after them, _N together."""

    def empty(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.empty(*shape, dtype=dtype, device="meta")

    tail = empty(_B, heads, _N - packed_end, d)
    if fmt is None:
        return KVView(None, empty(_B, heads, _N, d))
    group = fmt.group or d
    shape = (_B, heads, _N // group, d) if fmt.axis == "channel" else (_B, heads, _N, d // group)
    if fmt.regroups:
        shape = (_B, 1, _N, max(1, heads * d // group))
    meta = empty(*shape, dtype=_META[fmt.meta])
    ranges = empty(max(1, heads * d // group), dtype=FP32)
    layer_encoding = LayerEncoding(
        fmt, heads, d, empty(heads, d, dtype=torch.int64) if fmt.regroups else None,
        divisor=empty(heads, d, dtype=FP32) if fmt.smooth else None, low=ranges, high=ranges,
    )  # fmt: skip
    codes = empty(_B, heads, _N, d, dtype=torch.uint8)
    packed = SimpleNamespace(
        codes=codes, scale=meta, zero=meta, hi=packed_end, layer_encoding=layer_encoding
    )
    return KVView(packed, tail, fmt)


_PLACES = dict.fromkeys(("all_splits", "rotated_splits", "first_rotated", "first_plain"), 1)


def _attend(
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
    where: Slots | Spans | None = None,
    brief: bool = False,
) -> Variant:
    """One variant: query heads, t queries, ends of the packed prefixes of keys and values."""
    q = torch.empty(_B, heads, t, d, dtype=dtype, device="meta")
    rows, n = _HK, _N
    if isinstance(where, Spans):
        rows, n, ends = 1, where.longest, (_N, _N)
    elif where is not None:
        n = where.slots.shape[2]
    k, v = (
        _strand(fmt, d, dtype, end, rows) for fmt, end in zip((keys, values), ends, strict=True)
    )
    masks = decode.Masks(None, None)
    if options:
        masks = decode.masks_of(
            torch.empty(_B, 1, _N, dtype=torch.bool, device="meta"),
            torch.empty(_B, heads, _N, device="meta"),
        )
    causal = t > 1 and not isinstance(where, Spans)
    softcap = 5.0 if options else None
    call = decode.call(q, k, v, 1.0, causal, softcap, masks, where, 0, n)
    parts = {"acc_ptr": call.q.float(), "ml_ptr": call.q.float(), **_PLACES}
    short = str(dtype).removeprefix("torch.")
    rows = f"{heads // _HK * t} rows"
    more = " all options" * options
    more += "" if where is None else f" {type(where).__name__.lower()}"
    return Variant(
        f"attend {name} d{d} {short} {rows}{more}", decode_kernel._split,
        _types(decode_kernel._split, {**call.arguments, **parts}), call.constants, call.warps,
        call.stages, call.registers, brief=brief,
    )  # fmt: skip


def _paged(
    name: str,
    keys: Any,
    values: Any,
    d: int = 128,
    dtype: torch.dtype = BF16,
    *,
    heads: int = 8,
    brief: bool = False,
) -> Variant:
    """One variant with pages of 128 tokens, and with exact first tokens."""
    page, blocks, rows = 128, 64, 4
    sides = []
    for fmt in (keys, values):
        one = _strand(fmt, d, dtype, page)
        for tensor in ("codes", "scale", "zero"):  # of all blocks
            x = getattr(one.packed, tensor)
            setattr(one.packed, tensor, _meta(blocks, *x.shape[1:], dtype=x.dtype))
        sides.append(one._replace(exact=_meta(blocks, _HK, page, d, dtype=dtype)))
    where = [_meta(*shape, dtype=torch.int64) for shape in ((rows, 32), (rows,), (rows,), (rows,))]
    table = PageTable(*where, page, 4096)
    q, first = _meta(rows, heads, 1, d, dtype=dtype), _meta(blocks, _HK, 8, d, dtype=dtype)
    call = paged.arguments(q, *sides, table, 1.0, (first, first))
    parts = {"acc_ptr": q.float(), "ml_ptr": q.float(), **_PLACES}
    short = str(dtype).removeprefix("torch.")
    return Variant(
        f"attend pages {name} d{d} {short} {heads // _HK} rows", paged_kernel._split_pages,
        _types(paged_kernel._split_pages, {**call.arguments, **parts}), call.constants, call.warps,
        call.stages, call.registers, brief=brief,
    )  # fmt: skip


def attend() -> Iterator[Variant]:
    """Decode attention: main recipes for every head size and dtype, every format, every option."""
    kivi = (_packed(2, "channel"), _packed(2, "token"))
    kivi_4 = (_packed(4, "channel"), _packed(4, "token"))
    exact = (None, None)
    rotated = _packed(3, "token", 0, kind="rotated")
    main = {"kivi": kivi, "kivi-4": kivi_4, "exact": exact, "turbo": (rotated, rotated)}
    slots = Slots(_meta(_B, _HK, 512, dtype=torch.int64), 512)
    spans = Spans(_meta(_B, _HK, 2, dtype=torch.int64), 3000)
    small = (Encoding(4, "channel", 32, rotation="head"), _packed(4, "token", 0, kind="rotated"))
    for name in ("kivi", "exact"):
        for d in (64, 80, 96, 256):
            for dtype in (x for x, most in decode.WIDEST.items() if d <= most):
                yield _attend(name, *main[name], d, dtype)
    for name, formats in main.items():
        yield _attend(name, *formats, brief=name in ("kivi", "exact"))
        yield _attend(name, *formats, dtype=FP16)
        yield _attend(name, *formats, dtype=FP32)
        yield _attend(name, *formats, heads=32)
        yield _attend(name, *formats, t=8)
        yield _attend(name, *formats, t=4, options=True, brief=name == "kivi")
        yield _attend(name, *formats, t=4, dtype=FP32, options=True)
        yield _attend(name, *formats, t=4, d=256, options=True)
        yield _attend(name, *formats, ends=(_N, _N), where=slots, brief=name == "kivi")
    for bits in (1, 1.5, 2, 3, 4, 8):
        for axis, meta in (("channel", "fp16"), ("token", "fp8")):
            pair = [_packed(bits, side, meta=meta) for side in (axis, "token")]
            brief = bits == 3 and axis == "token"
            yield _attend(f"{bits} bit {axis} token {meta}", *pair, brief=brief)
    for meta in ("fp32", "bf16"):
        yield _attend(
            f"2 bit {meta}", *(_packed(2, axis, meta=meta) for axis in ("channel", "token"))
        )
    for kind in ("mapped", "smooth", "static", "rotated"):
        for bits in (2, 4):
            one = _packed(bits, "token", 128, "fp8", kind)
            yield _attend(f"{bits} bit {kind}", one, one, brief=kind == "mapped" and bits == 2)
    mapped = [_packed(bits, "token", 128, "fp8", "mapped") for bits in (2, 1.5)]
    yield _attend("2 and 1.5 bit mapped", *mapped)
    yield _attend("3 and 4 bit", _packed(3, "channel"), _packed(4, "token"))
    yield _attend("8 and 2 bit", _packed(8, "channel"), _packed(2, "token"))
    for ends in ((3968, 3840), (3968, 3968)):
        yield _attend(f"kivi to {ends[0]}, {ends[1]}", *kivi, ends=ends)
    yield _attend("axes swapped", _packed(3, "token"), _packed(4, "channel"))
    yield _attend("keys only", kivi[0], None)
    yield _attend("values only", None, kivi[1])
    for d in (64, 80, 96, 128, 256):
        for dtype in (x for x, most in decode.WIDEST.items() if d <= most):
            yield _attend("small", *small, d, dtype)
            yield _attend("small", *small, d, dtype, where=spans, brief=d == 128 and dtype == BF16)
    for t, options in ((1, True), (8, False), (8, True)):
        yield _attend("small", *small, t=t, where=spans, options=options)
    yield _attend("small", *small, heads=32, where=spans)
    for name in ("kivi", "exact"):
        yield _attend(name, *main[name], where=spans, brief=name == "exact")
    for name in ("kivi", "kivi-4", "turbo"):
        yield _paged(name, *main[name], brief=name != "kivi-4")
        yield _paged(name, *main[name], d=64, heads=6)
        yield _paged(name, *main[name], dtype=FP32)
        yield _paged(name, *main[name], heads=32)
    for bits in (1, 1.5, 3, 8):
        yield _paged(f"{bits} bit", _packed(bits, "channel"), _packed(bits, "token"))
    for kind in ("mapped", "smooth", "static"):
        one = _packed(2, "token", 128, "fp8", kind)
        yield _paged(f"2 bit {kind}", one, one)
    for d in (64, 80, 128, 256):
        for dtype in DTYPES:
            q, k = (_meta(1, h, n, d, dtype=dtype) for h, n in ((8, 192), (2, 2048)))
            for options in ({"causal": True}, {"visible": _meta(1, 2, 2048, dtype=torch.bool)}):
                yield from _launched(
                    f"prompt d{d} {str(dtype).removeprefix('torch.')} {next(iter(options))}",
                    partial(prompt.attend, q, k, k, 1.0, **{"causal": False, **options}),
                    d == 128 and dtype == BF16,
                )
    out, row = (torch.empty(*shape, device="meta") for shape in ((1, 1, 1, 128), (1, 1, 1)))
    given = {
        "acc_ptr": out, "ml_ptr": row, "out_ptr": out, "rotated_ptr": out, "lse_ptr": row,
        "signs": row,
    }  # fmt: skip
    for d in (128, 256):
        for group in (0, 32, d, 80):
            yield Variant(
                f"merge d{d} rotated {group}", decode_kernel._merge,
                _types(decode_kernel._merge, {**given, "splits": 5, "rotated": 3}),
                {"D": d, "DP": d, "BS": 16, "ROTATED": group > 0, "G": group,
                 **quantize_pack.butterflies(group)},
                brief=group == d == 128,
            )  # fmt: skip


def quantize() -> Iterator[Variant]:
    """Packing and unpacking: every number of bits along both axes."""

    def of(spec: LayerEncoding, begin: int, name: str, brief: bool) -> Iterator[Variant]:
        d, encoding, (rows, numbers) = spec.head_dim, spec.encoding, spec.scales
        n = 256 + begin
        scale, zero = (
            _meta(1, rows, n // encoding.tokens_per_scale, numbers, dtype=spec.meta)
            for _ in range(2)
        )
        tensors = PackedTensors(
            _meta(1, 2, rows_for(n, encoding.bits), d, dtype=torch.uint8), scale, zero
        )
        real = _meta(1, 1, 256, dtype=torch.bool)
        x = _meta(1, 2, 256, d, dtype=BF16)
        pack = partial(quantize_pack.pack, x, spec, tensors, begin, real)
        yield from _launched(name, pack, brief)
        unpack = partial(quantize_pack.unpack, tensors, spec, begin, n, BF16)
        yield from _launched(name, unpack, brief)

    for bits in PACK_BLOCK:
        for group, d in ((0, 128), (32, 96), (0, 256)):
            encoding = Encoding(bits, "token", group, rotation="group")
            name = f"{bits} bit rotated {group or d} of {d}"
            yield from of(encoding.bind(2, d), 1 if bits < 8 else 0, name, bits == 4 and d == 128)
    yield from of(
        Encoding(4, "channel", 32, rotation="head").bind(2, 128), 0, "4 bit rotated head", True
    )
    for bits, (per_block, _) in PACK_BLOCK.items():
        for axis, group, d, meta in (
            ("channel", 32, 128, "fp16"),
            ("token", 32, 128, "fp16"),
            ("channel", 128, 80, "bf16"),
            ("token", 0, 80, "fp8"),
        ):
            begin = 0 if axis == "channel" or per_block == 1 else 1
            name = f"{bits} bit per {axis} {group or d}"
            layer_encoding = Encoding(bits, axis, group, meta).bind(2, d)
            yield from of(layer_encoding, begin, name, bits == 3 and d == 128)


def score() -> Iterator[Variant]:
    """Attention mass of a prompt and of a step, with no option and with all of them."""
    everything: dict[str, Any] = {
        "visible": _meta(1, 1, 256, dtype=torch.bool),
        "softcap": 30.0, "bias": _meta(1, 8, 256), "tau": 2.0,
        "noise": Noise("gumbel", 1, _meta(1, 2, 256, dtype=torch.int64), 0), "reduce_max": True,
    }  # fmt: skip
    for d in (64, 80, 128, 256):
        for dtype in DTYPES:
            for t in (1, 256):
                q, k = (_meta(1, h, x, d, dtype=dtype) for h, x in ((8, t), (2, 256)))
                real = _meta(1, 1, t, dtype=torch.bool)
                for name, options in {
                    "": {},
                    " all": {**everything, "visible_queries": real},
                    " other keys": {"other_lse": _meta(1, 8, t), "reduce_max": True},
                }.items():
                    yield from _launched(
                        f"d{d} {str(dtype).removeprefix('torch.')} {t}q{name}",
                        partial(mass.column_mass, q, k, 1.0, **options),
                        name == " all" and d == 128 and dtype == BF16,
                    )


FAMILIES: dict[str, Callable[[], Iterator[Variant]]] = {
    "attend": attend,
    "quantize": quantize,
    "score": score,
}


def variants(only: str = "") -> Iterator[Variant]:
    """Yield the variants of every family, or of one."""
    for name, family in FAMILIES.items():
        if only in ("", name):
            yield from family()


def _meta(*shape: int, dtype: torch.dtype = FP32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _types(kernel: Any, given: dict[str, Any]) -> dict[str, Any]:
    """Return the types of a kernel's arguments, as a launch specializes on them."""
    return signature(given, {p.name for p in kernel.params if p.do_not_specialize})


def _launched(name: str, call: Callable[[], object], brief: bool) -> Iterator[Variant]:
    """Yield the variants that a call with meta tensors would launch."""
    launches: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []

    def record(kernel: Any, grid: object, like: Tensor, *arguments: Any, **options: Any) -> None:
        launches.append((kernel, arguments, options))

    with patch.object(triton_runtime, "launch", record):
        call()
    for kernel, arguments, options in launches:
        warps, stages = options.pop("warps", 4), options.pop("stages", 2)
        options.pop("contract", None)
        given = dict(zip(kernel.arg_names, arguments, strict=False))
        types = _types(kernel, given)
        general = {p.name for p in kernel.params if p.do_not_specialize}
        for argument, x in given.items():  # a launch takes 1 as a constant
            if isinstance(x, int) and x == 1 and argument not in general:
                del types[argument]
                options[argument] = 1
        title = f"{kernel.__name__} {name}"
        yield Variant(title, kernel, types, options, warps, stages, brief=brief)
