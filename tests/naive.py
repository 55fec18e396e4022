"""The papers' formulas in float64, by loops where possible. Imports nothing of kvloom.

Arrays are numpy float64: q [B, Hq, T, D], k and v [B, Hk, N, D]; one head's tokens are [N, D].
"""

from __future__ import annotations

import math

import numpy as np


def attention(q, k, v, scale, causal=False, visible=None, softcap=None, bias=None, sinks=None):
    """Softmax attention, one query row at a time: (out [B, Hq, T, D], lse [B, Hq, T]).

    causal: query i of T is token N - T + i and sees no later one. visible: bool [B, 1 or Hk, N].
    bias: [B or 1, Hq, N], added to the logits after softcap. sinks: [Hq], a logit of each head that
    has no value. A row that sees nothing gives out 0 and lse -inf, or its sink.
    """
    b, hq, t, _ = q.shape
    hk, n = k.shape[1], k.shape[2]
    out, lse = np.zeros((b, hq, t, v.shape[-1])), np.full((b, hq, t), -np.inf)
    for i in range(b):
        for h in range(hq):
            g = h // (hq // hk)  # the key/value head that query head h shares
            for row in range(t):
                see = np.ones(n, dtype=bool)
                if causal:
                    see &= np.arange(n) <= n - t + row
                if visible is not None:
                    see &= visible[i, g if visible.shape[1] > 1 else 0]
                if not see.any():
                    lse[i, h, row] = -np.inf if sinks is None else sinks[h]
                    continue
                s = k[i, g][see] @ q[i, h, row] * scale
                if softcap is not None:
                    s = softcap * np.tanh(s / softcap)
                if bias is not None:
                    s = s + bias[i % len(bias), h][see]
                w = np.exp(s - s.max())
                total = w.sum() + (0 if sinks is None else math.exp(sinks[h] - s.max()))
                out[i, h, row] = w @ v[i, g][see] / total
                lse[i, h, row] = math.log(total) + s.max()
    return out, lse


def column_mass(
    q,
    k,
    scale,
    visible=None,
    visible_queries=None,
    softcap=None,
    bias=None,
    noise=None,
    tau=1.0,
    reduce_max=False,
):
    """Sum over query rows of softmax((logits + noise) / tau), one row at a time: [B, Hq, N].

    Query i of T is token N - T + i; it sees no later token. visible: bool [B, 1 or Hk, N].
    visible_queries: bool [B, 1, T]. noise: [B, Hq, T, N]. reduce_max: the largest weight of any row
    in place of the sum.
    """
    b, hq, t, _ = q.shape
    hk, n = k.shape[1], k.shape[2]
    mass = np.zeros((b, hq, n))
    for i in range(b):
        for h in range(hq):
            g = h // (hq // hk)
            for row in range(t):
                if visible_queries is not None and not visible_queries[i, 0, row]:
                    continue
                itself = n - t + row
                s = k[i, g] @ q[i, h, row] * scale
                if softcap is not None:
                    s = softcap * np.tanh(s / softcap)
                if bias is not None:
                    s = s + bias[i % len(bias), h]
                if noise is not None:
                    s = s + noise[i, h, row]
                see = [
                    j
                    for j in range(itself + 1)
                    if visible is None or visible[i, g % visible.shape[1], j]
                ]
                if see:
                    w = np.exp((s[see] - s[see].max()) / tau)
                    w = w / w.sum()
                    mass[i, h, see] = (
                        np.maximum(mass[i, h, see], w) if reduce_max else mass[i, h, see] + w
                    )
    return mass


def bf16(x: float) -> float:
    """Round to bfloat16: the upper half of a float32, half to even."""
    word = int(np.float32(x).view(np.uint32))
    word += 0x7FFF + ((word >> 16) & 1)
    return float(np.uint32(word & 0xFFFF0000).view(np.float32))


def e4m3(x: float) -> float:
    """Round to fp8 e4m3: 3 bits of fraction, exponents from -6, half to even, at most 448."""
    if x == 0:
        return 0.0
    quantum = 2.0 ** (max(math.floor(math.log2(abs(x))), -6) - 3)
    return math.copysign(min(np.rint(abs(x) / quantum) * quantum, 448.0), x)


