"""The exact top k, by all channels of every key or by a few after a rotation (InfiniGen).

InfiniGen (arXiv:2406.19707, section 4.2): the prompt's queries give a rotation of each key/value
head, the right singular vectors of their matrix. Rotated queries and keys have the same inner
products, but a few channels make up most of them. The index stores these channels of every key, and
a query reads the tokens with the largest inner product in them.

Departures: the rotation comes from the prompt itself, so no weight changes and nothing is
calibrated (the paper: from a sample, offline, folded into the weights); the query is the layer's
own (the paper: an estimate from the layer before, to copy tokens in advance); a step reads a fixed
number of tokens (the paper: those within a threshold of the largest score).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..errors import RecipeError
from ..kernels.select import reference as ref
from ..registry.fields import check_fields, check_whole
from .index import Finder, Index, grown

# The number of queries and keys that are read in float64 at once.
_CHUNK = 1024


@dataclass(frozen=True)
class TopK(Index):
    """No index: a step reads every key to find those with the largest q . k. An oracle.

    Scores leave out ALiBi's bias.
    """

    kind: ClassVar[str] = "topk"
    reads_keys: ClassVar[bool] = True

    def finder(self) -> TopKFinder:
        """Return an empty index."""
        return TopKFinder()

    def nbytes(self, tokens: int, head_dim: int, itemsize: int) -> int:
        """Return 0: only padding is stored."""
        return 0


class TopKFinder(Finder):
    """A mask bool [B, 1, N], False for padding; None where there is no padding."""

    tensors: ClassVar[tuple[str, ...]] = ("real",)

    def __init__(self) -> None:
        super().__init__()
        self.real: Tensor | None = None

    def extend(self, keys: Tensor, nonpadding: Tensor) -> None:
        """Count keys [B, Hk, T, D], and note padding."""
        if self.real is None and not bool(nonpadding.all()):
            self.real = nonpadding.new_ones(nonpadding.shape[0], 1, self.tokens)
        if self.real is not None:
            self.real = torch.cat([self.real, nonpadding], dim=2)
        self.tokens += keys.shape[2]

    def find(self, q: Tensor, tokens: int, query_heads: str, keys: Callable[[], Tensor]) -> Tensor:
        """Return the tokens with the largest q . k."""
        k = keys()
        scores = ref.reduce_query_heads(ref.dots(q, k), k.shape[1], query_heads)
        if self.real is not None:
            scores = scores.masked_fill(~self.real, -torch.inf)
        return scores.topk(tokens, dim=-1).indices


@dataclass(frozen=True)
class PartialKeys(Index):
    """Some rotated channels of every key (InfiniGen, arXiv:2406.19707, section 4.2).

    Scores leave out ALiBi's bias.

    Attributes:
        share: Of the channels, in (0, 1].
        block: Generated tokens that are indexed together.
    """

    share: float = 0.3
    block: int = 64
    kind: ClassVar[str] = "partial-keys"
    reads_queries: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_fields(self, "share")
        if not 0 < self.share <= 1:
            raise RecipeError(f"share={self.share!r} of the channels must lie in (0, 1]")
        check_whole("block", self.block, 1)

    def finder(self) -> PartialKeyFinder:
        """Return an empty index."""
        return PartialKeyFinder(self)

    def due(self, indexed: int, waiting: int) -> int:
        """Return all tokens of a prompt, later whole blocks."""
        return waiting if indexed == 0 else waiting // self.block * self.block

    @property
    def block_tokens(self) -> int:
        """A block."""
        return self.block

    def channels(self, head_dim: int) -> int:
        """Return how many channels are stored."""
        return max(1, round(self.share * head_dim))

    def nbytes(self, tokens: int, head_dim: int, itemsize: int) -> int:
        """Return the bytes of the rotation to the stored channels, and of the partial keys."""
        return self.channels(head_dim) * (4 * head_dim + tokens * itemsize)


class PartialKeyFinder(TopKFinder):
    """Partial keys of one layer.

    rotation: fp32 [B, Hk, D, P], to the P channels that are stored; None before the first prompt.
    partial: [B, Hk, N, P] in the keys' dtype.
    """

    tensors = ("rotation", "partial", "real")

    def __init__(self, options: PartialKeys) -> None:
        super().__init__()
        self.options = options
        self.rotation: Tensor | None = None
        self.partial: Tensor | None = None

    @property
    def learned(self) -> bool:
        """Whether the rotation is known."""
        return self.rotation is not None

    def learn(
        self, q: Tensor, keys: Tensor, nonpadding: Tensor, nonpadding_queries: Tensor
    ) -> None:
        """Find the rotation, and the channels with the largest |q| + |k|, summed over a prompt.

        A head with fewer queries than channels is not rotated.
        """
        b, hk, _, d = keys.shape
        queries = q.reshape(b, hk, q.shape[1] // hk, q.shape[2], d)
        queries = queries.masked_fill(~nonpadding_queries[:, :, None, :, None], 0.0).flatten(2, 3)
        keys = keys.masked_fill(~nonpadding[..., None], 0.0)
        gram = sum(x.mT @ x for x in _doubles(queries))
        assert isinstance(gram, Tensor)
        rotation = torch.linalg.eigh(gram).eigenvectors.flip(-1)
        identity = torch.eye(d, dtype=rotation.dtype, device=rotation.device)
        rows = nonpadding_queries.sum(dim=-1) * (q.shape[1] // hk)  # [B, 1]
        rotation = torch.where((rows < d)[..., None, None], identity, rotation)
        mass = sum(
            (x @ rotation).abs().sum(dim=2) for part in (queries, keys) for x in _doubles(part)
        )
        assert isinstance(mass, Tensor)
        best = mass.topk(self.options.channels(d), dim=-1).indices.sort(dim=-1).values
        self.rotation = rotation.gather(3, best[:, :, None].expand(-1, -1, d, -1)).float()

    def inherit(self, old: Finder) -> None:
        """Take the rotation of an emptied index."""
        assert isinstance(old, PartialKeyFinder)
        self.rotation = old.rotation

    def extend(self, keys: Tensor, nonpadding: Tensor) -> None:
        """Add the partial keys of keys [B, Hk, T, D], and note padding."""
        if self.rotation is None:
            self.learn(keys[:, :, :0], keys, nonpadding, nonpadding[..., :0])
        assert self.rotation is not None
        self.partial = grown(self.partial, (keys.float() @ self.rotation).to(keys.dtype))
        super().extend(keys, nonpadding)

    def find(self, q: Tensor, tokens: int, query_heads: str, keys: Callable[[], Tensor]) -> Tensor:
        """Return the tokens with the largest inner product in the stored channels."""
        assert self.rotation is not None
        partial = self.partial
        assert partial is not None
        b, hk, d, p = self.rotation.shape
        rows = (q.float().view(b, hk, -1, d) @ self.rotation).view(b, -1, p)
        return super().find(rows, tokens, query_heads, lambda: partial)


def _doubles(x: Tensor) -> Iterator[Tensor]:
    """Yield x [B, Hk, N, D] in float64, a chunk of its tokens at a time; one chunk at least."""
    for lo in range(0, max(1, x.shape[2]), _CHUNK):
        yield x[:, :, lo : lo + _CHUNK].double()
