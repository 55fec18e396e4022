"""A hash of the token ids that a cache has read, by which `PromptStore.put` checks those it gets.

It is computed on the device, without waiting for it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import compat

_FACTOR = 6364136223846793005
_PLAIN = {
    "input_ids", "attention_mask", "position_ids", "past_key_values", "cache_position",
    "logits_to_keep", "labels",
}  # fmt: skip
"""Arguments of a prompt of text; the first three decide its keys."""


class TokenHash:
    """The hash of a text of one row: (h · factor + id + 1) mod 2⁶⁴, from token to token.

    tokens: of the text. value: int64 []; None: not known, as after embeddings or several rows.
    refusal: why the same ids would give other keys; "" where they would not.
    """

    def __init__(self, tokens: int, value: Tensor | None, refusal: str = "") -> None:
        self.tokens, self.value, self.refusal = tokens, value, refusal

    @classmethod
    def empty(cls) -> TokenHash:
        """Return the hash of no tokens."""
        return cls(0, torch.zeros((), dtype=torch.int64))

    @classmethod
    def of(cls, ids: Tensor) -> TokenHash:
        """Return the hash of ids int64 [1, T]."""
        return cls.empty().then(ids)

    def then(self, ids: Tensor) -> TokenHash:
        """Return the hash with ids int64 [1, T] after the text."""
        assert self.value is not None
        if ids.shape[1] == 1:
            return TokenHash(self.tokens + 1, self.value * _FACTOR + ids[0, 0] + 1)
        powers = torch.full_like(ids[0], _FACTOR).cumprod(dim=0)
        value = self.value * powers[-1]
        powers = torch.cat([powers.new_ones(1), powers[:-1]]).flip(0)
        return TokenHash(self.tokens + ids.shape[1], value + ((ids[0] + 1) * powers).sum())

    def after(
        self, kwargs: dict[str, Any], positions: Tensor | None, seen: int, tokens: int
    ) -> TokenHash:
        """Return the hash after a call with `tokens` new tokens in a cache that had seen `seen`.

        positions: the caller's `position_ids` [..., tokens or more]; the last ones count.
        """
        ids, total = kwargs.get("input_ids"), seen + tokens
        positions = None if positions is None else positions[..., -tokens:]
        refusal = self.refusal or (_refusal(kwargs, positions, seen, tokens) if tokens > 1 else "")
        known = self.value is not None and self.tokens == seen
        if refusal or not known or ids is None or ids.shape != (1, tokens):
            return TokenHash(total, None, refusal)
        new = self.then(ids)
        if tokens == 1 and positions is not None:  # another position gives another hash
            assert new.value is not None
            new.value += (positions.reshape(-1)[-1] - seen).to(new.value.device)
        return new

    def problem(self, ids: Tensor) -> str:
        """Return why a cache that has read this text does not hold ids [1, n]; "": it may."""
        if self.refusal or self.tokens != ids.shape[1] or self.value is None:
            return self.refusal
        value = TokenHash.of(ids.cpu()).value
        same = value is not None and int(self.value) == int(value)
        return "" if same else "the cache has read other token ids, or at other positions"


def _refusal(kwargs: dict[str, Any], positions: Tensor | None, seen: int, tokens: int) -> str:
    """Return why keys of a call are not those of a plain prompt with the same ids."""
    mask = kwargs.get("attention_mask")
    if mask is not None and mask.dim() == 2 and not bool(mask.all()):
        return "its prompt had padding"
    plain = torch.arange(seen, seen + tokens)
    if positions is not None and not bool((positions.cpu() == plain).all()):
        return "its prompt had positions of its own"
    others = sorted(x for x in kwargs.keys() - _PLAIN if compat.has_tensors(kwargs[x]))
    if others:
        return f"its prompt had other inputs ({', '.join(others)})"
    return ""
