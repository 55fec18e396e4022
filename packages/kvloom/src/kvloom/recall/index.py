"""Recall: the whole cache stays, and a step reads the tokens an index finds for its queries.

Decides how many tokens are read and how the query heads of a group choose together. `clusters`,
`pages` and `partial_keys` find tokens; `cache.retriever` reads them. A new index is an `Index` (its
options) and a `Finder` (its state), which may grow on a `SideStream`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..errors import RecipeError
from ..registry.fields import check_choice, check_fields, check_whole
from ..state import Stateful
from .tiers import Tier

HEAD_CHOICES = ("mean", "max", "turns", "each")


@dataclass(frozen=True)
class Index:
    """Options of an index, from which each layer makes its `Finder`."""

    kind: ClassVar[str] = ""
    reads_keys: ClassVar[bool] = False  # whether it reads every key to find some
    reads_queries: ClassVar[bool] = False  # whether its finders learn from the prompt's queries

    def finder(self) -> Finder:
        """Return an empty index."""
        raise NotImplementedError

    def due(self, indexed: int, waiting: int) -> int:
        """Return how many of `waiting` tokens to index now.

        `indexed` tokens are indexed already. The default: all whole units.
        """
        return waiting // self.unit * self.unit

    @property
    def unit(self) -> int:
        """The index finds tokens in multiples of this number."""
        return 1

    @property
    def block_tokens(self) -> int:
        """After the prompt, tokens are indexed in multiples of this number."""
        return self.unit

    def nbytes(self, tokens: int, head_dim: int, itemsize: int) -> int:
        """Return the bytes of one head's index of a prompt, for keys of itemsize bytes."""
        raise NotImplementedError


class Finder(Stateful):
    """The index of one layer's keys, for each key/value head.

    Attributes:
        tokens: The number of indexed keys. A key's slot is its number among them, oldest first.
        tensors: Names of the attributes that are tensors, batch first; one may be None or missing.
    """

    def __init__(self) -> None:
        self.tokens = 0

    @property
    def learned(self) -> bool:
        """Whether `learn` was called, where the index reads queries."""
        return True

    def learn(
        self, q: Tensor, keys: Tensor, nonpadding: Tensor, nonpadding_queries: Tensor
    ) -> None:
        """Learn from the queries of the first prompt, before the first key is indexed.

        Args:
            q: [B, Hq, T, D], the last T.
            keys: [B, Hk, N, D], exact.
            nonpadding: bool [B, 1, N], False for padding.
            nonpadding_queries: bool [B, 1, T], False for padding.
        """

    def inherit(self, old: Finder) -> None:
        """Take over what `old` has learned; index nothing."""

    def extend(self, keys: Tensor, nonpadding: Tensor) -> None:
        """Index the next keys by age, and add their number to `tokens`.

        Args:
            keys: [B, Hk, T, D], exact.
            nonpadding: bool [B, 1, T], False for padding.
        """
        raise NotImplementedError

    def find(self, q: Tensor, tokens: int, query_heads: str, keys: Callable[[], Tensor]) -> Tensor:
        """Return the slots to read.

        Args:
            q: [B, Hq, D].
            tokens: How many; at most the number of indexed keys.
            query_heads: One of `HEAD_CHOICES`.
            keys: Returns the keys [B, Hk, N, D], for an index that stores none.

        Returns:
            int64 [B, Hk, tokens], distinct, padding last; [B, Hq, tokens] for query_heads="each".
        """
        raise NotImplementedError

    def parts(self) -> Tensor | None:
        """Return the cluster or page of each slot, int64 [B, Hk, N]; None if the index has none."""
        return None

    def state(self) -> dict[str, Any]:
        """Return the number of tokens, and what the class names."""
        return {**super().state(), "tokens": self.tokens}

    def load_state(self, state: dict[str, Any], like: Tensor | None) -> None:
        """Load a state that `state` returned."""
        super().load_state(state, like)
        self.tokens = state["tokens"]


@dataclass(frozen=True)
class Recall:
    """The index that finds tokens, and how many a step reads.

    Steps of several tokens (a prompt, a turn, a draft) read everything.

    Attributes:
        index: `Clusters`, `Pages`, `PartialKeys`, `TopK` or a registered one.
        tokens: Read by a step, protected ones included; generated tokens that are not in the index
            yet are read in addition.
        query_heads: How those of a key/value head choose: by the "mean" or "max" of their scores;
            in "turns", so that each takes the best of its own scores; or "each" alone, as the
            papers' code does.
        full_layers: How many first layers read everything.
        tier: Where the indexed tokens are stored; None: on the device.

    Raises:
        RecipeError: A value is out of range, or the index and the tier do not combine.
    """

    index: Index
    tokens: int = 1024
    query_heads: str = "mean"
    full_layers: int = 2
    tier: Tier | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.index, Index):
            raise RecipeError(
                f"index={self.index!r} is not an index; use Clusters, Pages, PartialKeys or TopK"
            )
        check_fields(self, "tier")
        check_whole("budget tokens", self.tokens, 1)
        check_whole("full_layers", self.full_layers, 0)
        check_choice("query_heads", self.query_heads, HEAD_CHOICES)
        if self.tier is not None and self.index.reads_keys:
            raise RecipeError(
                f"index={self.index.kind!r} reads every key to find some, and would copy them all "
                "from the tier at every step; use clusters or pages"
            )

    def share_read(self, tokens: float, stored: float, latent: bool) -> float:
        """Return the share of the bytes of stored tokens that a step reads, beside the index.

        Args:
            tokens: That the step attends to.
            stored: All tokens.
            latent: Whether what is stored of a token is both key and value.
        """
        share = tokens / stored
        if not self.index.reads_keys:
            return share
        return 1.0 if latent else (1 + share) / 2


def grown(old: Tensor | None, new: Tensor) -> Tensor:
    """Return old and new concatenated along dimension 2."""
    return new if old is None else torch.cat([old, new], dim=2)


class SideStream:
    """Runs work beside the device's other work, on a CUDA stream; on a CPU, at once.

    Call `wait` before you use its results or change the tensors that it reads.
    """

    def __init__(self) -> None:
        self.stream: Any = None
        self.done: Any = None

    def __deepcopy__(self, memo: dict) -> SideStream:
        """Return a new stream, once the work is done."""
        self.wait()
        return SideStream()

    def run(self, work: Callable[[], None], *reads: Tensor) -> None:
        """Run the function `work`, which reads the tensors `reads`, all on one device."""
        if not reads[0].is_cuda:
            work()
            return
        device = reads[0].device
        if self.stream is None:
            self.stream = torch.cuda.Stream(device)
        self.stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(self.stream):
            work()
        for x in reads:  # the allocator must not reuse their memory while this stream reads
            x.record_stream(self.stream)
        self.done = self.stream.record_event()

    def wait(self) -> None:
        """Make the device's current stream wait for the work; the host does not wait."""
        if self.done is not None:
            torch.cuda.current_stream(self.stream.device).wait_event(self.done)
            self.done = None
