"""Decode attention on CUDA tensors: which cases the Triton kernels cover, and their calls.

A step of few queries attends to a packed prefix and an exact tail in one pass, or to chosen tokens
where they are stored; `decode_kernel` does it. A call reads nothing back from the device: its grid
follows from shapes and from the number of packed tokens, which the host knows. Importing this does
not import Triton; the first call does.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ... import triton_runtime as cuda
from ...quantize.rotated import levels, rotate
from ...quantize.spec import unknown_fields
from .. import reference as ref
from ..kv_view import KVView
from ..reference import State

MAX_QUERIES = 8  # per step: with more, reading keys no longer dominates
WIDEST = {torch.bfloat16: 256, torch.float16: 256, torch.float32: 128}  # head_dim that fits
_KNOWN = {"bits", "axis", "group", "meta", "transform", "residual", "unit"}
_TRANSFORMS = {"span", "reorder", "clip", "smooth", "static", "rotate", "hadamard"}
_LEVELS, _AFFINE = 1, 2  # how codes of rotated channels become numbers


def problems(tokens: int, like: Tensor, keys: Any = None, values: Any = None) -> list[str]:
    """Return why no kernel attends so many queries a step to tokens in these formats.

    like: exact keys [B, Hk, N, D]. keys, values: formats of packed tokens, or None.
    """
    found = [*cuda.problems(like), *_of_formats(like.shape[-1], keys, values)]
    most = WIDEST.get(like.dtype, 256)
    if not 16 <= like.shape[-1] <= most:
        found.append(f"head_dim={like.shape[-1]} is not from 16 to {most} in {like.dtype}")
    if like.dtype == torch.bfloat16 and not like.is_cuda:
        found.append("Triton's interpreter multiplies bf16 wrongly; use fp32 or fp16 there")
    if tokens > MAX_QUERIES:
        found.append(f"more than {MAX_QUERIES} queries a step")
    return found


@cache
def _of_formats(d: int, *formats: Any) -> tuple[str, ...]:
    found = []
    for side, fmt in zip(("keys", "values"), formats, strict=True):
        if fmt is not None:
            found += [f"{side}: {problem}" for problem in _of_format(fmt, d)]
    return tuple(found)


def _of_format(fmt: Any, d: int) -> list[str]:
    """Return why no kernel reads a format; a field that is unknown here is a reason."""
    found = unknown_fields(fmt, _KNOWN)
    if found:
        return found
    if fmt.transform is not None:
        found += unknown_fields(fmt.transform, _TRANSFORMS)
    elif fmt.axis == "token" and d % (fmt.group or d):
        found.append(f"group={fmt.group} does not divide head_dim={d}")
    return found


def attend(
    q: Tensor,
    keys: KVView,
    values: KVView,
    scale: float,
    *,
    causal: bool = False,
    valid: Tensor | None = None,
    softcap: float | None = None,
    bias: Tensor | None = None,
    products: list[Tensor] | None = None,
) -> State:
    """Attend q [B, Hq, T, D] as `reference.attend_views` does; nothing is added to products."""
    n = keys.tokens
    causal = causal and q.shape[2] > 1  # a single query is the last token and sees all
    if not n or not q.shape[0]:
        return _nothing(q)
    masks = _masks(valid, bias)
    return _run(_call(q, keys, values, scale, causal, softcap, masks, None, 0, n))


def attend_gathered(
    q: Tensor,
    keys: KVView,
    values: KVView,
    slots: Tensor,
    begin: int,
    scale: float,
    *,
    first: ref.First | None = None,
    valid: Tensor | None = None,
    softcap: float | None = None,
    bias: Tensor | None = None,
) -> State:
    """Attend q [B, Hq, T, D] as `reference.attend_gathered` does, to chosen tokens where they lie.

    Only cases without `problems`. The tokens at slots are all packed or all exact, on either side.
    """
    lead, m, n = 0 if first is None else first[0].shape[2], slots.shape[2], keys.tokens
    before = [KVView(None, x) for x in first or ()]
    both = [keys, values]
    parts = ((before, None, 0, lead), (both, slots, 0, m), (both, None, begin, n))
    states, at = [], 0
    for views, chosen, lo, hi in parts:  # of views, at slots, tokens from lo to hi
        if hi > lo and q.shape[0]:
            columns = slice(at, at + hi - lo)
            masks = _masks(
                None if valid is None else valid[..., columns],
                None if bias is None else bias[..., columns],
            )
            k, v = views
            states.append(_run(_call(q, k, v, scale, False, softcap, masks, chosen, lo, hi)))
            at += hi - lo
    return ref.merge(states) if states else _nothing(q)


def _nothing(q: Tensor) -> State:
    out = torch.zeros_like(q, dtype=torch.float32)
    return State(out, out.new_full(q.shape[:3], -torch.inf))


class _Masks(NamedTuple):
    """Padding uint8 [B, 1 or H, N] and bias fp32 [B or 1, Hq, N], tokens side by side."""

    valid: Tensor | None
    bias: Tensor | None


def _masks(valid: Tensor | None, bias: Tensor | None) -> _Masks:
    if valid is not None:
        valid = (valid if valid.stride(-1) == 1 else valid.contiguous()).view(torch.uint8)
    if bias is not None:
        bias = bias.float()
        bias = bias if bias.stride(-1) == 1 else bias.contiguous()
    return _Masks(valid, bias)


@cache
def kernels() -> Any:
    """Import the kernels, and with them Triton."""
    from . import decode_kernel

    return decode_kernel


class _Side(NamedTuple):
    """The kernel arguments of keys or values."""

    arguments: dict[str, Any]
    constants: dict[str, Any]
    bits: float  # 0: nothing is packed
    sealed: int
    rotated: int  # channels that are rotated together, or 0
    most: int  # tokens of a tile that registers hold


def _side(letter: str, view: KVView) -> _Side:
    """Return the kernel arguments of keys (letter k) or values (v)."""
    tail, packed, fmt = view.tail, view.packed, view.fmt
    tail = tail if tail.stride(3) == 1 else tail.contiguous()
    d = tail.shape[3]
    codes = scale = zero = group_of = divisor = table = tail  # placeholders that are not read
    meta, bits, kind, group, rotated, sealed, divided = [0, 0, 0], 0.0, 0, 0, 0, 0, False
    rotation = 0
    if packed is not None:
        bits, sealed, how = fmt.bits, packed.hi, packed.channelwise
        codes, scale, zero = (
            x if x.stride(3) == 1 or x.shape[3] == 1 else x.contiguous()
            for x in (packed.codes, packed.scale, packed.zero)
        )
        kind, group, rotated = (0 if fmt.axis == "channel" else 1), fmt.group or d, how.rotated
        if rotated:
            rotation = _LEVELS if fmt.transform.rotate else _AFFINE
        if rotation == _LEVELS:
            zero, table = scale, _levels(bits, tail.device)
        elif how.fixed is not None:  # one for all tokens
            kind = 3
            scale, zero = how.fixed
        elif how.group_of is not None:
            kind, group_of = 2, how.group_of
        if how.divisor is not None:
            divided, divisor = True, how.divisor
        if scale.stride() != zero.stride():
            scale, zero = scale.contiguous(), zero.contiguous()
        if scale.dtype == torch.float8_e4m3fn:  # not all GPUs convert it; the kernel does
            scale, zero = scale.view(torch.uint8), zero.view(torch.uint8)
        meta = [scale.stride(i) if scale.shape[i] > 1 else 0 for i in range(3)]
    names = ("codes", "scale", "zero", "group", "div", "levels", "tail")
    tensors = (codes, scale, zero, group_of, divisor, table, tail)
    steps = [*codes.stride()[:3], *meta, *tail.stride()[:3]]
    strides = ("cb", "ch", "cn", "mb", "mh", "mn", "tb", "th", "tn")
    given = dict(zip((*names, *strides, "sealed"), (*tensors, *steps, sealed), strict=True))
    arguments = {f"{letter}_{name}": x for name, x in given.items()}
    codes_of = 15 if bits == 1.5 else int(bits)
    form = {"BITS": codes_of, "KIND": kind, "GROUP": group, "ROT": rotation, "DIV": divided}
    constants = {f"{letter.upper()}_{name}": x for name, x in form.items()}
    # Groups by channel, levels, bytes by token are looked up one by one; e4m3 is read by hand.
    apart, slow = bits == 1.5 or rotation == _LEVELS or kind == 2, bits in (1, 3, 8)
    most = 16 if apart else 32 if slow or scale.dtype == torch.uint8 else 64
    return _Side(arguments, constants, bits, sealed, rotated, most)


class _Launch(NamedTuple):
    """A call of the two kernels."""

    grid: int
    arguments: dict[str, Any]
    constants: dict[str, Any]
    warps: int
    stages: int
    q: Tensor
    rotated: int  # of values: channels that are rotated together, or 0
    splits: int
    rotated_splits: int  # splits whose values are rotated


def _call(
    q: Tensor,
    keys: KVView,
    values: KVView,
    scale: float,
    causal: bool,
    softcap: float | None,
    masks: _Masks,
    slots: Tensor | None,
    begin: int,
    n: int,
) -> _Launch:
    """Prepare the call for a case; tensors may be on torch's meta device."""
    b, hq, t, d = q.shape
    ks, vs = _side("k", keys), _side("v", values)
    heads = keys.tail.shape[1]  # those that share what they see: of the slots, of the mask
    if slots is not None:
        heads = slots.shape[1]
    elif masks.valid is not None:
        heads = max(heads, masks.valid.shape[1])
    r = hq // heads
    q = q.to(keys.tail.dtype).contiguous()
    rotated_q = q if not ks.rotated else (_rotated(q, ks.rotated).to(q.dtype))
    if slots is not None:
        slots = slots if slots.stride(2) == 1 else slots.contiguous()
    ends = [side.sealed for side in (ks, vs) if side.bits]
    both, end, mixed = n, n, 0
    if ends and slots is None:
        both, end = max(begin, min(ends)), max(begin, max(ends))
        mixed = 0 if both == end else 1 if ks.sealed == end else 2
    most = min(ks.most, vs.most, 64 if slots is None else 16)
    form = _form(d, r * t, q.dtype, most)
    sizes = (form.alone if both == n and not ends else form.tokens, form.tokens, form.alone)
    tiles, splits = [], []
    blocks = b * heads * -(-r * t // form.rows)
    want = max(1, -(-2 * _processors(q.device) // blocks))
    for lo, hi, size in zip((begin, both, end), (both, end, n), sizes, strict=True):
        count = -(-hi // size) - lo // size if hi > lo else 0
        tiles.append(count)
        splits.append(min(count, -(-want * (hi - lo) // (n - begin))))
    valid, bias = masks
    arguments = {
        "q_ptr": q, "rotated_ptr": rotated_q, **ks.arguments, **vs.arguments,
        "valid_ptr": q if valid is None else valid, "bias_ptr": q if bias is None else bias,
        "slots_ptr": q if slots is None else slots,
        **_steps("valid", valid), **_steps("bias", bias), **_steps("slots", slots),
        "scale": float(scale), "softcap": float(softcap or 1.0),
        "h": heads, "share": heads // keys.tail.shape[1], "r": r, "t": t, "n": n, "begin": begin,
        "both": both, "split0": splits[0], "split1": splits[1], "split2": splits[2],
        "tiles0": tiles[0], "tiles1": tiles[1], "tiles2": tiles[2],
    }  # fmt: skip
    constants = {
        **ks.constants, **vs.constants, "D": d, "DP": cuda.room(d), "BM": form.rows,
        "BN0": sizes[0], "BN1": sizes[2], "MIXED": mixed, "CAUSAL": causal,
        "VALID": valid is not None, "SOFTCAP": softcap is not None, "BIAS": bias is not None,
        "SLOTS": slots is not None,
    }  # fmt: skip
    splits_all = sum(splits)
    values_packed = splits[0] + (splits[1] if mixed == 2 else 0)
    return _Launch(
        splits_all * blocks, arguments, constants, form.warps, form.stages, q, vs.rotated,
        splits_all, values_packed,
    )  # fmt: skip


def _run(call: _Launch) -> State:
    """Launch both kernels."""
    by = kernels()
    b, hq, t, d = call.q.shape
    rows, s = b * hq * t, call.splits
    new = torch.float32
    acc, ml = call.q.new_empty(rows, s, d, dtype=new), call.q.new_empty(rows, s, 2, dtype=new)
    out, lse = call.q.new_empty(b, hq, t, d, dtype=new), call.q.new_empty(b, hq, t, dtype=new)
    back = torch.empty_like(out) if call.rotated else out
    with cuda.on(call.q):
        by._split[(call.grid,)](
            **call.arguments, acc_ptr=acc, ml_ptr=ml, **call.constants,
            num_warps=call.warps, num_stages=call.stages,
        )  # fmt: skip
        by._merge[(rows,)](
            acc, ml, out, back, lse, s, call.rotated_splits, D=d, DP=call.constants["DP"], BS=16,
            ROTATED=call.rotated > 0, num_warps=4,
        )  # fmt: skip
    if call.rotated:
        out = out + _rotated(back, call.rotated, back=True)
    return State(out, lse)


def _steps(name: str, x: Tensor | None) -> dict[str, int]:
    """Strides of the first two dimensions, 0 where there is one of a kind."""
    b, h = (0, 0) if x is None else (x.stride(i) if x.shape[i] > 1 else 0 for i in (0, 1))
    return {f"{name}_b": b, f"{name}_h": h}


class _Shape(NamedTuple):
    """Shapes of tiles: query rows, packed tokens, exact tokens; and warps a program."""

    rows: int
    tokens: int
    alone: int
    warps: int
    stages: int


def _form(d: int, rows: int, dtype: torch.dtype, most: int) -> _Shape:
    """Return shapes of tiles that neither spill nor need more than 99 KiB of shared memory.

    most: tokens of a tile that its formats allow.
    """
    large = dtype == torch.float32 or d > 128
    tokens = min(most, 32) if large else most
    rows = min(16 if most < 32 else 32 if large else 64, cuda.room(rows))
    return _Shape(rows, tokens, min(tokens, 32), 8 if d > 64 and large else 4, 2)


@cache
def _processors(device: torch.device) -> int:
    """Multiprocessors of a GPU; in the interpreter one."""
    if device.type == "meta":
        return 132
    if device.type != "cuda":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@cache
def _rotation(group: int, device: torch.device) -> Tensor:
    """The matrix whose product with a row is the row rotated, fp32 [group, group]."""
    return rotate(torch.eye(group)).to(device)


@cache
def _levels(bits: float, device: torch.device) -> Tensor:
    return levels(bits).to(device)


def _rotated(x: Tensor, group: int, back: bool = False) -> Tensor:
    """x [..., D] with groups of channels rotated, or rotated back, fp32."""
    matrix = _rotation(group, x.device)
    return (x.float().unflatten(-1, (-1, group)) @ (matrix.T if back else matrix)).flatten(-2)
