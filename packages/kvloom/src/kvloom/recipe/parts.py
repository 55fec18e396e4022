"""Parts of a recipe: protected tokens, overrides of layers, and where a tuned recipe comes from."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import RecipeError
from ..keep import Keep, Outliers
from ..recall import Recall
from ..registry.fields import check_fields, check_whole
from ..store import Store
from .layers import UNCHANGED, Unchanged, format_where
from .role import Role

AnyRecipe = Any
"""A `Recipe`, in the files that `spec` imports: it defines the class."""


@dataclass(frozen=True)
class Protect:
    """Tokens that are exempt from eviction, from packing, or from both.

    Every step of a recall reads the sinks and the exact recent tokens.

    Attributes:
        sinks: How many first tokens. They are never evicted. They are not packed either, unless a
            score evicts from the prompt (when="prompt").
        exact_recent: How many newest tokens are not packed; or (keys, values) where the two differ,
            as in KIVI. Eviction by age does not evict them; eviction by score may, as
            `Budget.recent` allows.
        outliers: A rule for more tokens of the prompt that are not packed.
        ids: Token ids. Such tokens of the first prompt are not evicted, as far as the budget
            allows.
        ids_except: Token ids. Tokens of the first prompt with any other id are not evicted,
            likewise.
        spans: Ranges of tokens of the first prompt that are not evicted, likewise: (first, end)
            each, end excluded. Padding does not count. As in a slice, a negative number counts from
            the prompt's end, and what is outside of the prompt is left out.
        role: The role of messages in the first prompt that are not evicted, likewise:
            `Role.system(tokenizer)`.
    """

    sinks: int = 0
    exact_recent: int | tuple[int, int] = 0
    outliers: Outliers | None = None
    ids: tuple[int, ...] | None = None
    ids_except: tuple[int, ...] | None = None
    spans: tuple[tuple[int, ...], ...] | None = None
    role: Role | None = None

    def __post_init__(self) -> None:
        check_fields(self, "outliers", "ids", "ids_except", "spans", "role")
        for span in self.spans or ():
            if len(span) != 2:
                raise RecipeError(f"a span {span!r} must be (first, end), two numbers of tokens")
            first, end = span
            if end == 0 or ((first < 0) == (end < 0) and first >= end):
                raise RecipeError(
                    f"a span {span!r} has no tokens; give an end after the first (a large one for "
                    "all tokens to the prompt's end)"
                )
        if self.ids is not None and self.ids_except is not None:
            raise RecipeError("ids and ids_except are two rules for one choice; give one of them")
        recent = self.exact_recent
        if isinstance(recent, tuple) and len(recent) != 2:
            raise RecipeError(f"exact_recent={recent!r} must be one number, or (keys, values)")
        check_whole("sinks", self.sinks, 0, " of tokens")
        for tokens in self.exact_recents:
            check_whole("exact_recent", tokens, 0, " of tokens")

    @property
    def exact_recents(self) -> tuple[int, int]:
        """The number of exact newest tokens of keys and of values."""
        recent = self.exact_recent
        return recent if isinstance(recent, tuple) else (recent, recent)

    @property
    def reads_ids(self) -> bool:
        """Whether tokens stay by their ids."""
        return any(x is not None for x in (self.ids, self.ids_except, self.role))

    @property
    def marks(self) -> bool:
        """Whether tokens of the first prompt stay whatever their score: see `mark`."""
        return self.reads_ids or self.spans is not None

    def mark(self, place: Tensor, tokens: Tensor, ids: Tensor | None) -> Tensor:
        """Return which tokens of a first prompt are not evicted, bool [B, N].

        place: int64 [B or 1, N], each token's place without padding. tokens: int64 [B or 1, 1], the
        tokens of a row without padding. ids: int64 [B, N], where `reads_ids`.
        """
        marked = torch.zeros_like(place, dtype=torch.bool)
        for span in self.spans or ():
            first, end = (x if x >= 0 else tokens + x for x in span)
            marked = marked | ((place >= first) & (place < end))
        if ids is None:
            return marked
        if self.ids is not None:
            marked = marked | torch.isin(ids, ids.new_tensor(self.ids))
        if self.ids_except is not None:
            marked = marked | ~torch.isin(ids, ids.new_tensor(self.ids_except))
        return marked if self.role is None else marked | self.role.mask(ids)

    @property
    def tokens(self) -> int:
        """The number of sinks and of exact recent tokens."""
        return self.sinks + max(self.exact_recents)


class BudgetGroup(NamedTuple):
    """The place of a layer among the `size` layers that share its budget or its score."""

    place: int
    size: int


@dataclass(frozen=True)
class LayerOverride:
    """Whole parts of a recipe that are different in some layers; the parts not given stay.

    Of several overrides of one layer, the last one counts.

    Attributes:
        where: A layer's index (3 or "3"), a range ("0-3", both ends included), "first 2" or "last
            2". Indices are the model's; "first" and "last" count the layers that kvloom caches.
        keep: None removes the part.
        store: Another store.
        recall: None removes the part.
        protect: Other protected tokens.

    Raises:
        RecipeError: There is no such `where`, or no part.
    """

    where: str
    keep: Keep | Unchanged | None = UNCHANGED
    store: Store | Unchanged = UNCHANGED
    recall: Recall | Unchanged | None = UNCHANGED
    protect: Protect | Unchanged = UNCHANGED

    def __post_init__(self) -> None:
        object.__setattr__(self, "where", format_where(self.where))
        check_fields(self, "keep", "store", "recall", "protect")
        if not self.parts:
            raise RecipeError(
                f"layers {self.where!r}: give a part to override: keep, store, recall or protect"
            )

    @property
    def parts(self) -> dict[str, Any]:
        """The parts that it replaces, by name."""
        named = {name: getattr(self, name) for name in ("keep", "store", "recall", "protect")}
        return {name: part for name, part in named.items() if part is not UNCHANGED}


@dataclass(frozen=True)
class Tuned:
    """Where a tuned recipe comes from: `kvloom tune` writes it. Another model refuses the recipe.

    Attributes:
        model: The fingerprint of the model's weights.
        text_sha256: The SHA-256 of the token ids of the text.
        bound: What the recipe was tuned for: "share=0.2" or "kl=0.01".
        context: Tokens of a prompt.
        texts: The number of prompts.
        tokens: Tokens that follow each prompt.
        seed: The seed of the choice of prompts.
        predicted_kl: The sum of the layers' scores.
        kl: The mean divergence from the exact cache on the tokens that follow, in nats.
        kl_p99: The 99th percentile of the same.
        predicted_nbytes: The bytes that `Recipe.nbytes` predicts.
        nbytes: Bytes of the cache after one prompt.
        share: `nbytes` as a share of the bytes of the exact cache.
    """

    model: str
    text_sha256: str
    bound: str
    context: int
    texts: int
    tokens: int
    seed: int
    predicted_kl: float
    kl: float
    kl_p99: float
    predicted_nbytes: int
    nbytes: int
    share: float

    def __post_init__(self) -> None:
        check_fields(self, *(field.name for field in fields(self)))
