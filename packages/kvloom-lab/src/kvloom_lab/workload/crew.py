"""Run the same measurement for several caches at once, their forward passes as one batch.

A measurement is a generator: it yields an `Ask` where it needs a forward pass, and is sent the
logits. The passes that all measurements ask for next run together where their sizes agree. Decides
which passes run together.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvloom import Cache
from kvloom.hf import Together, can_step_together, read_tokens

TOGETHER = 8  # measurements whose forward passes are one batch
Result = TypeVar("Result")


class Ask(NamedTuple):
    """A forward pass: append ids [B, T] to a cache; arguments as for `kvloom.hf.read_tokens`."""

    ids: Tensor
    cache: Cache
    every: bool = False


Work = Generator[Ask, Tensor, Result]
"""A measurement that yields `Ask`, is sent logits, and returns a result."""


def run_together(model: PreTrainedModel, works: Sequence[Work[Result]]) -> list[Result | Exception]:
    """Return what each measurement returned, or the exception it raised.

    An exception of a forward pass is raised where its measurement asked for it.
    """
    results: list[Any] = [None] * len(works)
    asks: dict[int, Ask] = {}

    def resume(i: int, answer: Tensor | Exception | None) -> None:
        """Go on with measurement i until it asks again or ends."""
        try:
            if isinstance(answer, Exception):
                asks[i] = works[i].throw(answer)
            else:
                asks[i] = works[i].send(answer)  # type: ignore[arg-type]  # None starts it
        except StopIteration as end:
            results[i] = end.value
        except Exception as error:
            results[i] = error

    for i in range(len(works)):
        resume(i, None)
    while asks:
        asked = dict(asks)
        asks.clear()
        for numbers in _by_size(asked):
            answers = _answers(model, [asked[i] for i in numbers])
            for i, answer in zip(numbers, answers, strict=True):
                resume(i, answer)
    return results


def run_alone(model: PreTrainedModel, work: Work[Result]) -> Result:
    """Return what a measurement returns; raise what it raises."""
    (result,) = run_together(model, [work])
    if isinstance(result, Exception):
        raise result
    return result


def _answers(model: PreTrainedModel, asks: Sequence[Ask]) -> list[Tensor | Exception]:
    """Return the logits of passes of equal size: together, or one by one where that fails."""
    caches = [ask.cache for ask in asks]
    if len(asks) > 1 and can_step_together(model, caches):
        ids = torch.cat([ask.ids for ask in asks])
        try:
            logits = read_tokens(model, ids, Together(model, caches), asks[0].every)
        except Exception:  # of one of them: find out which, each in a pass of its own
            pass
        else:
            return list(logits.split([len(ask.ids) for ask in asks]))
    return [_answer(model, ask) for ask in asks]


def _answer(model: PreTrainedModel, ask: Ask) -> Tensor | Exception:
    try:
        return read_tokens(model, *ask)
    except Exception as error:
        return error


def _by_size(asks: dict[int, Ask]) -> Iterator[list[int]]:
    """Divide asks by their new tokens, wanted logits, and the tokens that their caches have."""
    found: dict[tuple[int, bool, int], list[int]] = {}
    for i, ask in asks.items():
        key = ask.ids.shape[1], ask.every, ask.cache.get_seq_length()
        found.setdefault(key, []).append(i)
    yield from found.values()
