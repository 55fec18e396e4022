"""How much text tuning reads, and which of its tokens are compressed."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Settings:
    """What is measured.

    context: tokens of a prompt, which are compressed. texts: how many prompts. tokens: the tokens
    after each prompt whose distributions are compared with those of the exact cache. window: the
    newest tokens of a layer that stay exact. seed: draws the places of the prompts in the text.
    """

    context: int = 2048
    texts: int = 3
    tokens: int = 64
    window: int = 16
    seed: int = 0
