"""Rules of the papers' own code in float64, by loops. Imports nothing of kvloom.

Arrays are numpy float64: q [R, N, D] of the query heads that share one key/value head, k [N, D].
"""

from __future__ import annotations

import math

import numpy as np

import naive


def turned(x, position, inv_freq):
    """RoPE at a position for x [..., D]: channel c and c + D/2 turn by position * inv_freq[c]."""
    half = x.shape[-1] // 2
    cos, sin = np.cos(position * inv_freq), np.sin(position * inv_freq)
    a, b = x[..., :half], x[..., half:]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


class SkvqBaseline:
    """RPTQ or SmoothQuant as SKVQ's harness stores them, one side of a layer: x [Hk, N, D].

    Each channel is divided by its divisor; the channels of a group (group_of [Hk, D]) share the
    range that they have in this very token (dynamic, not clipped); no window, no sinks. inv_freq:
    of keys, which are stored as they were before RoPE.
    """

    def __init__(self, bits, group_of, divisor=1.0, inv_freq=None, meta="fp64"):
        self.bits, self.group_of, self.meta = bits, group_of, meta
        self.divisor = np.broadcast_to(divisor, group_of.shape)
        self.inv_freq = inv_freq

    def fake(self, x):
        """What comes back of x after packing."""
        out = np.zeros(x.shape)
        for i in range(x.shape[1]):
            token = x[:, i] if self.inv_freq is None else turned(x[:, i], -i, self.inv_freq)
            smooth = (token / self.divisor)[:, None]
            back = naive.mapped(smooth, self.bits, self.group_of, self.meta)[0][:, 0] * self.divisor
            out[:, i] = back if self.inv_freq is None else turned(back, i, self.inv_freq)
        return out


def pooled(votes, kernel, pool):
    """Mean (zeros beyond the ends) or maximum of `kernel` neighbors of each vote."""
    half, out = kernel // 2, []
    for i in range(len(votes)):
        near = [votes[j] for j in range(i - half, i + half + 1) if 0 <= j < len(votes)]
        out.append(sum(near) / kernel if pool == "avg" else max(near))
    return np.array(out)


def best(scores, count):
    """The places of the `count` highest scores, ascending."""
    return sorted(sorted(range(len(scores)), key=lambda j: -scores[j])[:count])


def snapkv_votes(q, k, scale, window, kernel=7, pool="avg"):
    """SnapKV's votes for the tokens before the window: queries q [R, N, D] and keys k [N, D].

    The last `window` queries vote by their attention to all tokens up to themselves. The votes of
    the R query heads are summed, then pooled over neighbors, which lie before the window too.
    """
    n = len(k)
    votes = np.zeros(n - window)
    for row in range(n - window, n):
        for head in q:
            weights = np.exp(k[: row + 1] @ head[row] * scale)
            votes += weights[: n - window] / weights.sum()
    return votes if pool == "none" else pooled(votes, kernel, pool)


def snapkv(q, k, scale, heavy, window, kernel=7, pool="avg"):
    """Tokens that one key/value head keeps by SnapKV: the `heavy` best voted, and the window."""
    votes = snapkv_votes(q, k, scale, window, kernel, pool)
    return best(votes, heavy) + list(range(len(votes), len(k)))


def pyramidkv(tokens, budget, window, layers, beta=20):
    """Tokens that each layer keeps of a prompt by KVCache-Factory's rule for PyramidKV."""
    average = budget - window
    if tokens < budget:
        return [tokens] * layers
    if tokens < 2 * average:  # the prompt does not fill twice the average: all layers alike
        return [budget] * layers
    top = average // beta
    bottom = 2 * average - top
    if bottom >= tokens - window:
        bottom = tokens - window
        top = 2 * average - bottom
    step = (bottom - top) // (layers - 1)
    return [bottom - layer * step + window for layer in range(layers)]


