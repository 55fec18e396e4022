"""Decode attention on CUDA tensors: which cases the Triton kernels cover, and their calls.

A call attends to a packed prefix and an exact tail in one pass, or to chosen tokens or spans where
they are stored; `decode_kernel` does it. A call reads nothing back from the device: its grid
follows from shapes, and from numbers of packed tokens and of the longest span, which the host
knows. `paged` launches its kernel by functions of this file. Importing this does not import Triton;
the first call does.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ....encoding import Encoding, unknown_fields
from ... import triton_runtime as cuda
from ...arguments import contiguous_rows
from ...limits import MAX_STEP, READ_FIELDS, Coverage, dtype_problem
from ...quantize import triton as quantize
from ...quantize.hadamard import matrix
from ..reference import AttentionState
from ..regions import KVView, Slots, Spans
from .arguments import ExactRows, Form, Options, Side

KEYS, VALUES = 1, 2  # the side that is packed, where only one is
WAVES = 8  # programs for each multiprocessor
WIDEST = {torch.bfloat16: 256, torch.float16: 256, torch.float32: 128}  # head_dim that fits
_IN_HALF = torch.float16, torch.float8_e4m3fn  # dtypes of scales that fp16 holds
_KNOWN = {*READ_FIELDS} - {"pre_rope"}


def _narrow_or_wide(tokens: int, like: Tensor) -> str | None:
    d, most = like.shape[-1], WIDEST.get(like.dtype, 256)
    return None if 16 <= d <= most else f"head_dim={d} is not from 16 to {most} in {like.dtype}"


def _unread_dtype(tokens: int, like: Tensor) -> str | None:
    if like.dtype != torch.bfloat16 or like.is_cuda:
        return dtype_problem(like.dtype, "keys and values are")
    return "Triton's interpreter multiplies bf16 wrongly; use fp32 or fp16 there"


def _many_queries(tokens: int, like: Tensor) -> str | None:
    return None if tokens <= MAX_STEP else f"more than {MAX_STEP} queries a step"


def _unfit_group(encoding: Encoding, d: int) -> str | None:
    if encoding.axis == "channel" or d % (encoding.group or d) == 0:
        return None
    return f"group={encoding.group} does not divide head_dim={d}"


STEPS = Coverage(
    ("`head_dim` 16 to 256, in fp32 to 128", _narrow_or_wide),
    ("exact tokens all in fp32, fp16 or bf16", _unread_dtype),
    (f"1–{MAX_STEP} queries, one for `Slots` and `Paged`", _many_queries),
)
ENCODINGS = Coverage(("groups that divide `head_dim`; keys after RoPE", _unfit_group))


def problems(tokens: int, like: Tensor, keys: Any = None, values: Any = None) -> list[str]:
    """Return why no kernel attends so many queries a step to tokens in these formats.

    like: exact keys [B, Hk, N, D]. keys, values: formats of packed tokens, or None.
    """
    encodings = _encoding_problems(like.shape[-1], keys, values)
    return [*encodings, *STEPS.problems(tokens, like)]


@cache
def _encoding_problems(d: int, *encodings: Any) -> tuple[str, ...]:
    """Return why no kernel reads keys and values with heads of size d in these encodings."""
    reasons: list[str] = []
    for side, encoding in zip(("keys", "values"), encodings, strict=True):
        if encoding is not None:
            found = unknown_fields(encoding, _KNOWN) or ENCODINGS.problems(encoding, d)
            reasons += [f"{side}: {reason}" for reason in found]
    return tuple(reasons)


class Masks(NamedTuple):
    """Padding uint8 [B, 1 or H, N] and bias fp32 [B or 1, Hq, N], tokens side by side."""

    visible: Tensor | None
    bias: Tensor | None


def masks_of(visible: Tensor | None, bias: Tensor | None) -> Masks:
    """Return masks as kernels read them."""
    if visible is not None:
        visible = contiguous_rows(visible).view(torch.uint8)
    if bias is not None:
        bias = contiguous_rows(bias.float())
    return Masks(visible, bias)


def call(
    q: Tensor,
    keys: KVView,
    values: KVView,
    scale: float,
    causal: bool,
    softcap: float | None,
    masks: Masks,
    where: Slots | Spans | None,
    begin: int,
    n: int,
    first: tuple[KVView, KVView] | None = None,
) -> Launch:
    """Prepare the call for a case; tensors may be on torch's meta device.

    It reads the tokens `begin` to n of the views, or of the slots, or up to n of each span.
    first: exact tokens that are seen too, without slots or spans.
    """
    b, hq, t, d = q.shape
    ks, vs = side_arguments(keys), side_arguments(values)
    table = None
    if where is not None:
        table = contiguous_rows(where.slots if isinstance(where, Slots) else where.bounds)
    heads = keys.exact.shape[1]  # those that share what they see: of the table, of the mask
    if table is not None:
        heads = table.shape[1]
    elif masks.visible is not None:
        heads = max(heads, masks.visible.shape[1])
    r = hq // heads
    firsts, first_tokens = [ExactRows(q, 0, 0, 0)] * 2, 0
    if first is not None:
        firsts = [ExactRows.of(contiguous_rows(view.tail)) for view in first]
        first_tokens = first[0].tokens
    regions = _regions(ks, vs, begin, n, where is not None)
    most = min(ks.most, vs.most, 32 if isinstance(where, Slots) else 64)
    packed = ks.form.bits + vs.form.bits > 0
    form = tile_shapes(d, r * t, q.dtype, most, packed)
    sizes = (form.tokens if packed else form.alone, form.tokens, form.alone)
    tiles, splits = [], []
    blocks = b * heads * -(-r * t // form.rows)
    want = max(1, -(-WAVES * processors(q.device) // blocks))
    starts = begin, regions.both_packed_end, regions.any_packed_end
    for lo, hi, size in zip(starts, (*starts[1:], n), sizes, strict=True):
        count = -(-hi // size) - lo // size if hi > lo else 0
        tiles.append(count)
        splits.append(min(count, -(-want * (hi - lo) // (n - begin))))
    if isinstance(where, Spans):  # equally many tiles a split, so that short heads have fewer
        tiles[0] = -(-keys.tokens // (b * heads * want * sizes[0]))
        splits[0] = -(-(-(-n // sizes[0]) + 1) // tiles[0])  # a span may begin within a tile
    visible, bias = masks
    arguments = {
        "q_ptr": q, "turn_ptr": turn_of(q, ks), "k": ks.side, "v": vs.side,
        "k_first": firsts[0], "v_first": firsts[1], "first_tokens": first_tokens,
        "k_packed_end": ks.packed_end, "v_packed_end": vs.packed_end,
        "visible_ptr": q if visible is None else visible, "bias_ptr": q if bias is None else bias,
        "where_ptr": q if table is None else table,
        **_steps("visible", visible), **_steps("bias", bias), **_steps("where", table),
        "scale": float(scale), "softcap": float(softcap or 1.0),
        "h": heads, "share": heads // keys.exact.shape[1], "r": r, "t": t, "n": n, "begin": begin,
        "both_packed_end": regions.both_packed_end,
        "split0": splits[0], "split1": splits[1], "split2": splits[2],
        "tiles0": tiles[0], "tiles1": tiles[1], "tiles2": tiles[2],
    }  # fmt: skip
    constants = {
        "K": ks.form, "V": vs.form, "D": d, "DP": cuda.padded_size(d), "BM": form.rows,
        "BN0": sizes[0], "BN1": sizes[2], "PACKED_SIDE": regions.packed_side,
        "OPTIONS": Options(
            causal, visible is not None, softcap is not None, bias is not None, first is not None,
            isinstance(where, Slots), isinstance(where, Spans),
        ),
        "FIRST": Options(softcapped=softcap is not None),
    }  # fmt: skip
    splits_all = sum(splits) + (first is not None)
    rotated_splits = splits[0] + (splits[1] if regions.packed_side == VALUES else 0)
    return Launch(
        splits_all * blocks, arguments, constants, form.warps, form.stages, form.registers, q,
        vs.rotation_size, splits_all, rotated_splits if vs.rotation_size else 0,
    )  # fmt: skip


def turn_of(q: Tensor, keys: SideArguments) -> Tensor:
    """Return what a kernel rotates q by, as `load_queries` takes it; q where it does not."""
    if keys.form.turns:
        return quantize.signs(keys.rotation_size, q.device)
    return rotate_groups(q, keys.rotation_size) if keys.rotation_size else q


class _Regions(NamedTuple):
    """Where the regions of `decode_kernel._split` end; the last one ends after all tokens."""

    both_packed_end: int
    any_packed_end: int
    packed_side: int  # the side that is packed between these ends: KEYS or VALUES; 0: no token


def _regions(
    keys: SideArguments, values: SideArguments, begin: int, n: int, alike: bool
) -> _Regions:
    """Return the regions of tokens begin to n; tokens that are alike are all in one."""
    ends = [side.packed_end for side in (keys, values) if side.form.bits]
    if alike or not ends:
        return _Regions(n, n, 0)
    both, either = max(begin, min(ends)), max(begin, max(ends))
    if both == either:
        return _Regions(both, either, 0)
    return _Regions(both, either, KEYS if keys.packed_end == either else VALUES)


def _strides(x: Tensor, dims: int) -> list[int]:
    """Return the first strides; 0 for a dimension of size 1, whose element all rows share."""
    sizes = x.shape
    return [step if sizes[i] > 1 else 0 for i, step in enumerate(x.stride()[:dims])]


def _steps(name: str, x: Tensor | None) -> dict[str, int]:
    """Return the strides of the first two dimensions."""
    b, h = (0, 0) if x is None else _strides(x, 2)
    return {f"{name}_b": b, f"{name}_h": h}


class SideArguments(NamedTuple):
    """The kernel arguments of keys or values."""

    side: Side
    form: Form
    packed_end: int
    rotation_size: int  # channels that are rotated together, or 0
    most: int  # tokens of a tile that registers hold


def side_arguments(view: KVView) -> SideArguments:
    """Return the kernel arguments of keys or values."""
    tail, packed = view.tail, view.packed
    tail = contiguous_rows(tail)
    codes = scale = zero = group_of = divisor = table = tail  # placeholders that are not read
    form, rotation_size, packed_end = Form(), 0, 0
    if packed is not None:
        layer_encoding, packed_end = packed.layer_encoding, packed.hi
        rotation_size = layer_encoding.rotation_size
        codes, scale, zero = (
            x if x.stride(3) == 1 or x.shape[3] == 1 else x.contiguous()
            for x in (packed.codes, packed.scale, packed.zero)
        )
        if layer_encoding.static is not None:
            scale, zero = layer_encoding.static
        elif layer_encoding.group_of is not None:
            group_of = layer_encoding.group_of
        if layer_encoding.divisor is not None:
            divisor = layer_encoding.divisor
        half = tail.dtype != torch.float32 and scale.dtype in _IN_HALF
        prepared, key = layer_encoding.prepared, ("attend", half)
        if key not in prepared:
            prepared[key] = Form.of(layer_encoding, half)
        form = prepared[key]
        if form.rotation == 1:
            zero = scale
            if not form.table:
                table, _ = quantize.rounding(layer_encoding.encoding.bits, tail.device)
        if scale.stride() != zero.stride():
            scale, zero = scale.contiguous(), zero.contiguous()
        if scale.dtype == torch.float8_e4m3fn:  # not all GPUs convert it; the kernel does
            scale, zero = scale.view(torch.uint8), zero.view(torch.uint8)
        if codes.shape[3] % 4 or codes.stride(2) % 4:  # the kernel reads words of 4 channels
            codes = torch.nn.functional.pad(codes, (0, -codes.shape[3] % 4)).contiguous()
    tensors = codes, scale, zero, group_of, divisor, table, tail
    strides = [stride for x in (codes, scale, tail) for stride in _strides(x, 3)]
    side = Side(*tensors, *strides)
    # Groups by channel, many levels, bytes by token are looked up one by one.
    looked_up = form.bits == 15 or form.kind == 2 or (form.rotation == 1 and not form.table)
    most = 16 if looked_up else 64 if form.half or not form.bits else 32
    return SideArguments(side, form, packed_end, rotation_size, most)


@cache
def kernels() -> Any:
    """Import the kernels, and with them Triton."""
    from . import decode_kernel

    return decode_kernel


class Launch(NamedTuple):
    """A call of a kernel that makes splits, and of the one that merges them."""

    grid: int
    arguments: dict[str, Any]
    constants: dict[str, Any]
    warps: int
    stages: int
    registers: int
    q: Tensor
    rotation_size: int  # of values: channels that are rotated together, or 0
    splits: int
    rotated_splits: int  # splits whose values are rotated


def run(launches: Sequence[tuple[Launch, Any]]) -> AttentionState:
    """Run calls for the same queries, each with the kernel that makes its splits; merge these."""
    q, sizes = launches[0][0].q, {call.rotation_size for call, _ in launches if call.rotated_splits}
    assert len(sizes) <= 1, "all values are rotated alike"
    b, hq, t, d = q.shape
    rows, new = b * hq * t, torch.float32
    splits = sum(call.splits for call, _ in launches)
    rotated_splits = sum(call.rotated_splits for call, _ in launches)
    acc, ml = q.new_empty(rows, splits, d, dtype=new), q.new_empty(rows, splits, 2, dtype=new)
    out, lse = q.new_empty(b, hq, t, d, dtype=new), q.new_empty(b, hq, t, dtype=new)
    size = sizes.pop() if sizes else 0
    back, signs, steps = out, out, quantize.butterflies(size)
    if steps["STAGES"]:
        signs = quantize.signs(size, q.device)
    elif size:
        back = torch.empty_like(out)
    first_rotated, first_plain = 0, rotated_splits
    with cuda.on(q):
        for call, split in launches:
            first_plain -= call.rotated_splits
            split[(call.grid,)](
                **call.arguments, acc_ptr=acc, ml_ptr=ml, **call.constants,
                all_splits=splits, rotated_splits=call.rotated_splits,
                first_rotated=first_rotated, first_plain=first_plain,
                num_warps=call.warps, num_stages=call.stages, maxnreg=call.registers,
            )  # fmt: skip
            first_rotated += call.rotated_splits
            first_plain += call.splits
        kernels()._merge[(rows,)](
            acc, ml, out, back, lse, signs, splits, rotated_splits, D=d, DP=cuda.padded_size(d),
            BS=16, ROTATED=size > 0, G=size, **steps, num_warps=4,
        )  # fmt: skip
    if back is not out:
        out = out + rotate_groups(back, size, back=True)
    return AttentionState(out, lse)


class Shape(NamedTuple):
    """Shapes of tiles: query rows, packed tokens, exact tokens; and what a program takes."""

    rows: int
    tokens: int
    alone: int
    warps: int
    stages: int
    registers: int  # at most, of a thread


def tile_shapes(d: int, rows: int, dtype: torch.dtype, most: int, packed: bool = True) -> Shape:
    """Return shapes of tiles that neither spill nor need more than 99 KiB of shared memory.

    most: tokens of a tile that its formats allow. packed: whether some tokens are packed.
    """
    large = dtype == torch.float32 or d > 128
    most_rows = 8 if dtype == torch.float32 else 16 if most < 32 else 32 if large else 64
    rows = min(most_rows, cuda.padded_size(rows, 8))
    if rows == 8 and not large and most == 64:
        return Shape(rows, 64, 64, 4, 1 if packed else 2, 168)
    tokens = min(most, 32) if large else most
    stages = 1 if most < 32 or (large and d <= 64) else 2
    warps = 8 if d > 64 and large else 4
    return Shape(rows, tokens, min(tokens, 32), warps, stages, 255)


@cache
def processors(device: torch.device) -> int:
    """Return the multiprocessors of a GPU; in the interpreter one."""
    if device.type == "meta":
        return 132
    if device.type != "cuda":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@cache
def _rotation(group: int, device: torch.device) -> Tensor:
    return matrix(group).to(device)


def rotate_groups(x: Tensor, group: int, back: bool = False) -> Tensor:
    """Return x [..., D], groups of channels rotated or rotated back by torch, in its dtype."""
    turned = _rotation(group, x.device)
    groups = x.float().unflatten(-1, (-1, group)) @ (turned.T if back else turned)
    return groups.flatten(-2).to(x.dtype)