META = {  # how a scale or zero is stored; to 16 bits by way of the fp32 it is computed in
    "fp64": float,
    "fp32": lambda x: float(np.float32(x)),
    "fp16": lambda x: float(np.float16(np.float32(x))),
    "bf16": bf16,
    "fp8": lambda x: e4m3(float(np.float32(x))),
}
META_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2, "fp8": 1}


def top(bits):
    """The highest code: 1.5 bit is three levels."""
    return 2 if bits == 1.5 else 2**bits - 1


def holdable(scale, meta):
    """A scale as large or small as the metadata can hold: fp8 never makes 0 of a scale."""
    return min(max(scale, 2.0**-9), 448.0) if meta == "fp8" and scale > 0 else scale


def groups(x, axis, group):
    """Index pairs of the groups of x [N, D]: (place in scale and zero, place in x)."""
    n, d = x.shape
    if axis == "channel":  # `group` consecutive tokens of one channel
        for g in range(n // group):
            for c in range(d):
                yield (g, c), (slice(g * group, (g + 1) * group), c)
    else:  # `group` consecutive channels of one token
        for i in range(n):
            for g in range(d // group):
                yield (i, g), (i, slice(g * group, (g + 1) * group))


def quantize(x, bits, axis, group, meta="fp64"):
    """Codes, scale, zero of x [N, D]: zero = min, scale = (max - min) / top."""
    n, d = x.shape
    shape = (n // group, d) if axis == "channel" else (n, d // group)
    scale, zero = np.zeros(shape), np.zeros(shape)
    for at, where in groups(x, axis, group):
        low, high = x[where].min(), x[where].max()
        zero[at] = META[meta](low)
        scale[at] = META[meta](holdable((high - low) / top(bits), meta))
    return codes_for(x, scale, zero, bits, axis, group), scale, zero


def quotients(x, scale, zero, axis, group):
    """(x - zero) / scale before rounding; 0 where the scale is 0."""
    out = np.zeros_like(x)
    for at, where in groups(x, axis, group):
        if scale[at] > 0:
            out[where] = (x[where] - zero[at]) / scale[at]
    return out


def codes_for(x, scale, zero, bits, axis, group):
    """clamp(round((x - zero) / scale), 0, top), half to even."""
    return np.clip(np.rint(quotients(x, scale, zero, axis, group)), 0, top(bits)).astype(int)


def dequantize(codes, scale, zero, axis, group):
    """code * scale + zero."""
    out = np.zeros(codes.shape)
    for at, where in groups(codes, axis, group):
        out[where] = codes[where] * scale[at] + zero[at]
    return out


def fake(x, bits, axis, group, meta="fp64"):
    """What comes back of x [N, D] after packing."""
    return dequantize(*quantize(x, bits, axis, group, meta), axis, group)


def mapped(x, bits, group_of, meta="fp64", clip=1.0):
    """What comes back of x [Hk, N, D] in groups of any channels of a token, and scale, zero.

    group_of: [Hk, D]; clip: one alpha, or one a group, times the ends of a group.
    """
    count = int(group_of.max()) + 1
    clip = np.broadcast_to(clip, count)
    n = x.shape[1]
    out, scale, zero = np.zeros(x.shape), np.zeros((n, count)), np.zeros((n, count))
    for i in range(n):
        for g in range(count):
            some = x[:, i][group_of == g]
            low, high = clip[g] * some.min(), clip[g] * some.max()
            zero[i, g] = META[meta](low)
            scale[i, g] = META[meta](holdable((high - low) / top(bits), meta))
            step = scale[i, g] or 1.0
            codes = np.clip(np.rint((some - zero[i, g]) / step), 0, top(bits))
            out[:, i][group_of == g] = codes * scale[i, g] + zero[i, g]
    return out, scale, zero


def _bit_places(token, bits):
    """[(bit of the code, byte row, bit of the byte)] of one token's code."""
    if bits == 3:  # 8 tokens, 3 byte rows: low two bits of 4 + 4 tokens, then all the high bits
        block, t = divmod(token, 8)
        low = (3 * block + t // 4, 2 * (t % 4))
        return [(0, low[0], low[1]), (1, low[0], low[1] + 1), (2, 3 * block + 2, t)]
    row, t = divmod(token, 8 // bits)
    return [(bit, row, bits * t + bit) for bit in range(bits)]


def tokens_per_block(bits):
    """The least number of tokens whose codes fill whole bytes (1.5 bit: 3^5 <= 2^8)."""
    return 5 if bits == 1.5 else 8 // math.gcd(8, bits)


def pack(codes, bits):
    """Codes [N, D] to bytes [rows, D], bit by bit; 1.5 bit: digit by digit in base 3."""
    n, d = codes.shape
    if bits == 1.5:
        out = np.zeros((-(-n // 5), d), dtype=np.uint8)
        for token in range(n):
            out[token // 5] += (codes[token] * 3 ** (token % 5)).astype(np.uint8)
        return out
    per_block = tokens_per_block(bits)
    out = np.zeros((-(-n // per_block) * per_block * bits // 8, d), dtype=np.uint8)
    for token in range(n):
        for bit, row, place in _bit_places(token, bits):
            out[row] |= (((codes[token].astype(int) >> bit) & 1) << place).astype(np.uint8)
    return out


def unpack(packed, bits, tokens):
    """Bytes [rows, D] to codes [tokens, D], bit by bit; 1.5 bit: digit by digit in base 3."""
    if bits == 1.5:
        digits = [[np.base_repr(b, 3).zfill(5)[::-1] for b in row] for row in packed]
        codes = [[int(d[t % 5]) for d in digits[t // 5]] for t in range(tokens)]
        return np.array(codes, dtype=int).reshape(tokens, packed.shape[1])
    out = np.zeros((tokens, packed.shape[1]), dtype=int)
    for token in range(tokens):
        for bit, row, place in _bit_places(token, bits):
            out[token] |= ((packed[row].astype(int) >> place) & 1) << bit
    return out


class Kivi:
    """KIVI by its definition (arXiv:2402.02750, Algorithm 1 with the official code's order).

    Keys: of n tokens the first n - n mod R are packed per channel, the rest is exact. Values: all
    but the newest R are packed per token. A prompt attends exactly; a decode step attends to what
    was stored before it and to its own exact key and value, and packs afterwards.
    """

    def __init__(self, bits, group, residual, meta="fp64"):
        self.bits, self.group, self.residual, self.meta = bits, group, residual, meta

    def prompt(self, q, k, v, scale):
        """Attend exactly, then store."""
        n, r = k.shape[2], self.residual
        out, _ = attention(q, k, v, scale, causal=True)
        packed = n - n % r
        self.packed_keys = self._fake(k[:, :, :packed], "channel")
        self.exact_keys = k[:, :, packed:]
        self.packed_values = self._fake(v[:, :, : max(0, n - r)], "token")
        self.exact_values = v[:, :, max(0, n - r) :]
        return out

    def decode(self, q, k, v, scale):
        """One token: attend, then pack what is due."""
        self.exact_keys = np.concatenate([self.exact_keys, k], axis=2)
        self.exact_values = np.concatenate([self.exact_values, v], axis=2)
        out, _ = attention(q, self.keys, self.values, scale)
        if self.exact_keys.shape[2] == self.residual:
            self.packed_keys = np.concatenate(
                [self.packed_keys, self._fake(self.exact_keys, "channel")], axis=2
            )
            self.exact_keys = self.exact_keys[:, :, :0]
        if self.exact_values.shape[2] > self.residual:
            oldest = self._fake(self.exact_values[:, :, :1], "token")
            self.packed_values = np.concatenate([self.packed_values, oldest], axis=2)
            self.exact_values = self.exact_values[:, :, 1:]
        return out

    @property
    def keys(self):
        return np.concatenate([self.packed_keys, self.exact_keys], axis=2)

    @property
    def values(self):
        return np.concatenate([self.packed_values, self.exact_values], axis=2)

    def _fake(self, x, axis):
        out = np.zeros(x.shape)
        for i in range(x.shape[0]):
            for h in range(x.shape[1]):
                out[i, h] = fake(x[i, h], self.bits, axis, self.group, self.meta)
        return out


def kivi_nbytes(n, head_dim, bits, group, residual, meta, exact_bytes):
    """Bytes of one head's n tokens under KIVI; codes in whole bytes, `exact_bytes` a number."""

    def side(packed):
        per_block = tokens_per_block(bits)
        codes = -(-packed // per_block) * per_block * bits // 8 * head_dim
        pairs = packed * head_dim // group  # one scale and one zero a group
        return codes + 2 * META_BYTES[meta] * pairs + (n - packed) * head_dim * exact_bytes

    return side(n - n % residual) + side(max(0, n - residual))


def nearest(key, centroids, distance):
    """Number of the centroid nearest to one key [D], the first of equals."""
    if distance == "l2":
        return int(np.argmin([np.sum((key - c) ** 2) for c in centroids]))
    length = (lambda x: math.sqrt(x @ x)) if distance == "cosine" else (lambda x: 1.0)
    return int(np.argmax([key @ c / (length(key) * length(c)) for c in centroids]))


def kmeans(x, start, distance, iterations):
    """Cluster keys [N, D] from the keys `start`: (centroids [C, D], labels [N]).

    A centroid is the mean of its keys; without keys it stays. arXiv:2412.03213, section III-B.
    """
    centroids, labels = np.array([x[int(j)] for j in start]), None
    for _ in range(iterations):
        now = np.array([nearest(key, centroids, distance) for key in x])
        if labels is not None and (now == labels).all():
            break
        labels = now
        for c in range(len(centroids)):
            if (labels == c).any():
                centroids[c] = x[labels == c].mean(axis=0)
    return centroids, labels


def select_clusters(scores, labels, m):
    """The first m tokens, clusters by falling score, tokens of a cluster by age."""
    best = sorted(range(len(scores)), key=lambda c: -scores[c])
    return [j for c in best for j in range(len(labels)) if labels[j] == c][:m]


def page_score(q, keys):
    """Quest's bound on q . k for the keys [P, D] of a page (arXiv:2406.10774, algorithm 1)."""
    return sum(max(q[c] * keys[:, c].min(), q[c] * keys[:, c].max()) for c in range(len(q)))


def output_error(q, k, v, packed_k, packed_v, scale, rows, exact=(0, 0), softcap=None):
    """Squared error of attention's output when tokens are seen as packing gives them back.

    q: [Hq, S, D], queries of the tokens `rows`; all others [Hk, N, D]. A query sees the first
    exact[0] tokens unpacked, and the newest exact[1], itself among them.
    """
    k, v, packed_k, packed_v = (
        np.repeat(x, len(q) // len(k), axis=0) for x in (k, v, packed_k, packed_v)
    )
    at, row = np.arange(k.shape[1]), np.array(rows)[:, None]

    def out(packed):
        s = np.where(packed, q @ packed_k.transpose(0, 2, 1), q @ k.transpose(0, 2, 1)) * scale
        s = s if softcap is None else softcap * np.tanh(s / softcap)
        w = np.where(at <= row, np.exp(s - s.max(axis=-1, keepdims=True)), 0.0)
        w /= w.sum(axis=-1, keepdims=True)
        return np.where(packed, w, 0) @ packed_v + np.where(packed, 0, w) @ v

    packed = (at >= exact[0]) & (at <= row - exact[1])
    return np.sum((out(packed) - out(np.zeros_like(packed))) ** 2)


def clip_factors(missed, grid, groups):
    """The best factor of a grid for all groups, and then one group after the other: by trying all.

    missed: gives the error of factors [groups].
    """
    layer = min(grid, key=lambda a: missed(np.full(groups, a)))
    alphas = np.full(groups, layer)
    for g in range(groups):
        alphas[g] = min(grid, key=lambda a: missed(np.where(np.arange(groups) == g, a, alphas)))
    return layer, alphas