def minikv(q, k, scale, heavy_share, recent_share):
    """Tokens that one head keeps by MiniKV: queries q [R, N, D] and keys k [N, D]."""
    n = len(k)
    heavy, recent = int(n * heavy_share), int(n * recent_share)
    if heavy + recent >= n:
        return list(range(n))
    mass = np.zeros(n)
    for row in range(n):
        for head in q:
            weights = np.exp(k[: row + 1] @ head[row] * scale)
            mass[: row + 1] += weights / weights.sum()
    return best(mass[: n - recent], heavy) + list(range(n - recent, n))


def kvzip(q, k, scale, sinks, chunk):
    """KVzip's scores of one chunk: queries q [R, T, D] that repeat it, and keys k [P + T, D].

    chunk: (first, end) of the repeated tokens among the P of the prompt. A query attends to the
    first `sinks` tokens where they precede the chunk, to the chunk and to the repetition so far.
    """
    rows = q.shape[1]
    prompt, (lo, hi) = len(k) - rows, chunk
    largest = np.zeros(hi - lo)
    for row in range(rows):
        seen = [*range(min(sinks, lo)), *range(lo, hi), *range(prompt, prompt + row + 1)]
        at = seen.index(lo)
        for head in q:
            weights = np.exp(k[seen] @ head[row] * scale)
            largest = np.maximum(largest, (weights / weights.sum())[at : at + hi - lo])
    return largest


def as_repeated(q, k, first, keys, repeated, inv_freq):
    """One head's queries q [R, N, D] and keys k [N, D], as examples predict them in a repetition.

    first: [R, E, D], the queries of the examples, and keys [E, D]. repeated: for each repetition,
    their queries, and how much further it is. The first 8 are no examples, nor is the last.
    inv_freq: as for `rotated`.
    """

    def turned_all(x, begin, sign):
        if inv_freq is None:
            return x
        return np.array([turned(y, sign * (begin + i), inv_freq) for i, y in enumerate(x)])

    def followed(x):
        x = turned_all(x, 0, -1)
        return np.concatenate([x[1:], x[-1:]])

    found = []
    for head, (own, example) in enumerate(zip(q, first, strict=True)):
        own, example = turned_all(own, 0, -1), turned_all(example, 0, -1)
        again = [turned_all(x[head], distance, -1) for x, distance in repeated]
        change = (np.mean(again, axis=0) - example)[8:-1]
        known = np.hstack([example, followed(keys)])[8:-1]
        m, b = known.mean(axis=0), change.mean(axis=0)
        gram = (known - m).T @ (known - m)
        ridge = np.eye(len(gram)) * np.trace(gram) / len(gram)
        w = np.linalg.inv(gram + ridge) @ (known - m).T @ (change - b)
        found.append(turned_all(own + b + (np.hstack([own, followed(k)]) - m) @ w, 0, 1))
    return np.array(found)


def with_neighbors(scores, share):
    """Scores of one head's tokens, with a share of those of both neighbors."""
    return scores + np.convolve(scores, [share, 0, share], mode="same")


