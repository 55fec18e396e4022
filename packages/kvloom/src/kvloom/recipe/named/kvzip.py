"""KVzip (arXiv:2505.23416): evict once after the prompt, by what repeating the prompt needs.

After the prompt, the model reads it again in chunks of `chunk` tokens. A token's score is the
largest attention weight that it receives while its chunk is repeated, over all query heads of its
key/value head. The best tokens stay. Nothing in the score depends on a question, so one cache
serves many. The extra pass costs more than the prompt itself.

Departures: every layer and head keeps equally many tokens by default (the official code divides one
budget over all of them, as heads=0,layers=joint does); the instruction is given as token ids, as a
model has no tokenizer; the default has no instruction; later chunks have the same instruction as
the first one.

Options:

tokens, fraction: the budget, in tokens or as a fraction of the prompt where it is given.
sinks, recent: the first and the newest tokens that stay, within the budget.
chunk: tokens that are repeated at a time. instruction: token ids before each chunk, separated by
spaces, or none. layers, positions, heads: as in snapkv. store: the recipe whose format the tokens
have ("kivi-4").
"""

from __future__ import annotations

from ...keep import Budget, Keep, Reconstruction
from ..spec import Protect, Recipe
from .stored import share, stored_as


def kvzip(
    tokens: int = 1024,
    fraction: float = 0.0,
    sinks: int = 4,
    recent: int = 32,
    chunk: int = 2048,
    instruction: str = "none",
    layers: str = "uniform",
    positions: str = "original",
    store: str = "full",
    heads: float = 1.0,
) -> Recipe:
    """KVzip (arXiv:2505.23416): once after the prompt, by attention while the model repeats it."""
    budget = Budget(
        None if fraction else tokens, fraction or None, recent, layers, heads=share(heads)
    )
    scorer = Reconstruction(chunk, instruction)
    keep = Keep(budget, scorer, when="prompt", group="max", positions=positions)
    return stored_as(store, Recipe(keep=keep, protect=Protect(sinks)))
