"""Where a tuned recipe comes from: the model and text it was tuned on, and its figures there."""

from __future__ import annotations

from dataclasses import dataclass, fields

from ..registry.fields import check_fields


@dataclass(frozen=True)
class Tuned:
    """What `kvloom tune` writes into a recipe. Another model refuses the recipe.

    model: the fingerprint of the model's weights. text: SHA-256 of the text's token ids. bound:
    what the recipe was tuned for: "bytes=0.2" or "kl=0.01". texts: the number of prompts of
    `context` tokens. tokens: those that follow each prompt. kl, kl_p99: mean and 99th percentile of
    the divergence from the exact cache on these tokens, in nats; predicted_kl: the sum of the
    layers' scores. nbytes: bytes of the cache after one prompt; predicted_nbytes: by
    `Recipe.nbytes`; share: of the bytes of the exact cache.
    """

    model: str
    text: str
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
        check_fields(self, *(one.name for one in fields(self)))