def rotated(q, k, scale, inv_freq, sinks, chunk, repeated=None):
    """Scores of one head's tokens by its queries, rotated after the prompt; k: [N, D].

    A row at a time. chunk: the most tokens of one; all are equally long. q: [R, T, D], of the last
    T tokens. inv_freq: of RoPE, which q and k have; None: none. repeated: [R, T, D], what is
    rotated instead of q.
    """
    scores, before = np.zeros(len(k)), len(k) - q.shape[1]
    chunks = math.ceil(len(k) / chunk)
    for number in range(chunks):
        lo, hi = (len(k) * end // chunks for end in (number, number + 1))
        seen = [*range(min(sinks, lo)), *range(lo, hi)]
        for head, again in zip(q, q if repeated is None else repeated, strict=True):
            for j in range(max(lo, before), hi):
                own, later = head[j - before], again[j - before]
                if inv_freq is not None:
                    later = turned(later[None], len(k) - lo, inv_freq)[0]
                far = np.exp(k[seen] @ later * scale)
                near = np.exp(k[max(lo, sinks) : j + 1] @ own * scale)
                weights = far[len(seen) - (hi - lo) :] / (far.sum() + near.sum())
                scores[lo:hi] = np.maximum(scores[lo:hi], weights)
    return scores


def kept(scores, budget, sinks, recent):
    """Tokens that a head keeps of one score each: the sinks, the newest, and the best others."""
    n = len(scores)
    if budget >= n:
        return list(range(n))
    ranked = [np.inf if i < sinks else score for i, score in enumerate(scores)]
    return best(ranked[: n - recent], budget - recent) + list(range(n - recent, n))


def partial_rotation(q, k, channels):
    """InfiniGen's partial rotation [D, channels] by a prompt's queries [R, N, D] and keys [N, D].

    The right singular vectors of the queries, of which those with the largest |q| + |k| stay.
    """
    rows = np.concatenate(list(q))
    rotation = np.linalg.svd(rows)[2].T
    mass = np.abs(rows @ rotation).sum(axis=0) + np.abs(k @ rotation).sum(axis=0)
    return rotation[:, best(mass, channels)]


def triattention(q, k, inv_freq, furthest, sinks):
    """TriAttention's scores of one head, the largest of its query heads: q [R, N, D], k [N, D].

    The scores of the first `sinks` tokens are the largest.
    """
    n, half = k.shape[0], k.shape[1] // 2
    distances = [2**i for i in range(64) if 2**i <= furthest]
    best = np.full(n - sinks, -np.inf)
    keys = np.stack([turned(k[i], -i, inv_freq) for i in range(n)])
    keys = (keys[:, :half] + 1j * keys[:, half:])[sinks:]
    for head in q:
        raw = np.stack([turned(head[i], -i, inv_freq) for i in range(sinks, n)])
        raw = raw[:, :half] + 1j * raw[:, half:]
        mean, amplitude = raw.mean(axis=0), np.abs(raw).mean(axis=0)
        scores = []
        for i, key in enumerate(keys, sinks):
            product, waves = mean * key.conj(), 0
            for d in distances:
                angle = (n - 1 + d - i) * inv_freq + np.angle(product)
                waves += (np.abs(product) * np.cos(angle)).sum() / len(distances)
            scores.append(waves + ((amplitude - np.abs(mean)) * np.abs(key)).sum())
        scores = np.array(scores)
        best = np.maximum(best, (scores - scores.mean()) / scores.std())
    return np.concatenate([np.full(sinks, best.max()), best])


def expected(q, k, v, scale, inv_freq, future, sinks, epsilon=0.0):
    """Expected Attention's scores of one head: queries q [R, N, D], keys and values k, v [N, D].

    Queries and keys are rotated by RoPE (inv_freq None: by nothing). The scores of the first
    `sinks` tokens are the largest.
    """
    n, d = k.shape
    rotation = np.eye(d)  # its rows are the mean over positions of the rotated unit vectors
    raw = q
    if inv_freq is not None:
        later = range(n, n + future)
        rotation = sum(turned(np.eye(d), at, inv_freq) for at in later) / future
        raw = np.stack([turned(q[:, i], -i, inv_freq) for i in range(n)], axis=1)
    weights = np.zeros(n - sinks)
    for head in raw[:, sinks:]:
        mean = head.mean(axis=0)
        covariance = np.cov(head.T, bias=True)
        mean, covariance = mean @ rotation, rotation.T @ covariance @ rotation
        logits = np.array([scale * x @ mean + scale**2 * x @ covariance @ x / 2 for x in k[sinks:]])
        weights += np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum()
    scores = (weights / len(q) + epsilon) * np.linalg.norm(v[sinks:], axis=1)
    return np.concatenate([np.full(sinks, scores.max()), scores])
