"""How much text tuning reads, and which of its tokens are compressed."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Settings:
    """What is measured.

    The distributions that are compared with those of the exact cache are of text that follows the
    prompt, and of passages that repeat the prompt from places drawn at random. Text that continues
    a prompt needs few of its facts, so evicting tokens costs almost nothing there; a passage that
    repeats the prompt needs them all.

    Attributes:
        context: Tokens of a prompt, which are compressed.
        texts: How many prompts.
        tokens: Tokens that follow the prompt in the text.
        passages: How many passages.
        passage: Tokens of each.
        window: The newest tokens of a layer that stay exact.
        seed: Draws the places.
    """

    context: int = 2048
    texts: int = 3
    tokens: int = 64
    passages: int = 2
    passage: int = 32
    window: int = 16
    seed: int = 0

    @property
    def measured(self) -> int:
        """The tokens behind a prompt."""
        return self.tokens + self.passages * self.passage
