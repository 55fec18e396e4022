"""Free-running generation: errors accumulate, because each token depends on those before it.

Divergence is measured along the recipe's own text: the exact cache reads what the recipe wrote, and
the two distributions of each next token are compared.
"""

from __future__ import annotations

import copy
from typing import NamedTuple

import torch
from torch import Tensor

from kvloom import Cache

from ...workload.crew import Work
from ..decoding import decode, divergence, exact_logp
from ..sample import Batch, Outcome, Run, Source
from .perplexity import text_batches

CHUNK = 64  # tokens between two readings by the exact cache
GRAM = 4


class Exact(NamedTuple):
    """The exact cache after the context, and what it generated [B, N]."""

    cache: Cache
    tokens: Tensor


class Free:
    """Tokens until the first difference from `full`, divergence by position, and repetition."""

    name, data = "free", ""

    def batches(self, source: Source) -> list[Batch]:
        """Return rows of text; only the first token after the context is given."""
        return text_batches(source)

    def measure(self, run: Run[Exact]) -> Work[tuple[list[Outcome], Exact]]:
        """Generate greedily, and compare with the exact cache."""
        model, n = run.model, run.source.new_tokens
        before = copy.deepcopy(run.cache) if run.exact is None else run.exact.cache
        own = None if run.exact is None else copy.deepcopy(before)
        new = torch.stack([sample.data[0] for sample in run.batch.samples]).to(model.device)
        tokens, kl = [], []
        for at in range(0, n, CHUNK):
            decoded = yield from decode(run.cache, new, min(CHUNK, n - at))
            if own is not None:
                fed = torch.cat([new.cpu()[:, None], decoded.greedy[:, :-1]], dim=1)
                exact_log_probs = yield from exact_logp(own, fed.to(model.device))
                kl.append(divergence(exact_log_probs, decoded.logp))
            tokens.append(decoded.greedy)
            new = decoded.greedy[:, -1].to(model.device)
        written = torch.cat(tokens, dim=1)
        exact = Exact(before, written) if run.exact is None else run.exact
        curve = torch.cat(kl, dim=1) if kl else torch.zeros(written.shape)
        outcomes = []
        for i, row in enumerate(written):
            different = (row != exact.tokens[i]).nonzero()
            outcomes.append(
                Outcome(
                    scores={
                        "diverged_at": float(different[0]) if len(different) else float(n),
                        "kl_mean": curve[i].mean().item(),
                        "repetition": repetition(row.tolist()),
                    },
                    answer=run.source.decode(row),
                    tokens=run.source.pieces(row),
                    curves={"kl": curve[i].tolist()},
                )
            )
        return outcomes, exact

    def positions(self, batch: Batch) -> int:
        """Return the positions of the generated text; its last token takes none."""
        return len(batch.samples[0].data) - 1


def repetition(tokens: list[int]) -> float:
    """Return the share of n-grams of `GRAM` tokens that occurred before."""
    grams = [tuple(tokens[i : i + GRAM]) for i in range(len(tokens) - GRAM + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0
