"""A prompt that a model has read exactly, and passes of its continuation over candidate recipes.

A pass is one batch with another candidate in each row. Decides what the layers beside the
candidates hold in a pass. How a layer stores the prompt changes no activation in front of it, so
the layers in front are not computed again; a model whose layers cannot be found is computed from
the start. It is of the library, not of the tuner that uses it: it exchanges layers of a cache,
which are not public.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..cache.layer import LayerCache
from ..cache.step import StepInputs
from ..errors import CacheMisuse
from ..hf import compat, stock
from ..hf.cache import Cache
from ..hf.guard import outside_inference_mode
from ..hf.hybrid import stock_part, with_compressed
from ..hf.implementation import use_kvloom
from ..hf.passes import read_tokens
from ..hf.recording import attend_causally
from ..hf.repetition import of_prompt
from ..hf.routed_cache import RoutedCache
from ..hf.routed_layer import RoutedLayer
from ..hf.shared_pass import BatchedLayer
from ..recipe.spec import Recipe


class LayerContext(NamedTuple):
    """What the layers beside a scored one hold.

    tokens: the tokens of each compressed layer, by its index in the model. outputs: what each layer
    of the model returns for the continuation: a tensor [1, T, hidden] or a tuple.
    """

    tokens: dict[int, _Tokens]
    outputs: list[Any]


class ReadPrompt:
    """A prompt in exact form, and its continuation: the divergence of candidate recipes from it.

    Args:
        model: A supported model.
        ids: The prompt, int64 [1, N].
        continuation: int64 [1, T].
        step: Tokens of the continuation that one step of a whole recipe appends, so that tokens
            leave the recent window as they do when they come one by one.
        queries: The last queries of the prompt that recipes may score it by.

    Attributes:
        exact: What all layers hold with an exact cache.
        logp: The exact log-probabilities after each token of the continuation, fp32 [T, V].
    """

    def __init__(
        self,
        model: PreTrainedModel,
        ids: Tensor,
        continuation: Tensor,
        step: int,
        queries: int = 32,
    ) -> None:
        self.model, self.ids, self.continuation, self.step = model, ids, continuation, step
        self.repeated: dict[Any, dict[int, Tensor | None]] = {}
        """The scores of repetitions of this prompt, by the rule of the scores and by layer."""
        cache = Cache(model, Recipe())
        self.layer_indices, self.config_key = cache.geometry.layer_indices, cache.config_key
        self.layers = cache.layers  # after the prompt
        routed = zip(self.layer_indices, cache.full_layers, strict=True)
        self.readers = {layer_index: _Reader(layer.cache, queries) for layer_index, layer in routed}
        for layer_index, reader in self.readers.items():
            cache.replace(layer_index, reader)
        read_tokens(model, ids, cache)
        self.modules = compat.decoder_layers(model)
        inputs = {layer_index: reader.inputs for layer_index, reader in self.readers.items()}
        tokens = {
            layer_index: _Tokens(step.k, step.v, None) for layer_index, step in inputs.items()
        }
        self.exact, logits = self._base(tokens)
        self.logp = torch.log_softmax(logits[0].float(), dim=-1)

    def evicted(self, recipe: Recipe) -> LayerContext:
        """Return what all layers hold where an exact store has evicted tokens after the prompt."""
        cache, tokens = Cache(self.model, recipe), {}
        for layer_index in self.layer_indices:
            tokens[layer_index] = _Tokens(*self._filled(layer_index, cache).exact_tokens())
        return self._base(tokens)[0]

    def one_layer(self, layer_index: int, recipes: Sequence[Recipe], base: LayerContext) -> Tensor:
        """Return KL(exact || candidate) in nats, fp32 [candidates, T].

        layer_index: the layer that has these recipes. base: what all other layers hold.
        """
        cache = self._rows(len(recipes), base)
        members = [self._filled(layer_index, Cache(self.model, recipe)) for recipe in recipes]
        cache.replace(layer_index, _Candidates(members))
        ids = self.continuation.expand(len(recipes), -1)
        with _skipped(self.modules[:layer_index], base.outputs, len(recipes)):
            return kl_divergence(self.logp, read_tokens(self.model, ids, cache, all_logits=True))

    def whole(self, recipes: Sequence[Recipe]) -> Tensor:
        """Return KL(exact || recipe) of recipes of the whole model, fp32 [recipes, T]."""
        caches = [Cache(self.model, recipe) for recipe in recipes]
        batch = self._rows(len(recipes), self.exact)
        for layer_index in self.layer_indices:
            batch.replace(
                layer_index, _Candidates([self._filled(layer_index, cache) for cache in caches])
            )
        ids = self.continuation.expand(len(recipes), -1)
        steps = zip(self.logp.split(self.step), ids.split(self.step, dim=1), strict=True)
        divergences = [
            kl_divergence(exact, read_tokens(self.model, new, batch, all_logits=True))
            for exact, new in steps
        ]
        return torch.cat(divergences, dim=1)

    def kept(self, recipe: Recipe) -> list[float]:
        """Return the share of the prompt that each layer keeps, averaged over its heads."""
        cache = Cache(self.model, recipe)
        members = [self._filled(layer_index, cache) for layer_index in self.layer_indices]
        return [1 - member.dropped / member.seen for member in members]

    def _filled(self, layer_index: int, cache: Cache) -> LayerCache:
        """Return one layer of a cache, with the prompt."""
        member = self._stored(layer_index, cache)
        if member.repetition is not None:
            rule = member.repetition.rule
            scores = self.repeated.get(rule) or self._repeat(member.recipe)
            if any(x is not None for x in scores.values()):  # the budget is below the prompt
                self.repeated[rule] = scores
            member.repetition.copy_scores(scores[layer_index])
            outside_inference_mode(member.end_repetition)()
        member.forget_undo()
        return member

    def _stored(self, layer_index: int, cache: Cache) -> LayerCache:
        """Store the prompt in one layer of a cache, and return it."""
        keep = cache.recipe.keep
        if keep is not None and (keep.fit or (keep.scorer.of_prompt and not keep.scorer.repeats)):
            raise CacheMisuse(
                f"recipe {cache.recipe.name!r} needs the queries of a whole prompt, of which only "
                "the last are known here; call kvloom_lab.compare instead"
            )
        member = cache.full_layers[list(self.layer_indices).index(layer_index)].cache
        outside_inference_mode(member.prefill)(self.readers[layer_index].inputs)
        return member

    def _repeat(self, recipe: Recipe) -> dict[int, Tensor | None]:
        """Let the model repeat the prompt; return each layer's scores, as `recipe` takes them."""
        cache = Cache(self.model, Recipe(keep=recipe.keep, protect=recipe.protect))
        repetition = of_prompt(self.model, cache, {"input_ids": self.ids})
        assert repetition is not None
        members = {
            layer_index: self._stored(layer_index, cache) for layer_index in self.layer_indices
        }
        with use_kvloom(self.model._kvloom.configs):
            repetition.score()
        scores = {}
        for layer_index, member in members.items():
            assert member.repetition is not None
            scores[layer_index] = member.repetition.scores
        return scores

    def _base(self, tokens: dict[int, _Tokens]) -> tuple[LayerContext, Tensor]:
        """Return the base of these tokens, and the logits of the continuation [1, T, V]."""
        cache = self._rows(1, LayerContext(tokens, []))
        with _outputs_recorded(self.modules) as outputs:
            logits = read_tokens(self.model, self.continuation, cache, all_logits=True)
        return LayerContext(tokens, outputs), logits

    def _rows(self, rows: int, base: LayerContext) -> _Batch:
        """Return a cache of `rows` rows, all with the tokens of `base`."""
        layers: list[Any] = []
        for layer_index, layer in enumerate(self.layers):
            stored, reader = copy.deepcopy(stock_part(layer)), self.readers.get(layer_index)
            if stored is not None:
                stock.change(stored, "batch_repeat_interleave", rows)
            if reader is not None:
                shared = _Shared(reader.cache, base.tokens[layer_index])
                stored = with_compressed(stored, shared)
            layers.append(stored)
        return _Batch(layers, self.config_key)


