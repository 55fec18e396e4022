"""Triton: attention of many queries to exact tokens, and its log-sum-exp.

A program owns ROWS queries of a head and walks the keys that they see: the softmax is rescaled at
each block (FlashAttention, arXiv:2205.14135). Nothing of the size T x N is stored. Reference:
`reference.attend_prompt`; tolerance: relative 1e-4 in fp32.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...score.triton_kernel import load_rows, masked_logits

# Do not compile again for what changes from chunk to chunk.
_VARY = ["t", "n", "visible_row", "visible_head"]


@triton.jit(do_not_specialize=_VARY)
def attend_prompt(
    q, k, v, visible, out, lse, scale, hq, r, t, n, D,
    q_row, q_head, q_token, k_row, k_head, k_token, v_row, v_head, v_token,
    visible_row, visible_head,
    DB: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, CHANGES: tl.constexpr,
):  # fmt: skip
    """Write ROWS rows of out [B, Hq, T, D] and lse [B, Hq, T]. Grid: (B x Hq, blocks of rows)."""
    line = tl.program_id(0).to(tl.int64)
    row, head = line // hq, line % hq
    i = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    channel = tl.arange(0, DB)
    queries = load_rows(q + row * q_row + head * q_head, i, t, q_token, channel, D)
    k += row * k_row + head // r * k_head
    v += row * v_row + head // r * v_head
    visible += row * visible_row + head // r * visible_head
    heads = tl.zeros([ROWS], tl.int32)  # of a bias, which there is not
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    sums = tl.zeros([ROWS, DB], tl.float32)
    end = n
    if CHANGES.causal:
        end = tl.minimum(n, n - t + (tl.program_id(1) + 1) * ROWS)
    for lo in range(0, end, KEYS):
        j = lo + tl.arange(0, KEYS)
        s = masked_logits(
            queries, load_rows(k, j, n, k_token, channel, D), scale, heads, i, j, visible, 0,
            visible, 0, 0, 1.0, 1.0, visible, n, n - t, CHANGES,
        )  # fmt: skip
        values = load_rows(v, j, n, v_token, channel, D)
        new = tl.maximum(top, tl.max(s, axis=1))
        base = tl.where(new == float("-inf"), 0.0, new)
        weights, shrink = tl.exp(s - base[:, None]), tl.exp(top - base)
        total = total * shrink + tl.sum(weights, axis=1)
        part = tl.dot(weights.to(values.dtype), values, input_precision="ieee")
        sums = sums * shrink[:, None] + part
        top = new
    seen = tl.where(total == 0, 1.0, total)  # a query that sees nothing has out 0 and lse -inf
    tl.store(lse + line * t + i, top + tl.log(seen), mask=i < t)
    places = (line * t + i)[:, None] * D + channel[None, :]
    found = (sums / seen[:, None]).to(out.dtype.element_ty)
    tl.store(out + places, found, mask=(i < t)[:, None] & (channel < D)[None, :])
