"""The small trained model that ships with kvloom, on which quality figures are measured.

A Llama with 4.6 million parameters, 4 query heads and 2 key/value heads of 64 channels. It was
trained to retrieve facts from up to 4096 tokens before. `weights/README.md` is its model card.
Importing this package imports neither torch nor transformers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

WEIGHTS = Path(__file__).parent / "weights"

__all__ = ["WEIGHTS", "reference_model", "reference_tokenizer"]


def reference_model(dtype: Any = None) -> Any:
    """Return the reference model, a `LlamaForCausalLM` in evaluation mode.

    Args:
        dtype: A torch dtype; None: bfloat16, the dtype of the stored weights.
    """
    from transformers import LlamaForCausalLM

    return LlamaForCausalLM.from_pretrained(WEIGHTS, dtype=dtype or "auto").eval()


def reference_tokenizer() -> Any:
    """Return its tokenizer: it adds `<s>` by default, has one token a digit, and pads left."""
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(WEIGHTS)