def can_repeat(model: PreTrainedModel, tokens: int, recipe: Recipe) -> bool:
    """Return whether a model has the positions to repeat a prompt, where a recipe needs it."""
    ids = torch.zeros(1, tokens, dtype=torch.long, device=model.device)
    try:
        of_prompt(model, Cache(model, recipe), {"input_ids": ids})
    except CacheMisuse:
        return False
    return True


def kl_divergence(logp: Tensor, logits: Tensor) -> Tensor:
    """Return KL(exact || other) of the next tokens in nats, fp32 [rows, T].

    logp: fp32 [T, V], log-probabilities of the exact cache. logits: [rows, T, V].
    """
    exact = logp.exp()
    rows = [(exact * (logp - torch.log_softmax(x.float(), dim=-1))).sum(-1) for x in logits]
    return torch.stack(rows).clamp(min=0)


class _Batch(RoutedCache):
    """The layers of one pass; some hold one row for all rows of the batch."""

    def check_batch(self, rows: int) -> None:
        """Accept any batch size: a prompt makes batches that fit."""


class _Tokens(NamedTuple):
    """Exact keys and values [1, Hk, M, D] of a layer.

    indices: logical, int64 [1, Hk or 1, M]; None: 0 to M.
    """

    k: Tensor
    v: Tensor
    indices: Tensor | None


