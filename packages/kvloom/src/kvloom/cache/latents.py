"""Attention over latents (multi-head latent attention: arXiv:2405.04434, section 2.1).

A latent layer stores two vectors of each token. As the key, it stores the positional part of the
key [p], which all heads share. As the value, it stores the latent [r], from which heads expand the
rest of the key and the value. Its queries [B, Hq, T, p + r] are absorbed: the part that is
multiplied with latents has been multiplied with the weights that expand them to keys. The attention
of absorbed queries to latents is a latent, too. The model's weights expand it to the output of a
head. So no step expands the past. Decides how regions of such tokens become regions that
`attend_to` reads.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from ..kernels.attend.reference import UNPACK_TOKENS
from ..kernels.attend.regions import KVView, Region, Slots
from ..kernels.select.reference import gather


def whole_keys(k: Tensor, v: Tensor) -> Tensor:
    """Return what absorbed queries are multiplied with, [B, 1, N, p + r]: both parts of a key."""
    return torch.cat([k, v], dim=-1)


def query_keys(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return the keys that q is multiplied with: k, or both parts of the keys of a latent layer."""
    return k if q.shape[-1] == k.shape[-1] else whole_keys(k, v)


def absorbed(q: Tensor, regions: Sequence[Region], scale: float) -> tuple[Tensor, list[Region]]:
    """Return queries and regions with the same attention, in which keys are as long as queries.

    q: [B, Hq, T, p + r]. For one query, the logits of the positional parts become a bias; kernels
    read the stored latents as keys and as values. For more queries, the parts of keys are joined.
    """
    if q.shape[2] > 1:
        return q, [part for region in regions for part in _whole_key_regions(region)]
    p = q.shape[-1] - regions[0].values.exact.shape[-1]
    positional, latent = q[..., :p], q[..., p:]
    return latent, [
        region._replace(keys=region.values, bias=_logits(positional, region, scale))
        for region in regions
    ]


def _logits(q: Tensor, region: Region, scale: float) -> Tensor:
    """Return the logits of q [B, Hq, 1, p] and the tokens that are read, fp32 [B, Hq, M]."""
    keys, where = region.keys.tail, region.where
    if not isinstance(where, Slots):
        return _products(q, keys) * scale
    chosen = gather(keys.expand(-1, where.slots.shape[1], -1, -1), where.slots)
    parts = _products(q, chosen), _products(q, keys[:, :, where.begin :])
    return torch.cat(parts, dim=-1) * scale


def _products(q: Tensor, k: Tensor) -> Tensor:
    """Return q [B, Hq, 1, p] times k [B, H, M, p], H a divisor of Hq: fp32 [B, Hq, M]."""
    b, hq, _, p = q.shape
    rows = q.reshape(b, k.shape[1], -1, p).float()
    return (rows @ k.float().transpose(-1, -2)).reshape(b, hq, -1)


def _whole_key_regions(region: Region) -> Iterator[Region]:
    """Yield exact regions of `UNPACK_TOKENS` tokens, keys joined; the last has the step's own."""
    n = region.keys.tokens
    cuts = [0, *range(UNPACK_TOKENS, n - region.step_tokens, UNPACK_TOKENS), n]
    for lo, hi in pairwise(cuts):
        part = region.unpacked(lo, hi)
        keys = whole_keys(part.keys.exact, part.values.exact)
        yield part._replace(keys=KVView(None, keys))
