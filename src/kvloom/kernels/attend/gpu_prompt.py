"""A prompt's attention on the GPU as a state: out, and the log-sum-exp of every row.

Flash attention, forward: a program owns BLOCK_M query rows of one head and walks the keys that
they may see in blocks of BLOCK_N with a running softmax, so nothing of size T x N is ever stored.
The log-sum-exp is what a later pass needs to know the weights exactly (attention mass per key).
Grid: one program for each (block of query rows, batch row, query head). The reference is
`ref.attend`; products are taken in the dtype of the keys (fp32: as three of tf32) and summed in
fp32.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..ahead import Form, signature
from .gpu import WIDEST
from .ref import State


@triton.jit
def _prompt(
    q_ptr, k_ptr, v_ptr, valid_ptr, bias_ptr, out_ptr, lse_ptr,
    q_b, q_h, q_t, k_b, k_h, k_n, v_b, v_h, v_n, valid_b, valid_h, bias_b, bias_h,
    hq, r, t, n, scale, softcap,
    D: tl.constexpr, DP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr, VALID: tl.constexpr, SOFTCAP: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """Rows m0 to m0 + BLOCK_M of one head; causal: row m sees keys up to n - t + m."""
    blocks = tl.cdiv(t, BLOCK_M)
    pid = tl.program_id(0)
    m0 = (blocks - 1 - pid % blocks) * BLOCK_M  # the rows that see most first
    b = (pid // blocks // hq).to(tl.int64)
    h = (pid // blocks % hq).to(tl.int64)
    o_m = m0 + tl.arange(0, BLOCK_M)
    o_d = tl.arange(0, DP)
    rows, channels = o_m[:, None] < t, o_d[None, :] < D
    q_at = q_ptr + b * q_b + h * q_h + o_m.to(tl.int64)[:, None] * q_t + o_d[None, :]
    q = tl.load(q_at, mask=rows & channels, other=0.0)
    k_ptr += b * k_b + h // r * k_h
    v_ptr += b * v_b + h // r * v_h
    top = tl.full([BLOCK_M], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, DP], tl.float32)
    end = n
    if CAUSAL:
        end = tl.minimum(n, n - t + m0 + BLOCK_M)
    for n0 in range(0, end, BLOCK_N):
        o_n = n0 + tl.arange(0, BLOCK_N)
        here = o_n[:, None] < n
        at = o_n.to(tl.int64)[:, None]
        k = tl.load(k_ptr + at * k_n + o_d[None, :], mask=here & channels, other=0.0)
        s = tl.dot(q, tl.trans(k), input_precision="tf32x3") * scale
        if SOFTCAP:  # c tanh(x / c) = c - 2 c / (exp(2 x / c) + 1)
            s = softcap - 2 * softcap / (tl.exp(s * (2 / softcap)) + 1)
        if BIAS:
            s += tl.load(bias_ptr + b * bias_b + h * bias_h + o_n, mask=o_n < n, other=0.0)[None, :]
        see = o_n[None, :] < n
        if CAUSAL:
            see = see & (o_n[None, :] <= n - t + o_m[:, None])
        if VALID:
            seen = tl.load(valid_ptr + b * valid_b + h // r * valid_h + o_n, mask=o_n < n, other=0)
            see = see & (seen[None, :] != 0)
        s = tl.where(see, s, -float("inf"))
        new = tl.maximum(top, tl.max(s, 1))
        sub = tl.where(new == -float("inf"), 0.0, new)
        p = tl.exp(s - sub[:, None])
        shrink = tl.exp(top - sub)
        total = total * shrink + tl.sum(p, 1)
        v = tl.load(v_ptr + at * v_n + o_d[None, :], mask=here & channels, other=0.0)
        acc = acc * shrink[:, None] + tl.dot(p.to(v.dtype), v, input_precision="tf32x3")
        top = new
    some = tl.where(total > 0, total, 1.0)
    place = (b * hq + h) * t + o_m
    out_at = out_ptr + place[:, None] * D + o_d[None, :]
    tl.store(out_at, acc / some[:, None], mask=rows & channels)
    lse = tl.where(total > 0, top + tl.log(some), -float("inf"))
    tl.store(lse_ptr + place, lse, mask=o_m < t)


def prompt(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    *,
    causal: bool = False,
    valid: Tensor | None = None,
    softcap: float | None = None,
    bias: Tensor | None = None,
) -> State:
    """Attend q [B, Hq, T, D] to k, v [B, Hk, N, D] as `ref.attend` does, with its options.

    q, k, v have one dtype: fp32, fp16 or bf16; D is 16 to 256, in fp32 to 128. Returns fp32 out
    [B, Hq, T, D] and lse [B, Hq, T]. Raises `ValueError` for other D.
    """
    if not 16 <= q.shape[-1] <= WIDEST[q.dtype]:
        raise ValueError(
            f"head_dim={q.shape[-1]} is not from 16 to {WIDEST[q.dtype]}; use ref.attend"
        )
    b, hq, t, d = q.shape
    out = q.new_empty(b, hq, t, d, dtype=torch.float32)
    lse = q.new_empty(b, hq, t, dtype=torch.float32)
    if b * t:
        arguments, constants, warps, stages = _call(q, k, v, scale, causal, valid, softcap, bias)
        grid = (triton.cdiv(t, constants["BLOCK_M"]) * b * hq,)
        given = {**arguments, "out_ptr": out, "lse_ptr": lse}
        _prompt[grid](**given, **constants, num_warps=warps, num_stages=stages)
    return State(out, lse)


def _call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    causal: bool,
    valid: Tensor | None,
    softcap: float | None,
    bias: Tensor | None,
) -> tuple[dict[str, Any], dict[str, Any], int, int]:
    """A call's arguments, constants, warps and stages."""
    _, hq, t, d = q.shape
    hk, n = k.shape[1:3]
    q, k, v = (x if x.stride(3) == 1 else x.contiguous() for x in (q, k, v))
    steps = [0, 0]
    if valid is not None:
        valid = valid.contiguous().view(torch.uint8)
        steps = [valid.stride(0), valid.stride(1) if valid.shape[1] > 1 else 0]
    more = [0, 0]
    if bias is not None:
        bias = bias.float().contiguous()
        more = [bias.stride(0) if bias.shape[0] > 1 else 0, bias.stride(1)]
    names = (
        "q_b", "q_h", "q_t", "k_b", "k_h", "k_n", "v_b", "v_h", "v_n",
        "valid_b", "valid_h", "bias_b", "bias_h",
    )  # fmt: skip
    strides = [*q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *steps, *more]
    arguments = {
        "q_ptr": q, "k_ptr": k, "v_ptr": v,
        "valid_ptr": q if valid is None else valid, "bias_ptr": q if bias is None else bias,
        "out_ptr": q, "lse_ptr": q,
        **dict(zip(names, strides, strict=True)),
        "hq": hq, "r": hq // hk, "t": t, "n": n,
        "scale": float(scale), "softcap": float(softcap or 1.0),
    }  # fmt: skip
    wide, exact = triton.next_power_of_2(d), q.dtype == torch.float32
    block = 32 if exact or wide > 128 else 64
    block = 16 if exact and wide > d else block  # a mask of channels takes registers too
    constants = {
        "D": d, "DP": wide, "BLOCK_M": block, "BLOCK_N": block,
        "CAUSAL": causal, "VALID": valid is not None,
        "SOFTCAP": softcap is not None, "BIAS": bias is not None,
    }  # fmt: skip
    return arguments, constants, 8 if exact or wide == 128 else 4, 2


def forms() -> Iterator[Form]:
    """What is compiled ahead of time."""
    for d in (64, 80, 96, 128, 256):
        for dtype in (x for x, most in WIDEST.items() if d <= most):
            q, k = (torch.empty(1, h, 256, d, dtype=dtype, device="meta") for h in (8, 2))
            valid = torch.empty(1, 1, 256, dtype=torch.bool, device="meta")
            bias = torch.empty(1, 8, 256, device="meta")
            plain: tuple[Any, ...] = (None, None, None)
            for name, options in {"": plain, " all": (valid, 5.0, bias)}.items():
                arguments, constants, warps, stages = _call(q, k, k, 1.0, True, *options)
                arguments |= {"out_ptr": bias, "lse_ptr": bias}
                yield Form(
                    f"prompt d{d} {str(dtype).removeprefix('torch.')}{name}",
                    _prompt, signature(arguments), constants, warps, stages,
                    brief=d == 128 and dtype == torch.bfloat16 and name != "",
                )  # fmt: skip
