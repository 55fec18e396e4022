"""KVzip's score: the attention that a token receives while the model repeats the prompt.

Decides the score alone. `hf.repetition` runs the model, `cache.scoring` collects the scores.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from ..errors import RecipeError
from ..registry.fields import check_fields, check_whole
from .scorer import Scorer, Step


@dataclass(frozen=True)
class Reconstruction(Scorer):
    """The largest attention weight while the model repeats the prompt (KVzip, arXiv:2505.23416).

    Section 3.2: after the prompt, the model reads it again in chunks, each after the instruction.
    A repeated token attends to the sinks, to its chunk in the prompt and to the repeated tokens up
    to itself.

    Attributes:
        chunk: Tokens of a chunk.
        instruction: Token ids, separated by spaces, or "none".
    """

    chunk: int = 2048
    instruction: str = "none"
    kind: ClassVar[str] = "reconstruction"
    repeats: ClassVar[bool] = True
    of_prompt: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_whole("chunk", self.chunk, 1, " of tokens")
        check_fields(self, "instruction")
        ids = self.instruction.split()
        if self.instruction != "none" and not (ids and all(map(_is_id, ids))):
            raise RecipeError(
                f"instruction={self.instruction!r} must be token ids separated by spaces, such as "
                '"198 41736", or "none"; encode the text by the tokenizer of the model'
            )

    @property
    def instruction_ids(self) -> list[int]:
        """The token ids of the instruction."""
        return [] if self.instruction == "none" else [int(x) for x in self.instruction.split()]

    def __call__(self, step: Step) -> Tensor:
        """Return each token's largest weight in any row of queries: fp32 [B, Hk, N]."""
        return step.mass(reduce_max=True)


def _is_id(text: str) -> bool:
    return text.isascii() and text.isdigit()
