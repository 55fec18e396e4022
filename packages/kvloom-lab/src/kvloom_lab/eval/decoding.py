"""Steps on a cache that has read a context: scored, free-running, and answers to questions.

The generators request forward passes, which `workload.passes` runs for several recipes at once.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvloom import Cache
from kvloom.hf import read_tokens
from kvloom.kernels import companion

from ..workload import clock
from ..workload.passes import ForwardRequest, Measurement

WARM_UP_STEPS = 2  # before steps that are timed


class Decoded(NamedTuple):
    """Log-probabilities fp32 [B, N, V] of N steps, and the greedy tokens [B, N]."""

    logp: Tensor
    greedy: Tensor


def decode(
    cache: Cache, first: Tensor, steps: int, fed: Tensor | None = None
) -> Measurement[Decoded]:
    """Run `steps` steps from tokens first [B]; then feed `fed` [B, steps], or the likeliest."""
    log_probs, tokens = [], []
    new = first[:, None]
    for i in range(steps):
        logits = yield ForwardRequest(new, cache)  # [B, V]
        best = logits.argmax(-1)
        log_probs.append(torch.log_softmax(logits.float(), dim=-1).cpu())
        tokens.append(best)
        new = (best if fed is None else fed[:, i])[:, None]
    return Decoded(torch.stack(log_probs, dim=1), torch.stack(tokens, dim=1).cpu())


def decode_seconds(model: PreTrainedModel, cache: Cache, ids: Tensor) -> float:
    """Return the seconds of one decode step of this cache alone; it is unchanged.

    ids: the tokens of the steps, int64 [B, WARM_UP_STEPS + N]; the first ones are not timed.
    """
    companion.wait()
    copied = copy.deepcopy(cache)
    timed = ids.shape[1] - WARM_UP_STEPS
    for new in ids[:, :WARM_UP_STEPS].split(1, dim=1):
        read_tokens(model, new, copied)
    begin = clock.seconds(model.device)
    for new in ids[:, WARM_UP_STEPS:].split(1, dim=1):
        read_tokens(model, new, copied)
    return (clock.seconds(model.device) - begin) / timed


def divergence(exact: Tensor, other: Tensor) -> Tensor:
    """Return KL(exact || other) [B, N] in nats, from log-probabilities [B, N, V]."""
    rows = zip(exact.unbind(1), other.unbind(1), strict=True)
    return torch.stack([(p.exp() * (p - q)).sum(-1) for p, q in rows], dim=1).clamp(min=0)


def answers(
    model: PreTrainedModel,
    cache: Cache,
    questions: Sequence[list[int]],
    tokens: Sequence[int],
    batch: int,
) -> Measurement[list[list[int]]]:
    """Return the ids of an answer to each question, on copies of a cache that read one context.

    questions: their ids. tokens: how many to generate for each. An answer ends before the model's
    end-of-text token. Questions of one length are answered together, at most `batch`; none attends
    to another.
    """
    stop, answer_ids = stop_ids(model), [[0]] * len(questions)
    for numbers in equal_lengths(list(map(len, questions)), batch):
        copied = copy.deepcopy(cache)
        if len(numbers) > 1:
            copied.batch_repeat_interleave(len(numbers))
        ids = torch.tensor([questions[i] for i in numbers], device=model.device)
        logits = yield from read_question(copied, ids)
        rows = yield from greedy(copied, logits, max(tokens[i] for i in numbers), stop)
        for i, row in zip(numbers, rows.tolist(), strict=True):
            answer_ids[i] = before_stop(row, stop)[: tokens[i]]
    return answer_ids


def equal_lengths(lengths: Sequence[int], batch: int) -> Iterator[list[int]]:
    """Yield the numbers of items that have the same length, at most `batch` together."""
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    for _, same in groupby(order, key=lengths.__getitem__):
        group = list(same)
        for begin in range(0, len(group), batch):
            yield group[begin : begin + batch]


def before_stop(ids: list[int], stop: Sequence[int]) -> list[int]:
    """Return generated tokens before the first of `stop`."""
    return ids[: next((n for n, token in enumerate(ids) if token in stop), len(ids))]


def stop_ids(model: PreTrainedModel) -> list[int]:
    """Return the tokens after which the model's generation ends."""
    ids = getattr(model.generation_config, "eos_token_id", None)
    return [] if ids is None else [ids] if isinstance(ids, int) else list(ids)


def greedy(
    cache: Cache, logits: Tensor, tokens: int, stop: Sequence[int] = ()
) -> Measurement[Tensor]:
    """Return the greedy tokens [B, N], N <= tokens, that follow logits [B, V] of a cache.

    Ends early when every row has a token of `stop`; the last token is not appended.
    """
    stopping = torch.tensor(stop, dtype=torch.long, device=logits.device)
    generated: list[Tensor] = []
    while True:
        ids = logits.argmax(-1, keepdim=True)
        generated.append(ids)
        ended = torch.isin(torch.cat(generated, dim=1), stopping).any(dim=1)
        if len(generated) == tokens or (stop and ended.all()):
            return torch.cat(generated, dim=1).cpu()
        logits = yield ForwardRequest(ids, cache)


def read_question(cache: Cache, ids: Tensor) -> Measurement[Tensor]:
    """Append ids [B, Q] to a cache that read a context; return the logits of the last one, [B, V].

    A recipe with recall reads them one by one: a step of several tokens would read the whole cache,
    and the index would not be tested.
    """
    if cache.recipe.recalls:
        for column in ids.split(1, dim=1)[:-1]:
            yield ForwardRequest(column, cache)
        ids = ids[:, -1:]
    return (yield ForwardRequest(ids, cache))
