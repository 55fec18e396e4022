"""How much text a calibration reads, and how the text is cut into contexts."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..errors import CalibrationError

MIN_CONTEXTS = 4


@dataclass(frozen=True)
class Settings:
    """How much text to read.

    Attributes:
        contexts: The most contexts that are read for the ranges of channels.
        context: Tokens of a context.
        settled: Every 8 contexts, the share of each range that these 8 added is computed. Reading
            stops when its mean over all channels, layers, keys and values is below `settled`.
        sample_contexts: The number of first contexts on which clip factors are searched.
        sample_tokens: Tokens of each of these contexts.
        queries: Sampled queries.
        sinks: First tokens that these attend to unquantized.
        recent: Newest tokens that these attend to unquantized.
    """

    contexts: int = 64
    context: int = 1024
    settled: float = 0.02
    sample_contexts: int = 4
    sample_tokens: int = 1024
    queries: int = 64
    sinks: int = 5
    recent: int = 128


def cut_contexts(ids: np.ndarray, first: list[int], settings: Settings) -> Tensor:
    """Cut contexts from a text's ids [N]; each starts with the ids `first`.

    Returns int64 [contexts, context]. Contexts are spread over the whole text and never overlap;
    there are fewer if the text is short. Raises `CalibrationError` for fewer than `MIN_CONTEXTS`.
    """
    body = settings.context - len(first)
    count = min(settings.contexts, len(ids) // body) if body > 0 else 0
    if count < MIN_CONTEXTS:
        raise CalibrationError(
            f"the text has {len(ids)} tokens, and calibration needs {MIN_CONTEXTS} contexts of "
            f"{settings.context}; give more text or a smaller context"
        )
    starts = np.linspace(0, len(ids) - body, count).astype(int)
    return torch.from_numpy(np.stack([[*first, *ids[s : s + body]] for s in starts]))
