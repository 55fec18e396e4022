"""Tasks on a text: how well it is predicted after a context, and free-running generation.

`perplexity` decodes the continuation token by token, so that every prediction reads the compressed
cache. `short` does so after prompts of `SHORT_LENGTHS` tokens. In `free`, errors accumulate,
because each token depends on those before it. Divergence is measured along the recipe's own text:
the exact cache reads what the recipe wrote, and the two distributions of each next token are
compared.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from kvloom import Cache
from kvloom.errors import InputError

from ...workload.passes import ForwardRequest, Measurement
from ...workload.text import separate_rows
from ..decoding import decode, divergence
from ..sample import Baseline, Batch, Outcome, Run, Sample, Source, Task

CHUNK = 64  # tokens between two readings by the exact cache
GRAM = 4
SHORT_LENGTHS = 64, 128, 256, 512, 1024


class ContinuationTask(Task[Baseline]):
    """A task on rows of text; a sample's payload are its ids after the context."""

    def batches(self, source: Source) -> list[Batch]:
        """Return rows of text of each length, in batches; raises as `separate_rows` does."""
        batches = []
        for length in source.lengths:
            tokens = length + source.new_tokens + 1
            text = source.text_ids, source.first
            rows = separate_rows(*text, source.samples, tokens, source.seed)
            for begin in range(0, len(rows), source.batch):
                part = rows[begin : begin + source.batch]
                samples = [
                    Sample(
                        f"{length}/{begin + i}",
                        source.decode(row[:length]),
                        reference=source.decode(row[length + 1 :]),
                        fields={"length": length},
                        payload=row[length:],
                    )
                    for i, row in enumerate(part)
                ]
                batches.append(Batch(part[:, :length], samples))
        return batches

    def positions(self, batch: Batch) -> int:
        """Return the positions after a context; the last token takes none."""
        return len(batch.samples[0].payload) - 1


class Perplexity(ContinuationTask[Tensor]):
    """Perplexity, KL divergence and agreement on a continuation of `new_tokens` tokens."""

    name = "perplexity"
    about = "The model reads a text through the cache, and predicts the text that really follows."
    main_score = "perplexity"
    lower_is_better = ("nll", "kl_mean", "kl_median", "kl_p999")

    def measure(self, run: Run[Tensor]) -> Measurement[tuple[list[Outcome], Tensor]]:
        """Score each continuation; returns the log-probabilities for the others."""
        source = run.source
        rows = torch.stack([sample.payload for sample in run.batch.samples]).to(run.model.device)
        count = rows.shape[1] - 1
        decoded = yield from decode(run.cache, rows[:, 0], count, fed=rows[:, 1:])
        baseline = decoded.logp if run.baseline is None else run.baseline
        nll = -decoded.logp.gather(2, rows[:, 1:, None].cpu())[..., 0]  # [B, N]
        kl = divergence(baseline, decoded.logp)
        same = decoded.greedy == baseline.argmax(-1)
        outcomes = [
            Outcome(
                scores={
                    "nll": nll[i].mean().item(),
                    "kl_mean": kl[i].mean().item(),
                    "kl_median": kl[i].median().item(),
                    "kl_p999": kl[i].quantile(0.999).item(),
                    "agreement": same[i].float().mean().item(),
                },
                tokens=source.pieces(decoded.greedy[i]),
                curves={"kl": kl[i].tolist(), "nll": nll[i].tolist()},
            )
            for i in range(len(rows))
        ]
        return outcomes, baseline


class Short(Perplexity):
    """The same after short prompts, of which a fraction is few tokens."""

    name = "short"
    about = "The model reads a short prompt, and predicts the text that really follows."
    main_score = "kl_mean"

    def batches(self, source: Source) -> list[Batch]:
        """Return rows of `SHORT_LENGTHS`, up to the longest length of the source."""
        longest = max(source.lengths)
        lengths = [length for length in SHORT_LENGTHS if length <= longest]
        if not lengths:
            raise InputError(
                f"short: prompts have {SHORT_LENGTHS[0]} tokens or more, and --context has "
                f"{longest}; use a longer --context"
            )
        return super().batches(replace(source, lengths=lengths))


class ExactText(NamedTuple):
    """The exact cache after the context, and what it generated [B, N]."""

    cache: Cache
    tokens: Tensor


class Free(ContinuationTask[ExactText]):
    """Tokens until the first difference from `full`, divergence by position, and repetition.

    Only the first token after the context is given.
    """

    name = "free"
    about = (
        "The model writes on by itself from a text. Errors of the cache can add up from "
        "token to token."
    )
    main_score = "diverged_at"
    lower_is_better = ("kl_mean", "repetition")

    def measure(self, run: Run[ExactText]) -> Measurement[tuple[list[Outcome], ExactText]]:
        """Generate greedily, and compare with the exact cache."""
        model, source = run.model, run.source
        n = source.new_tokens
        before = copy.deepcopy(run.cache) if run.baseline is None else run.baseline.cache
        reader = None if run.baseline is None else copy.deepcopy(before)
        new = torch.stack([sample.payload[0] for sample in run.batch.samples]).to(model.device)
        tokens, kl = [], []
        for begin in range(0, n, CHUNK):
            decoded = yield from decode(run.cache, new, min(CHUNK, n - begin))
            if reader is not None:
                fed = torch.cat([new.cpu()[:, None], decoded.greedy[:, :-1]], dim=1)
                # One step: an exact cache attends to the tokens as if they came one by one.
                logits = yield ForwardRequest(fed.to(model.device), reader, all_logits=True)
                exact_logp = torch.log_softmax(logits.float(), dim=-1).cpu()
                kl.append(divergence(exact_logp, decoded.logp))
            tokens.append(decoded.greedy)
            new = decoded.greedy[:, -1].to(model.device)
        written = torch.cat(tokens, dim=1)
        baseline = ExactText(before, written) if run.baseline is None else run.baseline
        curve = torch.cat(kl, dim=1) if kl else torch.zeros(written.shape)
        outcomes = []
        for i, row in enumerate(written):
            different = (row != baseline.tokens[i]).nonzero()
            outcomes.append(
                Outcome(
                    scores={
                        "diverged_at": float(different[0]) if len(different) else float(n),
                        "kl_mean": curve[i].mean().item(),
                        "repetition": repetition(row.tolist()),
                    },
                    answer=source.decode(row),
                    tokens=source.pieces(row),
                    curves={"kl": curve[i].tolist()},
                )
            )
        return outcomes, baseline


def repetition(tokens: list[int]) -> float:
    """Return the share of n-grams of `GRAM` tokens that occurred before."""
    grams = [tuple(tokens[i : i + GRAM]) for i in range(len(tokens) - GRAM + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0