class _Reader(RoutedLayer):
    """A layer that reads a prompt exactly and keeps what it attended with."""

    inputs: StepInputs  # with the last queries alone

    def __init__(self, cache: LayerCache, queries: int) -> None:
        super().__init__(cache)
        self.queries = queries

    def attend(self, step: StepInputs) -> Tensor:
        """Attend causally within the prompt."""
        self.arrived()
        queries = step.queries
        last = queries._replace(q=queries.q[:, :, -self.queries :].clone(), visible=None)
        self.inputs = step._replace(queries=last)
        self.cache.mark_seen(step.tokens)
        return attend_causally(step)


class _Shared(RoutedLayer):
    """A layer whose rows attend to the same exact tokens; it stores nothing."""

    def __init__(self, cache: LayerCache, tokens: _Tokens) -> None:
        super().__init__(cache)
        self.tokens = tokens

    def attend(self, step: StepInputs) -> Tensor:
        """Attend to the shared tokens, and causally to the new ones of each row."""
        self.arrived()
        rows, k = len(step.k), step.k
        keys = torch.cat([self.tokens.k.expand(rows, -1, -1, -1), k], dim=2)
        values = torch.cat([self.tokens.v.expand(rows, -1, -1, -1), step.v], dim=2)
        index = self.tokens.indices
        if index is not None:
            new = torch.arange(self.cache.seen, self.cache.seen + k.shape[2], device=k.device)
            index = torch.cat([index, new.expand(*index.shape[:2], -1)], dim=2)
        return attend_causally(step._replace(k=keys, v=values), index)


class _Candidates(BatchedLayer):
    """A layer whose rows each have a cache of their own."""

    def __init__(self, members: Sequence[LayerCache]) -> None:
        rows = [slice(row, row + 1) for row in range(len(members))]
        super().__init__([RoutedLayer(member) for member in members], rows)

    def attend(self, step: StepInputs) -> Tensor:
        """Attend in each cache with its row of the batch."""
        out = super().attend(step._replace(queries=step.queries._replace(visible=None)))
        for member in self.members:
            member.forget_undo()
        return out


@contextmanager
def _outputs_recorded(layers: Sequence[nn.Module]) -> Iterator[list[Any]]:
    """Yield a list to which each of these layers adds its output, a tensor or a tuple."""
    outputs: list[Any] = []
    with ExitStack() as hooks:
        for layer in layers:
            hook = layer.register_forward_hook(lambda _, inputs, output: outputs.append(output))
            hooks.callback(hook.remove)
        yield outputs


@contextmanager
def _skipped(layers: Sequence[nn.Module], outputs: Sequence[Any], rows: int) -> Iterator[None]:
    """Let these layers return their outputs for one row, `rows` times, without computing."""
    with ExitStack() as restored:
        for layer, output in zip(layers, outputs, strict=False):
            restored.callback(_restore, layer, vars(layer).get("forward"))
            layer.forward = _returning(_repeated(output, rows))
        yield


def _returning(output: Any) -> Callable[..., Any]:
    """Return a forward whose output is known."""
    return lambda *args, **kwargs: output


def _repeated(output: Any, rows: int) -> Any:
    if isinstance(output, tuple):
        return (_repeated(output[0], rows), *output[1:])
    return output.expand(rows, *output.shape[1:])


def _restore(layer: nn.Module, forward: Any) -> None:
    if forward is None:
        del layer.forward
    else:
        layer.forward = forward
