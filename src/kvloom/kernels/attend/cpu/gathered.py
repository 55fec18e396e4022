"""Decode attention over chosen tokens on CPU tensors: which cases, and how the kernel is called.

Tokens are read where they lie, in a dense or a packed store; nothing is gathered into memory first.
`staged` says how, `forms` which formats. Importing this does not import Numba.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from ... import dispatch
from ..kv_view import Codes, Strand
from ..reference import First, State
from . import coverage as forms
from .arguments import WORTH, into, padded, place, side, turning, whole
from .rope_tables import tables


def problems(tokens: int, like: Tensor, keys: Any = None, values: Any = None) -> list[str]:
    """Why no kernel reads chosen tokens of these formats for so many queries a step.

    like: exact keys [B, Hk, N, D]. keys, values: formats of packed tokens, or None.
    """
    found = list(forms.problems(like.shape[-1], like.shape[1], like.dtype, keys, values))
    if like.device.type != "cpu":
        found.append(f"the tensors are on {like.device.type}")
    if tokens != 1:
        found.append(f"{tokens} queries a step are not one")
    return found


def attend(
    q: Tensor,
    keys: Strand,
    values: Strand,
    slots: Tensor,
    begin: int,
    scale: float,
    *,
    first: First | None = None,
    valid: Tensor | None = None,
    softcap: float | None = None,
    bias: Tensor | None = None,
) -> State:
    """Attend as `ref.attend_gathered` does, without gathering.

    Only cases without `problems`. Packed tokens are not rounded to the dtype of the exact ones.
    """
    b, hq, _, d = q.shape
    h, m = slots.shape[1:]
    hk, dtype = keys.tail.shape[1], keys.tail.dtype
    rows, s = hq // h, 0 if first is None else first[0].shape[2]
    n = s + m + keys.tokens - begin
    lse = q.new_empty(b, hq, 1, dtype=torch.float32)
    if not n or not b:
        out = q.new_zeros(b, hq, 1, d, dtype=torch.float32)
        return State(out, lse.fill_(-torch.inf))
    turned, kfmt = turning(keys)
    kernel, tile, bits = _kernel(d, hk, rows, dtype, turned, kfmt, values.fmt)
    threads = min(torch.get_num_threads(), 1 + 2 * b * hk * n * d // WORTH)
    splits = 1 if threads == 1 else min(-(-n // tile), -(-4 * threads // (b * h)))
    queries = q.float().contiguous()
    meeting = queries
    if keys.packed is not None and kfmt is not None and forms.own_space(kfmt):
        meeting = into(queries, keys.packed.channelwise)
    sets = 1 + (values.fmt is not None and forms.own_space(values.fmt))
    out = q.new_empty(b, hk, h // hk, sets, rows, d, dtype=torch.float32)
    parts = q.new_empty(b * h * splits * rows * (sets * d + 32), dtype=torch.float32)
    if valid is not None:
        valid = padded(valid).expand(b, h, -1)
    if bias is not None:
        bias = padded(bias.float()).expand(b, hq, -1)
    slots = slots if slots.stride(2) == 1 else slots.contiguous()
    lead: list[Any] = [x if x.stride(3) == 1 else x.contiguous() for x in first or ()]
    lead = lead or [None, None]
    (at_keys, alive), (at_values, alive_too) = side(keys), side(values)
    at_turns, alive_as_well = _turns(keys.packed, d)
    kernel.run(
        (
            b, h, rows, h // hk, s, m, begin, n, splits, bits(scale), bits(softcap or 0.0),
            queries.data_ptr(), meeting.data_ptr(), out.data_ptr(), lse.data_ptr(),
            parts.data_ptr(), *place(bias, 2), *place(valid, 2), *place(slots, 2),
            *place(lead[0], 3), *place(lead[1], 3), *at_keys, *at_turns, *at_values,
        ),
        b * h,
        threads,
    )  # fmt: skip
    del alive, alive_too, alive_as_well
    if sets == 1:
        return State(out.view(b, hq, 1, d), lse)
    if values.packed is None:
        return State(out[..., 0, :, :].reshape(b, hq, 1, d), lse)
    return State(whole(out, values.packed.channelwise).view(b, hq, 1, d), lse)


def _turns(packed: Codes | None, d: int) -> tuple[tuple[int, ...], tuple[Tensor, ...]]:
    """Where the tables for keys packed before RoPE and their positions lie; at last, whether each
    has its own, or stands one behind the one before.
    """
    if packed is None or packed.rope is None:
        return (0,) * 6, ()
    assert packed.at is not None
    at, each = packed.at.contiguous(), packed.at.shape[2] > 1
    most = at if at.numel() == 1 else at.max()
    near, far = tables(packed.rope, d, int(most) + (1 if each else packed.hi))
    return (near.data_ptr(), far.data_ptr(), *place(at, 2), int(each)), (near, far, at)


@cache
def _kernel(
    d: int, heads: int, rows: int, dtype: torch.dtype, turned: tuple[int, bool], *formats: Any
) -> tuple[Any, int, Any]:
    """The kernel for a case, as `forms.kernel`."""
    with dispatch.loading():
        from ... import cpu_runtime as team
        from . import gathered_kernel as staged
    form = staged.Form(
        d,
        min(4, 1 << (rows - 1).bit_length()),
        forms.DTYPES[dtype],
        forms.way(formats[0], d, heads, turned),
        forms.way(formats[1], d, heads),
        forms.of_both(formats, forms.number_format, 0),
        forms.of_both(formats, lambda fmt: fmt.group if fmt.axis == "channel" else 1, 1),
        forms.of_both(formats, forms.own_space, False),
    )
    return staged.kernel(form), staged.TILE, team.bits
