"""A long text that the exact model wrote, read by every recipe: does the error grow with position?

`trace` has the exact cache continue a context greedily. Every recipe then reads this text token by
token after the same context, so that all are scored on the same tokens. Scores are over all
positions, and over `BLOCKS` equal parts of them. `repetition` is the share of the text that
repeats earlier parts of it; any cache predicts these well. The task holds the log-probabilities of
the exact cache: 4 bytes per token and entry of the vocabulary, for every context of a batch.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from ...workload.passes import Measurement
from ..decoding import Decoded, decode, divergence
from ..sample import Outcome, Run
from .text import CHUNK, ContinuationTask, repetition

BLOCKS = 8


class TraceTask(ContinuationTask[list[Decoded]]):
    """KL divergence, agreement and bytes while the exact model's text of `new_tokens` is read."""

    name = "trace"
    about = (
        "Every cache reads the long text that the model wrote with the exact cache. Does "
        "its error grow with the position?"
    )
    main_score = "kl_mean"
    lower_is_better = ("kl_mean", "kl_p999", "kl_slope", "repetition")

    def measure(self, run: Run[list[Decoded]]) -> Measurement[tuple[list[Outcome], list[Decoded]]]:
        """Write the text with the exact cache, or read what that wrote, in pieces."""
        source, rows = run.source, len(run.batch.samples)
        edges = block_edges(source.new_tokens)
        ends = sorted({*range(0, source.new_tokens, CHUNK), *edges})
        new = torch.stack([s.payload[0] for s in run.batch.samples]).to(run.model.device)
        written: list[Decoded] = []
        greedy, kl, same, mib = [], [], [], []
        for i, (begin, end) in enumerate(pairwise(ends)):
            fed = None if run.baseline is None else run.baseline[i].greedy.to(new.device)
            decoded = yield from decode(run.cache, new, end - begin, fed)
            baseline = decoded if run.baseline is None else run.baseline[i]
            if run.baseline is None:
                written.append(decoded)
            greedy.append(decoded.greedy)
            kl.append(divergence(baseline.logp, decoded.logp))
            same.append((decoded.greedy == baseline.greedy).float())
            new = baseline.greedy[:, -1].to(new.device)
            if end in edges:
                mib.append(run.cache.nbytes / rows / 2**20)
        text = torch.cat([piece.greedy for piece in run.baseline or written], dim=1)
        columns = (torch.cat(pieces, dim=1) for pieces in (greedy, kl, same))
        outcomes = [
            Outcome(
                {**scores(row_kl, row_same), "repetition": repetition(text[i].tolist())},
                answer=source.decode(row) if run.baseline is None else "",
                tokens=source.pieces(row),
                curves={"kl": row_kl.tolist(), **by_block(row_kl, row_same), "kv_mib": mib},
            )
            for i, (row, row_kl, row_same) in enumerate(zip(*columns, strict=True))
        ]
        return outcomes, written


def block_edges(tokens: int) -> list[int]:
    """Return where the blocks of `tokens` positions begin and end; a block has at least one."""
    blocks = min(BLOCKS, tokens)
    return [-(-i * tokens // blocks) for i in range(blocks + 1)]


def scores(kl: Tensor, same: Tensor) -> dict[str, float]:
    """Return the scores of one text from KL in nats [N], and 1 where the greedy token is equal [N].

    `kl_slope` is the slope of the least-squares line through KL over position, in nats per 1,000
    tokens; NaN for one position.
    """
    position = torch.arange(len(kl), dtype=torch.float64)
    centred = position - position.mean()
    return {
        "kl_mean": kl.mean().item(),
        "agreement": same.mean().item(),
        "kl_p999": kl.quantile(0.999).item(),
        "kl_slope": 1000 * (centred @ kl.double() / (centred @ centred)).item(),
    }


def by_block(kl: Tensor, same: Tensor) -> dict[str, list[float]]:
    """Return three of the scores in each block, from KL [N] and equality [N]."""
    parts = [scores(kl[a:b], same[a:b]) for a, b in pairwise(block_edges(len(kl)))]
    return {name: [part[name] for part in parts] for name in ("kl_mean", "agreement", "kl_p999")}
