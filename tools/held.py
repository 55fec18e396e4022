"""What a cache holds, and what a step must give, apart from the code that attends.

`check` replaces the layers of a cache. Before every step, a layer's tokens are read out: their
logical indices, and their keys and values, the packed ones unpacked by the reference. After it,
attention in float64 over exactly the tokens that the step reads is compared with the output. What
is packed is compared with the model's own keys and values, packed again by the reference. Of fitted
values, only which may change is checked; what is stored is compared with them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvloom.cache.layer import LayerCache
from kvloom.cache.segment import Segment
from kvloom.cache.slot_storage import SlotStorage
from kvloom.cache.step import Queries, StepInputs
from kvloom.hf.routed_cache import RoutedCache
from kvloom.hf.routed_layer import RoutedLayer
from kvloom.keep import Fit, Step
from kvloom.kernels import dispatch
from kvloom.positions.rope import Rope
from kvloom.store.kv_side import KVSide


class Held(NamedTuple):
    """Stored tokens: logical indices int64 [B, Hk, n], keys and values [B, Hk, n, D].

    hidden: bool [B, Hk, n], tokens that no query reads here.
    """

    index: Tensor
    keys: Tensor
    values: Tensor
    hidden: Tensor


@dataclass
class Findings:
    """The largest errors of all layers and steps, and what was wrong.

    attention: difference of the output from the reference, over the largest value read and the
    largest sum of |q k| of a logit (or 1), with which the rounding errors of fp32 grow. stored:
    difference of a stored token from the model's, packed and unpacked by the reference where it is
    packed, over the largest magnitude.
    """

    attention: float = 0.0
    stored: float = 0.0
    steps: int = 0
    recalls: int = 0
    wrong: list[str] = field(default_factory=list)


def check(cache: RoutedCache, rope: Rope | None = None) -> Findings:
    """Check every later step of an empty cache; returns what is found, complete after each step.

    rope: the model's rotary embedding, for recipes that renumber positions.
    """
    findings = Findings()
    for routed in cache.full_layers:
        routed.cache.observe()
        cache.replace(cache.layers.index(routed), CheckedLayer(routed.cache, findings, rope))
    return findings


class FittedValues(NamedTuple):
    """Values [B, Hk, N, D] after a fit, of tokens at `index` [B, Hk, N].

    seen: the tokens that the layer had seen. may_change: bool [B, Hk, N], what a fit may change.
    """

    seen: int
    index: Tensor
    values: Tensor
    may_change: Tensor


@dataclass(frozen=True)
class NotedFit(Fit):
    """A `Fit` whose values a `CheckedLayer` notes."""

    layer: Any = field(default=None, compare=False, repr=False)

    def __call__(
        self,
        step: Step,
        kept: Tensor,
        keys: Tensor,
        free: Tensor | None = None,
        without_query: int = 0,
    ) -> Tensor:
        """Return the fitted values."""
        values = super().__call__(step, kept, keys, free, without_query)
        self.layer.note_fit(self, step, values, kept if free is None else free & kept)
        return values


class CheckedLayer(RoutedLayer):
    """A `RoutedLayer` that compares each step with the reference."""

    def __init__(self, cache: LayerCache, findings: Findings, rope: Rope | None) -> None:
        super().__init__(cache)
        self.findings, self.rope, self.alibi = findings, rope, False
        self.fits: list[FittedValues] = []
        recipe = cache.recipe
        if recipe.keep is not None and recipe.keep.fit is not None:
            fit = NotedFit(**asdict(recipe.keep.fit), layer=self)
            cache._state.recipe = replace(recipe, keep=replace(recipe.keep, fit=fit))
            cache.reset()
        self.keys: Tensor | None = None  # of all tokens, as the model gave them
        self.values: Tensor | None = None
        self.unpacked: dict[str, tuple[Any, Tensor]] = {}
        self.padding = 0.0  # of the tokens of which heads have different numbers, a head's mean

    def attend(self, given: StepInputs) -> Tensor:
        """Attend as `RoutedLayer` does, and check the output."""
        queries, k, v, *_ = given
        self.alibi = queries.alibi is not None
        mask = None if queries.visible is None else queries.visible[:, 0]
        b, _, t, _ = k.shape
        repeats, seen = self.repeated is not None, self.cache.seen
        visible = mask if mask is not None else torch.ones(b, seen + t, dtype=torch.bool)
        held = self._held(visible) if seen else []
        retriever = self.cache._state.retriever
        indexed = 0 if retriever is None else retriever.finder.tokens
        out = super().attend(given)
        if seen and retriever is not None and not repeats:
            held = self._recalled(held, indexed, queries.q.shape[1])
        want, size, read = self._reference(queries, k, v, held, visible)
        off = torch.where(visible[:, None, seen:, None], (out.double() - want).abs(), 0.0)
        self.findings.attention = max(self.findings.attention, float(off.max()) / size)
        if out.isnan().any():
            self.findings.wrong.append(f"{self.cache.name}: NaN at token {seen}")
        if not repeats:
            said = self.cache._state.tokens_read
            if not math.isclose(read, said, rel_tol=1e-12):
                self.findings.wrong.append(
                    f"{self.cache.name}: says it read {said}, not {read} tokens"
                )
            self.findings.steps += 1
            self.give(k, v)
        return out

    def crop(self, tokens: int) -> None:
        """Remove -tokens tokens, those of the model too."""
        drafting = self.cache.removable > 0
        super().crop(tokens)
        if not drafting:  # no eviction is taken back
            self.fits = [x._replace(seen=min(x.seen, self.cache.seen)) for x in self.fits]
        self._forget_removed()

    def reset(self) -> None:
        """Remove all tokens, those of the model too."""
        super().reset()
        self._forget_removed()

    def roll_back(self) -> None:
        """Undo the running step, and forget the tokens that the model gave in it."""
        super().roll_back()
        self._forget_removed()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Reorder the batch, and the tokens of the model."""
        super().reorder_cache(beam_idx)
        self._move(lambda x: x[beam_idx])

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row, and the tokens of the model."""
        super().batch_repeat_interleave(repeats)
        self._move(lambda x: x.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep some rows, and the tokens of the model in them."""
        super().batch_select_indices(indices)
        self._move(lambda x: x[indices])

    def give(self, k: Tensor, v: Tensor) -> None:
        """Note keys and values [B, Hk, T, D] of the model."""
        self.keys = k if self.keys is None else torch.cat([self.keys, k], dim=2)
        self.values = v if self.values is None else torch.cat([self.values, v], dim=2)

    def note_fit(self, fit: Fit, step: Step, values: Tensor, may_change: Tensor) -> None:
        """Note the values [B, Hk, N, D] of a step after a fit; may_change: bool [B, Hk, N]."""
        changed = (values != step.v).any(dim=-1)
        most = fit.values * -(-values.shape[2] // fit.chunk)
        if (changed & ~may_change).any() or changed.sum(dim=-1).max() > most:
            self.findings.wrong.append(f"{self.cache.name}: a fit changed other or more values")
        index = step.index.long().expand(*values.shape[:3])
        self.fits.append(FittedValues(self.cache.seen, index, values, may_change))

    @property
    def fitted_values(self) -> Tensor:
        """The values of all tokens, as the model gave them or as they were fitted."""
        assert self.values is not None
        values = self.values.clone()
        for fitted in self.fits:
            row, head, place = fitted.may_change.nonzero(as_tuple=True)
            values[row, head, fitted.index[row, head, place]] = fitted.values[row, head, place]
        return values

    def _forget_removed(self) -> None:
        """Forget the tokens of the model that the layer has no more seen."""
        seen, self.unpacked = self.cache.seen, {}
        self.fits = [x for x in self.fits if 0 < x.seen <= seen]
        self.padding = self.padding if seen else 0.0
        if self.keys is not None and self.values is not None:
            self.keys = self.keys[:, :, :seen] if seen else None
            self.values = self.values[:, :, :seen] if seen else None

    def _move(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Apply fn to the tokens of the model, along the batch dimension."""
        self.unpacked = {}
        self.fits = [FittedValues(x.seen, *map(fn, x[1:])) for x in self.fits]
        if self.keys is not None and self.values is not None:
            self.keys, self.values = fn(self.keys), fn(self.values)

    def _held(self, visible: Tensor) -> list[Held]:
        """Return the parts of the layer, each token of a row and head unhidden in one of them."""
        layer, tokens = self.cache, self.cache._state.storage
        if isinstance(tokens, SlotStorage):
            keys, values, _, index = tokens.in_order()
            index = index.long()
            self._compare(index, keys, values, visible)
            return [Held(index, keys, values, ~_at(visible, index))]
        parts, heads = [], _heads(layer)
        taken = torch.zeros_like(visible)[:, None].repeat(1, heads, 1)
        for index, keys, values in self._exact_parts():
            hidden = (index < 0) | ~_at(visible, index.clamp_min(0))
            hidden |= taken.gather(2, index.clamp_min(0))
            parts.append(Held(index, keys, values, hidden))
            self._compare(index.clamp_min(0), keys, values, visible, hidden)
            taken.scatter_(2, index.clamp_min(0), taken.gather(2, index.clamp_min(0)) | ~hidden)
        beside = layer._state.hide_sinks(visible[:, None])  # sinks are stored apart
        assert beside is not None
        parts += self._ragged(beside[:, 0])
        if not len(tokens):
            return parts
        index = tokens.logical(0, len(tokens), visible.device)
        index = index.expand(*taken.shape[:2], -1)
        keys, values = (
            self._side(tokens, side, index, beside[:, 0]) for side in ("keys", "values")
        )
        hidden = ~_at(visible, index) | taken.gather(2, index)
        return [*parts, Held(index, keys, values, hidden)]

    def _exact_parts(self) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Return index, keys and values of the sinks and the outliers."""
        layer, parts = self.cache, []
        if layer._state.sinks is not None and layer._state.sinks.keys is not None:
            assert layer._state.sinks.values is not None
            index = layer._state.sinks.logical(layer.seen)[:, None].expand(-1, _heads(layer), -1)
            parts.append((index, layer._state.sinks.keys, layer._state.sinks.values))
        own = None if layer._state.outliers is None else layer._state.outliers.tokens
        if own is not None and own.logical_index is not None:
            parts.append((own.logical_index.long(), own.exact_keys(), own.exact_values()))
        return parts

    def _ragged(self, visible: Tensor) -> list[Held]:
        """Return the tokens of which heads have different numbers, padded with hidden ones."""
        evictor = self.cache._state.evictor
        ragged = None if evictor is None else evictor.ragged
        if ragged is None or ragged.spans is None:
            return []
        self.padding = 0.0
        if not len(ragged.keys):  # the other layers have won all tokens
            return []
        index = ragged.logical()
        self.padding = ragged.spans.longest - ragged.mean
        hidden = (index < 0) | ~_at(visible, index.clamp_min(0))
        held = []
        for side, given in ((ragged.keys, self.keys), (ragged.values, self.fitted_values)):
            assert given is not None
            given = given.masked_fill(~visible[:, None, : given.shape[2], None], 0.0)
            with dispatch.use("ref"):
                flat = side.kv_view().tensor()
            padded = given.new_zeros(*index.shape, given.shape[3])
            for row, head in product(range(index.shape[0]), range(index.shape[1])):
                first, count = ragged.spans.bounds[row, head].tolist()
                its = padded[row, head, :count] = flat[0, 0, first : first + count]
                at = index[row : row + 1, head : head + 1, :count]
                exact = _gathered(given[row : row + 1, head : head + 1], at)
                want = exact
                if count and side.packed is not None:
                    again = side.packed.empty()
                    with dispatch.use("ref"):
                        again.append(exact, _at(visible[row : row + 1], at))
                        want = again.view().tensor()
                self._note(its[None, None], want, _at(visible[row : row + 1], at))
            held.append(padded)
        return [Held(index, *held, hidden)]

    def _compare(
        self,
        index: Tensor,
        keys: Tensor,
        values: Tensor,
        visible: Tensor,
        hidden: Tensor | None = None,
    ) -> None:
        """Compare exact tokens with those that the model gave."""
        live = _at(visible, index) if hidden is None else ~hidden
        for stored, given in ((keys, self.keys), (values, self.fitted_values)):
            assert given is not None
            self._note(stored, _gathered(given, index), live)

    def _note(self, stored: Tensor, want: Tensor, live: Tensor) -> None:
        if stored.numel():
            off = torch.where(live[..., None], (stored.double() - want.double()).abs(), 0.0)
            size = want.double().abs().max().clamp_min(1e-30)
            self.findings.stored = max(self.findings.stored, float(off.max() / size))

    def _side(self, tokens: Segment, name: str, index: Tensor, visible: Tensor) -> Tensor:
        """Return the keys or values [B, Hk, n, D] of a segment, unpacked by the reference."""
        side: KVSide = getattr(tokens, name)
        given = self.keys if name == "keys" else self.fitted_values
        assert given is not None
        count, offloaded = side.packed_count, tokens.offloaded
        exact = _gathered(given, index).masked_fill(~_at(visible, index)[..., None], 0.0)
        turns = self._renumbers and not self.alibi
        if turns and name == "keys" and self.cache._state.evictor is not None:
            exact = self._turned_once(exact, index, tokens)
        state = (count, offloaded, tokens.kept, tokens.first)
        if name not in self.unpacked or self.unpacked[name][0] != state:
            stored = self._stored(tokens, name)
            n = stored.shape[2]
            want = self._packed_again(side, exact[:, :, :n], index[..., :n], visible, tokens)
            self._note(stored, want, _at(visible, index[..., :n]))
            self.unpacked[name] = (state, stored)
        stored, tail = self.unpacked[name][1], side.tail.view()
        n = stored.shape[2]
        self._note(tail, exact[:, :, n:], _at(visible, index[..., n:]))
        return torch.cat([stored, tail], dim=2)

    def _stored(self, tokens: Segment, name: str) -> Tensor:
        """Return the offloaded and the packed tokens of a side, unpacked: a copy."""
        side: KVSide = getattr(tokens, name)
        parts = []
        with dispatch.use("ref"):
            retriever = self.cache._state.retriever
            if tokens.offloaded:
                assert retriever is not None
                assert retriever.store is not None
                block = retriever.store.raw(0, tokens.offloaded)[("keys", "values").index(name)]
                parts.append(side.view_offloaded(block, tokens.offloaded).tensor())
            if side.packed_count:
                view = tokens.views()[name == "values"]
                parts.append(view.tensor(0, side.packed_count))
        if not parts:
            return side.tail.view()[:, :, :0]
        return torch.cat(parts, dim=2).clone()

    def _packed_again(
        self, side: KVSide, x: Tensor, index: Tensor, visible: Tensor, tokens: Segment
    ) -> Tensor:
        """Return x [B, Hk, n, D], tokens at `index`, as the reference packs and unpacks them."""
        packed = side.packed
        if packed is None or not x.shape[2]:
            return x
        at = tokens.positions(0, index.shape[2]) if side.needs_positions else None
        again = packed.empty()
        with dispatch.use("ref"):
            again.append(x, _at(visible, index), at)
            return again.view(positions=at).tensor()

    def _turned_once(self, keys: Tensor, index: Tensor, tokens: Segment) -> Tensor:
        """Return keys where an eviction after the prompt moved them to: just before the next."""
        keep = self.cache.recipe.keep
        if keep is None or keep.when != "prompt":
            return keys
        end = tokens.first + tokens.kept
        by = torch.arange(index.shape[2]) + end - tokens.kept - index
        by = by.masked_fill(index >= end, 0)
        assert self.rope is not None, "give check the model's rotary embedding"
        found = self.rope.rotate(keys, by)  # packing depends on its last bit
        self._note(found, turned(keys, by, self.rope), torch.ones_like(index, dtype=torch.bool))
        return found

    def _recalled(self, held: list[Held], indexed: int, heads: int) -> list[Held]:
        """Return what a step that recalls reads, by query head or by key/value head."""
        layer, trace = self.cache, self.cache._state.trace
        assert trace is not None
        if trace.recalled is None:
            return held
        slots, end = trace.recalled, layer.recipe.pinned_prefix + indexed
        self.findings.recalls += 1
        own = slots.sort(dim=-1).values
        if (own[..., 1:] == own[..., :-1]).any() or own.min() < 0 or own.max() >= end:
            self.findings.wrong.append(f"{layer.name}: recalled a token twice, or none that is")
        h = slots.shape[1]
        wide = [Held(*(x.repeat_interleave(h // x.shape[1], dim=1) for x in p)) for p in held]
        last = wide[-1]

        def chosen(x: Tensor) -> Tensor:
            at = slots if x.dim() == 3 else slots[..., None].expand(-1, -1, -1, x.shape[3])
            return torch.cat([x.gather(2, at), x[:, :, end:]], dim=2)

        return [*wide[:-1], Held(*map(chosen, last))]

    def _reference(
        self, queries: Queries, k: Tensor, v: Tensor, held: list[Held], visible: Tensor
    ) -> tuple[Tensor, float, float]:
        """Return attention in float64 [B, Hq, T, D], the size of its error, and the tokens read."""
        q, scale, cap = queries.q, queries.scale, queries.softcap
        b, hq, t, _ = q.shape
        seen = visible.shape[1] - t
        index = torch.arange(seen, seen + t).expand(b, k.shape[1], -1)
        parts = [*held, Held(index, k, v, ~_at(visible, index))]
        r = max(part.index.shape[1] for part in parts)
        parts = [Held(*(x.repeat_interleave(r // x.shape[1], dim=1) for x in p)) for p in parts]
        index, keys, values, hidden = (torch.cat(x, dim=2) for x in zip(*parts, strict=True))
        values = values.double().masked_fill(hidden[..., None], 0.0)
        keys = keys.double().masked_fill(hidden[..., None], 0.0)
        read = index.shape[2] - self.padding
        if self._renumbers and not self.alibi:
            keys = self._turned_to_read(keys, index)
        rows = q.double().view(b, r, hq // r, t, -1)
        logits = torch.einsum("bhrtd,bhnd->bhrtn", rows, keys) * scale
        if cap is not None:
            logits = cap * (logits / cap).tanh()
        if queries.alibi is not None:
            slopes = queries.alibi.slopes.double().view(r, hq // r, 1, 1)
            logits += slopes * self._distances(index, visible)[:, :, None, None]
        later = index[:, :, None, None, :] > (seen + torch.arange(t))[:, None]
        logits = logits.masked_fill(hidden[:, :, None, None, :] | later, -torch.inf)
        weights = logits.softmax(dim=-1).nan_to_num(0.0)
        out = torch.einsum("bhrtn,bhnd->bhrtd", weights, values)
        sums = (rows.abs().flatten(2, 3).float() @ keys.abs().float().mT).max() * scale
        size = float(values.abs().max().clamp_min(1e-30)) * max(1.0, float(sums))
        return out.reshape(b, hq, t, -1), size, read

    def _distances(self, index: Tensor, visible: Tensor) -> Tensor:
        """Return the positions [B, H, n] of the tokens at index, the newest token having 0."""
        if self._renumbers:
            return index.argsort(dim=-1).argsort(dim=-1) - index.shape[2] + 1
        position = visible.cumsum(dim=-1)
        position = position - position[:, -1:]
        return position[:, None].expand(-1, index.shape[1], -1).gather(2, index.clamp_min(0))

    @property
    def _renumbers(self) -> bool:
        keep = self.cache.recipe.keep
        return keep is not None and keep.positions != "original"

    def _turned_to_read(self, keys: Tensor, index: Tensor) -> Tensor:
        """Return keys at consecutive positions; those kept once are stored at them already."""
        layer = self.cache
        once = layer.recipe.keep is not None and layer.recipe.keep.when == "prompt"
        if once:
            return keys
        rank = index.argsort(dim=-1).argsort(dim=-1)
        newest = int(index.max())
        return turned(keys, newest + 1 - index.shape[2] + rank - index, self.rope)


def turned(x: Tensor, by: Tensor, rope: Rope | None) -> Tensor:
    """Rotate x [B, H, n, D] by `by` positions, in float64."""
    assert rope is not None, "give check the model's rotary embedding"
    assert not rope.interleaved
    angle = by.double()[..., None] * rope.inv_freq.double()
    half = rope.inv_freq.numel()
    a, b, rest = x.double().split([half, half, x.shape[-1] - 2 * half], dim=-1)
    cos, sin = angle.cos(), angle.sin()
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], dim=-1)


def _heads(layer: LayerCache) -> int:
    """Return the number of key/value heads."""
    assert layer._state.like is not None
    return layer._state.like.shape[1]


def _at(visible: Tensor, index: Tensor) -> Tensor:
    """Return visible [B, N] at indices [B, Hk, n]."""
    return visible[:, None].expand(-1, index.shape[1], -1).gather(2, index)


def _gathered(x: Tensor, index: Tensor) -> Tensor:
    """Return x [B, Hk, N, D] at indices [B, Hk, n]."""
    return x.gather(2, index[..., None].expand(-1, -1, -1, x.shape[3]))
