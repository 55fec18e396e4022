"""Steps on a cache that has read a context: scored, free-running, and answers to questions."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..hf.cache import Cache
from ..workload import clock
from ..workload.forward import forward


class Decoded(NamedTuple):
    """Log-probabilities fp32 [B, N, V] of N steps, the greedy tokens [B, N], and seconds."""

    logp: Tensor
    greedy: Tensor
    seconds: float


def decode(
    model: PreTrainedModel,
    cache: Cache,
    first: Tensor,
    steps: int,
    given: Tensor | None = None,
) -> Decoded:
    """Run `steps` steps from tokens first [B]; then feed `given` [B, steps], or what is likeliest.

    The seconds are those of the model alone.
    """
    seconds, each, greedy = 0.0, [], []
    new = first[:, None]
    for i in range(steps):
        begin = clock.seconds(model.device)
        logits = forward(model, new, cache)  # [B, V]
        best = logits.argmax(-1)
        seconds += clock.seconds(model.device) - begin
        each.append(torch.log_softmax(logits.float(), dim=-1).cpu())
        greedy.append(best)
        new = (best if given is None else given[:, i])[:, None]
    return Decoded(torch.stack(each, dim=1), torch.stack(greedy, dim=1).cpu(), seconds)


def exact_logp(model: PreTrainedModel, cache: Cache, ids: Tensor) -> Tensor:
    """Append ids [B, N] to an exact cache; return log-probabilities fp32 [B, N, V] after each.

    All ids are one step: an exact cache attends to them as if they came one by one.
    """
    out = model(input_ids=ids, past_key_values=cache, use_cache=True)
    return torch.log_softmax(out.logits.float(), dim=-1).cpu()


def divergence(exact: Tensor, other: Tensor) -> Tensor:
    """Return KL(exact || other) [B, N] in nats, from log-probabilities [B, N, V]."""
    rows = zip(exact.unbind(1), other.unbind(1), strict=True)
    return torch.stack([(p.exp() * (p - q)).sum(-1) for p, q in rows], dim=1).clamp(min=0)


class Answer(NamedTuple):
    """Greedy tokens of an answer, and its share of the seconds and steps of decoding."""

    ids: list[int]
    seconds: float
    steps: int


def answers(
    model: PreTrainedModel,
    cache: Cache,
    questions: Sequence[list[int]],
    tokens: Sequence[int],
    batch: int,
) -> list[Answer]:
    """Answer each question on a copy of the cache, which has read one context.

    questions: their ids. tokens: how many to generate for each. An answer ends before the model's
    end-of-text token. Questions of one length are answered together, `batch` at once; none attends
    to another.
    """
    stop = stop_ids(model)
    found: dict[int, Answer] = {}
    order = sorted(range(len(questions)), key=lambda i: len(questions[i]))
    for _, same in groupby(order, key=lambda i: len(questions[i])):
        group = list(same)
        for at in range(0, len(group), batch):
            together = group[at : at + batch]
            own = copy.deepcopy(cache)
            if len(together) > 1:
                own.batch_repeat_interleave(len(together))
            ids = torch.tensor([questions[i] for i in together], device=model.device)
            most = max(tokens[i] for i in together)
            rows, seconds = greedy(model, own, ids, most, stop)
            for i, row in zip(together, rows.tolist(), strict=True):
                end = next((at for at, token in enumerate(row) if token in stop), len(row))
                answer = row[: min(end, tokens[i])]
                found[i] = Answer(answer, seconds / len(together), len(row))
    return [found[i] for i in range(len(questions))]


def stop_ids(model: PreTrainedModel) -> list[int]:
    """Return the tokens after which the model's generation ends."""
    ids = getattr(model.generation_config, "eos_token_id", None)
    return [] if ids is None else [ids] if isinstance(ids, int) else list(ids)


def greedy(
    model: PreTrainedModel, cache: Cache, ids: Tensor, tokens: int, stop: Sequence[int] = ()
) -> tuple[Tensor, float]:
    """Append ids [B, Q]; return the next greedy tokens [B, N], N <= tokens, and the seconds.

    Ends early when every row has a token of `stop`; the last token is not appended. A recipe with
    recall reads the ids one by one: a step of several tokens would read the whole cache, and the
    index would not be tested.
    """
    begin = clock.seconds(model.device)
    overrides = (one.parts.get("recall") for one in cache.recipe.layers)
    if any(recall is not None for recall in (cache.recipe.recall, *overrides)):
        for column in ids.split(1, dim=1)[:-1]:
            forward(model, column, cache)
        ids = ids[:, -1:]
    ended = torch.zeros(len(ids), dtype=torch.bool, device=ids.device)
    stopping = torch.tensor(stop, dtype=ids.dtype, device=ids.device)
    found = []
    for _ in range(tokens):
        ids = forward(model, ids, cache).argmax(-1, keepdim=True)
        found.append(ids)
        ended |= torch.isin(ids[:, 0], stopping)
        if stop and ended.all():
            break
    return torch.cat(found, dim=1).cpu(), clock.seconds(model.device) - begin
