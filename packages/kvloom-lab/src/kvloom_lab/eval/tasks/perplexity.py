"""How well the text after a context is predicted, and how far that is from the exact cache.

The continuation is decoded token by token, so that every prediction reads the compressed cache.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...workload.crew import Work
from ...workload.text import cut_rows
from ..decoding import decode, divergence
from ..sample import Batch, Outcome, Run, Sample, Source


class Perplexity:
    """Perplexity, KL divergence and agreement on a continuation of `new_tokens` tokens."""

    name, data = "perplexity", ""

    def batches(self, source: Source) -> list[Batch]:
        """Return rows of text; the part behind the context is the continuation."""
        return text_batches(source)

    def measure(self, run: Run[Tensor]) -> Work[tuple[list[Outcome], Tensor]]:
        """Score each continuation; returns the log-probabilities for the others."""
        rows = torch.stack([sample.data for sample in run.batch.samples]).to(run.model.device)
        count = rows.shape[1] - 1
        decoded = yield from decode(run.cache, rows[:, 0], count, given=rows[:, 1:])
        exact = decoded.logp if run.exact is None else run.exact
        nll = -decoded.logp.gather(2, rows[:, 1:, None].cpu())[..., 0]  # [B, N]
        kl = divergence(exact, decoded.logp)
        same = decoded.greedy == exact.argmax(-1)
        outcomes = [
            Outcome(
                scores={
                    "nll": nll[i].mean().item(),
                    "kl_mean": kl[i].mean().item(),
                    "kl_median": kl[i].median().item(),
                    "kl_p999": kl[i].quantile(0.999).item(),
                    "agreement": same[i].float().mean().item(),
                },
                tokens=run.source.pieces(decoded.greedy[i]),
                curves={"kl": kl[i].tolist(), "nll": nll[i].tolist()},
            )
            for i in range(len(rows))
        ]
        return outcomes, exact

    def positions(self, batch: Batch) -> int:
        """Return the positions of the continuation; its last token takes none."""
        return len(batch.samples[0].data) - 1


def text_batches(source: Source) -> list[Batch]:
    """Return rows of text of each length, in batches; a sample's data are its ids after that."""
    batches = []
    for length in source.lengths:
        tokens = length + source.new_tokens + 1
        rows = cut_rows(source.text_ids, source.first, source.samples, tokens, source.seed)
        for at in range(0, len(rows), source.batch):
            part = rows[at : at + source.batch]
            samples = [
                Sample(
                    f"{length}/{at + i}",
                    source.decode(row[:length]),
                    reference=source.decode(row[length + 1 :]),
                    fields={"length": length},
                    data=row[length:],
                )
                for i, row in enumerate(part)
            ]
            batches.append(Batch(part[:, :length], samples))
    return batches
