"""A prompt that a model has read exactly, and passes of its continuation over candidates.

A pass is one batch with another candidate in each row. Decides which layers are exact in a pass,
and that the layers in front of the first candidate are not computed again.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..cache.layer import LayerCache
from ..cache.part import Part, attend_parts
from ..hf.cache import Cache
from ..hf.routed import RoutedCache, RoutedLayer, lasting
from ..positions.alibi import Alibi
from ..recipe.spec import Recipe
from ..workload.forward import forward
from .candidates import OBSERVED
from .divergence import divergences
from .skip import decoder_layers, outputs_recorded, skipped


class Whole(NamedTuple):
    """Divergences of recipes in nats, fp32 [recipes, T], and the bytes of each after the prompt."""

    kl: Tensor
    nbytes: list[int]


class Prompt:
    """A prompt ids [1, N] in exact form, and its continuation [1, T].

    step: tokens of the continuation that one step of a whole recipe appends, so that tokens leave
    the recent window as they do when they come one by one.
    """

    def __init__(
        self, model: PreTrainedModel, ids: Tensor, continuation: Tensor, step: int
    ) -> None:
        self.model, self.continuation, self.step = model, continuation, step
        cache = Cache(model, Recipe())
        self.numbers, self.fingerprint = cache.geometry.numbers, cache.fingerprint
        self.layers = cache.layers  # after the prompt: a `_Reader`, or a layer of transformers
        for i in self.numbers:
            self.layers[i] = _Reader(self.layers[i].cache)
        forward(model, ids, cache)
        self.modules = decoder_layers(model)
        with outputs_recorded(self.modules) as self.outputs:
            logits = forward(model, continuation, self._rows(1), every=True)
        self.logp = torch.log_softmax(logits[0].float(), dim=-1)
        """The exact log-probabilities after each token of the continuation, fp32 [T, V]."""

    def one_layer(self, number: int, recipes: Sequence[Recipe]) -> Tensor:
        """Return KL(exact || candidate) in nats, fp32 [candidates, T]; all other layers are exact.

        number: the model's number of the layer that has these recipes.
        """
        cache = self._rows(len(recipes))
        cache.layers[number] = self._filled(number, [Cache(self.model, x) for x in recipes])
        ids = self.continuation.expand(len(recipes), -1)
        with skipped(self.modules[:number], self.outputs, len(recipes)):
            return divergences(self.logp, forward(self.model, ids, cache, every=True))

    def whole(self, recipes: Sequence[Recipe]) -> Whole:
        """Return the figures of recipes of the whole model."""
        caches, together = [Cache(self.model, x) for x in recipes], self._rows(len(recipes))
        for number in self.numbers:
            together.layers[number] = self._filled(number, caches)
        nbytes = [sum(layer.cache.nbytes for layer in cache.routed) for cache in caches]
        ids = self.continuation.expand(len(recipes), -1)
        found = [
            divergences(exact, forward(self.model, new, together, every=True))
            for exact, new in zip(
                self.logp.split(self.step), ids.split(self.step, dim=1), strict=True
            )
        ]
        return Whole(torch.cat(found, dim=1), nbytes)

    def _filled(self, number: int, caches: Sequence[Cache]) -> _Candidates:
        """Return one layer whose rows are that layer of these caches, each with the prompt."""
        reader = self.layers[number]
        members = [cache.layers[number].cache for cache in caches]
        for member in members:
            q, k, v, options = reader.inputs
            lasting(member.prefill)(q, k, v, **options)
            member.end_step()
        return _Candidates(members)

    def _rows(self, rows: int) -> _Batch:
        """Return a cache of `rows` rows, all exact."""
        layers: list[Any] = []
        for layer in self.layers:
            if isinstance(layer, _Reader):
                layers.append(_Exact(layer))
            else:
                layers.append(copy.deepcopy(layer))
                layers[-1].batch_repeat_interleave(rows)
        return _Batch(layers, self.fingerprint)


class _Batch(RoutedCache):
    """The layers of one pass; some hold one row for all rows of the batch."""

    def check_batch(self, rows: int) -> None:
        """Accept any batch size: a prompt makes batches that fit."""


class _Inputs(NamedTuple):
    """What a prompt attended with: its last queries [1, Hq, T, D], and k, v [1, Hk, N, D]."""

    q: Tensor
    k: Tensor
    v: Tensor
    options: dict[str, Any]


class _Reader(RoutedLayer):
    """A layer that reads a prompt exactly and keeps what it attended with."""

    inputs: _Inputs

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float,
        mask: Tensor | None,
        softcap: float | None,
        alibi: Alibi | None = None,
    ) -> Tensor:
        """Attend causally within the prompt."""
        self.armed = False
        options = {"scale": scale, "softcap": softcap, "alibi": alibi}
        self.inputs = _Inputs(q[:, :, -OBSERVED:].clone(), k, v, options)
        self.cache.seen = k.shape[2]
        return _attend(q, k, v, scale, softcap, alibi)


class _Exact(RoutedLayer):
    """A layer whose rows attend to one exact prompt; it stores nothing."""

    def __init__(self, reader: _Reader) -> None:
        super().__init__(reader.cache)
        self.inputs = reader.inputs

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float,
        mask: Tensor | None,
        softcap: float | None,
        alibi: Alibi | None = None,
    ) -> Tensor:
        """Attend to the prompt, and causally to k, v [rows, Hk, T, D]."""
        self.armed = False
        keys = torch.cat([self.inputs.k.expand(len(q), -1, -1, -1), k], dim=2)
        values = torch.cat([self.inputs.v.expand(len(q), -1, -1, -1), v], dim=2)
        return _attend(q, keys, values, scale, softcap, alibi)


class _Candidates(RoutedLayer):
    """A layer whose rows each have a cache of their own."""

    def __init__(self, members: Sequence[LayerCache]) -> None:
        super().__init__(members[0])
        self.members = members

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float,
        mask: Tensor | None,
        softcap: float | None,
        alibi: Alibi | None = None,
    ) -> Tensor:
        """Attend in each cache with its row of q [rows, Hq, T, D]."""
        self.armed = False
        rows = [
            lasting(member.attend)(*row, scale=scale, softcap=softcap, alibi=alibi)
            for member, *row in zip(self.members, q.split(1), k.split(1), v.split(1), strict=True)
        ]
        for member in self.members:
            member.end_step()
        return torch.cat(rows)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, scale: float, softcap: float | None, alibi: Alibi | None
) -> Tensor:
    """Attend the last T of N tokens causally: q [B, Hq, T, D], k, v [B, Hk, N, D]."""
    bias = None
    if alibi is not None:
        bias = alibi.bias(torch.arange(k.shape[2], device=k.device).view(1, 1, -1))
    part = Part(k, v, None, causal=q.shape[2], bias=bias)
    return attend_parts(q, [part], scale, softcap)
