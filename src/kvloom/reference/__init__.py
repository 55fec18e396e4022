"""The small trained model that ships with kvloom: every quality figure rests on it.

A Llama of 4.6 million parameters with 4 query and 2 key-value heads of 64 channels, trained to
find what was said up to 4096 tokens ago. `weights/README.md` is its card. Importing this
package imports neither torch nor transformers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

WEIGHTS = Path(__file__).parent / "weights"

__all__ = ["WEIGHTS", "reference_model", "reference_tokenizer"]


def reference_model(dtype: Any = None) -> Any:
    """Return the reference model, a `LlamaForCausalLM` in evaluation mode.

    `dtype` is a torch dtype; None keeps bfloat16, as stored.
    """
    from transformers import LlamaForCausalLM

    return LlamaForCausalLM.from_pretrained(WEIGHTS, dtype=dtype or "auto").eval()


def reference_tokenizer() -> Any:
    """Return its tokenizer: `<s>` in front by default, a token for every digit, pads left."""
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(WEIGHTS)
