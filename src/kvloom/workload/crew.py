"""Run the same measurement for several caches at once, their forward passes as one batch.

Each measurement is an ordinary function that calls `forward`; it runs in a thread of its own and
waits there. Once every thread waits, the forward passes of equal size run together, in the caller's
thread. So the grouping, and with it every result, does not depend on timing. Decides which passes
run together.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..hf.cache import Cache
from ..hf.together import Together, can_step_together
from .forward import forward

Result = TypeVar("Result")


class Forward(Protocol):
    """Appends ids [B, T] to a cache; see `workload.forward`."""

    def __call__(self, ids: Tensor, cache: Cache, every: bool = False) -> Tensor: ...  # noqa: D102


@dataclass
class _Request:
    """A forward pass that a thread waits for."""

    ids: Tensor
    cache: Cache
    every: bool
    logits: Tensor | None = None
    error: BaseException | None = None
    answered: threading.Event = field(default_factory=threading.Event)


class Crew(Generic[Result]):
    """Measurements that run at once.

    work: one function for each, called with its `Forward`.
    """

    def __init__(self, model: PreTrainedModel, work: Sequence[Callable[[Forward], Result]]) -> None:
        self.model, self.work = model, work
        self._waiting: list[_Request | None] = [None] * len(work)
        self._ended = [False] * len(work)
        self._changed = threading.Condition()
        self._stopped = False
        self._unanswered: list[_Request] = []

    def run(self) -> list[Result | Exception]:
        """Return what each function returned, or the exception it raised."""
        results: list[Result | Exception] = [RuntimeError("not measured")] * len(self.work)

        def member(i: int) -> None:
            try:
                with torch.inference_mode():
                    results[i] = self.work[i](partial(self._ask, i))
            except Exception as error:
                results[i] = error
            finally:
                with self._changed:
                    self._ended[i] = True
                    self._changed.notify_all()

        threads = [threading.Thread(target=member, args=(i,)) for i in range(len(self.work))]
        for thread in threads:
            thread.start()
        try:
            while requests := self._requests():
                for same in _by_size(requests):
                    self._answer(same)
        finally:
            self._stop()
            for thread in threads:
                thread.join()
        return results

    def _ask(self, i: int, ids: Tensor, cache: Cache, every: bool = False) -> Tensor:
        """Wait in thread i for a forward pass."""
        request = _Request(ids, cache, every)
        with self._changed:
            if self._stopped:
                raise RuntimeError("the measurement was interrupted")
            self._waiting[i] = request
            self._changed.notify_all()
        request.answered.wait()
        if request.error is not None:
            raise request.error
        assert request.logits is not None
        return request.logits

    def _requests(self) -> list[_Request]:
        """Wait until every thread waits or has ended; return and remove what they wait for."""
        with self._changed:
            self._changed.wait_for(
                lambda: all(
                    one is not None or ended
                    for one, ended in zip(self._waiting, self._ended, strict=True)
                )
            )
            self._unanswered = [one for one in self._waiting if one is not None]
            self._waiting = [None] * len(self.work)
            return self._unanswered

    def _answer(self, requests: Sequence[_Request]) -> None:
        """Run the forward passes together, or one by one where that is not possible."""
        caches = [request.cache for request in requests]
        if len(requests) > 1 and can_step_together(self.model, caches):
            ids = torch.cat([request.ids for request in requests])
            try:
                together = Together(self.model, caches)
                logits = forward(self.model, ids, together, requests[0].every)
            except Exception:  # one of them failed: find out which, each in its own step
                pass
            else:
                parts = logits.split([len(request.ids) for request in requests])
                for request, part in zip(requests, parts, strict=True):
                    request.logits = part
                    request.answered.set()
                return
        for request in requests:
            try:
                request.logits = forward(self.model, request.ids, request.cache, request.every)
            except Exception as error:
                request.error = error
            request.answered.set()

    def _stop(self) -> None:
        """Let every waiting thread end with an error, after an interrupt."""
        with self._changed:
            self._stopped = True
            for request in [*self._unanswered, *self._waiting]:
                if request is not None and not request.answered.is_set():
                    request.error = RuntimeError("the measurement was interrupted")
                    request.answered.set()


def _by_size(requests: Sequence[_Request]) -> list[list[_Request]]:
    """Divide requests by their new tokens, wanted logits, and the tokens their caches have seen."""
    found: dict[tuple[int, bool, int], list[_Request]] = {}
    for request in requests:
        key = request.ids.shape[1], request.every, request.cache.get_seq_length()
        found.setdefault(key, []).append(request)
    return list(found.values())
