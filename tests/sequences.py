"""Random sequences of all that can happen to a cache, under any recipe, checked in float64.

`case_of` draws a recipe, a batch and a list of operations. `run` applies them to the layers of a
cache, without a model: numbers that a model, its examples or a calibration would give are random.
For scores that repeat the prompt, the layers read random chunks, as many and as long as those of
`hf.repetition.Repetition`, which itself is left out. After each operation `run` compares:

- each step with attention in float64 over the tokens that the layer holds, and these with the
  keys and values that were given (tools/held.py);
- the bytes after a prompt with the predicted ones;
- a draft with the steps of its accepted tokens, in a copy of the cache;
- a cache after a refused or interrupted operation with the one before.
"""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from random import Random
from typing import Any

import torch
from torch import Tensor

import kv_views
from held import CheckedLayer, Findings
from kvloom.cache.build import build_layers
from kvloom.cache.layer import LayerCache
from kvloom.cache.step import Queries, StepInputs
from kvloom.cache.waiting import WaitingTokens
from kvloom.errors import CacheMisuse, IncompatibleRecipe, NotFinite, RecipeError
from kvloom.hf.routed_cache import RoutedCache
from kvloom.hf.save import flat, nested
from kvloom.keep import SCORERS, Budget, Fit, Keep, Outliers, Reconstruction, Rotated
from kvloom.keep.budgets import POLICIES
from kvloom.keep.query_predictor import Examples
from kvloom.positions.alibi import Alibi, positions
from kvloom.positions.rope import Rope
from kvloom.recall import HEAD_CHOICES, Clusters, Pages, PartialKeys, Recall, Tier, TopK
from kvloom.recipe import LayerOverride, Protect, Recipe
from kvloom.recipe.geometry import Geometry
from kvloom.store import LayerFacts, Packed, Store
from stopping import Stop, StopAt

ATTENTION = 2.0**-22  # four rounding errors of fp32, over the size that `held.Findings` names
STORED = 1e-6
SLOPES = torch.tensor([0.5, 0.02, 0.1, 0.25])
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
OF_PROMPT = [kind for kind, scorer in SCORERS.items() if scorer.of_prompt]
Operation = tuple[Any, ...]


@dataclass(frozen=True)
class Case:
    """A recipe, the shape of a cache, and what happens to it.

    pads: the padded slots before each row. Operations: ("step", tokens), ("draft", tokens,
    rejected), ("first draft", prompt, tokens, rejected), ("crop", tokens), ("reorder", rows),
    ("repeat", times), ("select", rows), ("save",), ("copy",), ("reset",), ("not finite", tokens),
    ("interrupt", tokens, number): the step stops at this torch operation; ("wait", tokens): see
    `cache.waiting`. alibi: the model has no rotary embedding, but ALiBi.
    """

    recipe: Recipe
    layers: int
    heads: tuple[int, int]
    dim: int
    dtype: str
    pads: tuple[int, ...]
    operations: tuple[Operation, ...]
    seed: int = 0
    alibi: bool = False
    softcap: float | None = None

    @property
    def rope(self) -> Rope | None:
        """A rotary embedding of all channels."""
        if self.alibi:
            return None
        return Rope(1e4 ** -(torch.arange(0, self.dim, 2).float() / self.dim))

    @property
    def geometry(self) -> Geometry:
        """The model whose layers these are."""
        return Geometry(self.layers, *self.heads, self.dim, DTYPES[self.dtype], self.alibi)


# --- what is drawn -------------------------------------------------------------------------------


def case_of(seed: int) -> Case:
    """Return the case of this number."""
    draw = Random(seed)
    layers, dim = draw.choice([1, 1, 2, 3]), draw.choice([16, 32])
    heads = draw.choice([(2, 1), (4, 2), (2, 2), (4, 1)])
    dtype = draw.choice(["fp32", "fp32", "fp32", "bf16", "fp16"])
    alibi, softcap = draw.random() < 0.2, draw.choice([None, None, None, draw.uniform(2, 30)])
    recipe = _recipe(draw, Geometry(layers, *heads, dim, DTYPES[dtype], alibi))
    rows, prompt = draw.randint(1, 3), draw.choice([1, 20, 60, 120])
    prompt = draw.randint(1, prompt)
    pads = tuple(draw.choice([0, draw.randrange(prompt)]) for _ in range(rows))
    if _renumbers(recipe):  # tools/held.py counts no positions of padded rows, nor rounds angles
        pads, dtype = (0,) * rows, "fp32"
    operations: list[Operation] = [("step", prompt)]
    for _ in range(draw.randint(0, 6)):
        operations.append(_operation(draw, rows))
        name, *arguments = operations[-1]
        if name == "repeat":
            rows *= arguments[0]
        if name == "select":
            rows = len(arguments[0])
    if (own := Random(~seed)).random() < 0.15:
        operations[0] = ("first draft", prompt, own.randint(1, 9), own.randint(0, 9))
    if own.random() < 0.3:
        operations.append(("wait", own.choice([1, own.randint(2, 9), own.randint(10, 64)])))
    shape = layers, heads, dim, dtype, pads
    return Case(recipe, *shape, tuple(operations), seed, alibi, softcap)


def _operation(draw: Random, rows: int) -> Operation:
    """Return an operation after the prompt of a cache with so many rows."""
    some_rows = tuple(draw.randrange(rows) for _ in range(rows))
    step = ("step", draw.choice([1, 1, 1, draw.randint(2, 9), draw.randint(10, 70)]))
    return draw.choice(
        [
            step, step, step, step, ("draft", draw.randint(1, 9), draw.randint(0, 9)),
            ("crop", draw.randint(0, 5)), ("reorder", some_rows),
            ("repeat", draw.randint(1, 2) if rows <= 3 else 1),
            ("select", some_rows[: draw.randint(1, rows)]),
            (draw.choice(["save", "copy", "reset"]),), ("not finite", draw.randint(1, 9)),
            ("interrupt", draw.choice([1, 1, 7, 30]), draw.randrange(400)),
        ]
    )  # fmt: skip


def _recipe(draw: Random, geometry: Geometry) -> Recipe:
    """Return any recipe that a model of this geometry takes."""
    keys, values = (_packed(draw, side, geometry) for side in ("keys", "values"))
    sinks, recent = (
        draw.randint(0, 5),
        draw.choice([0, 9, (draw.randint(0, 9), draw.randint(0, 9))]),
    )
    outliers = Outliers(draw.randint(1, 20)) if draw.random() < 0.3 else None
    spans = ((draw.randint(0, 9), draw.randint(10, 20)),) if draw.random() < 0.2 else None
    other = LayerOverride(draw.choice(["0", "last 1"]), store=Store(values=values))
    options: dict[str, Any] = {
        "store": Store(keys, values), "keep": _keep(draw), "recall": _recall(draw),
        "protect": Protect(sinks, recent, outliers, spans=spans),
        "compress_after": draw.choice([0, 0, 0, 30]), "layers": draw.choice([(), (), (other,)]),
    }  # fmt: skip
    parts: list[dict[str, Any]] = [
        {"store": Store()}, {"keep": None}, {"recall": None}, {"layers": ()},
        {"protect": Protect(sinks, recent)}, {"compress_after": 0},
    ]  # fmt: skip
    draw.shuffle(parts)
    while True:  # parts that do not combine are left out, one after the other
        try:
            recipe = Recipe(**options)
            recipe.check(geometry)
            return recipe.for_model(geometry)
        except (RecipeError, IncompatibleRecipe):
            options |= parts.pop()


def _packed(draw: Random, side: str, geometry: Geometry) -> Packed | None:
    """Return a format; None: the side is exact."""
    dim, turned = geometry.head_dim, side == "keys" and not geometry.alibi
    if draw.random() < 0.3:
        return None
    axis, blocks = draw.choice(["channel", "token"]), draw.randint(1, 3)
    group = draw.choice([16, dim] if axis == "channel" else [16, dim, 0])
    block = group if axis == "channel" else draw.choice([1, 5, 9])
    while True:
        options = {
            "bits": draw.choice([1, 1.5, 2, 3, 4, 8]),
            "meta": draw.choice(["fp32", "fp16", "bf16", "fp8"]),
            "rotation": draw.choice(["none", "none", "group", "head"]),
            "span": draw.choice(["head", "head", "layer"]),
            "clip": draw.choice([1.0, 1.0, 0.9, "group", "layer"]),
            "pre_rope": turned and draw.random() < 0.2,
            **{name: draw.random() < 0.2 for name in ("reorder", "smooth", "static")},
            "unit": draw.choice([None, block]),
        }  # fmt: skip
        try:
            return Packed(axis=axis, group=group, residual=block * blocks, **options)
        except RecipeError:
            continue


def _keep(draw: Random) -> Keep | None:
    """Return which tokens stay; None: all."""
    if draw.random() < 0.3:
        return None
    scorer = SCORERS[draw.choice([*SCORERS, *2 * OF_PROMPT])]()
    if isinstance(scorer, Reconstruction):
        scorer = replace(scorer, chunk=draw.randint(5, 60))
    if isinstance(scorer, Rotated):
        scorer = Rotated(
            draw.randint(5, 60), draw.random() < 0.5, draw.choice([0, 16]), draw.choice([0.0, 0.3])
        )
    while True:
        tokens, when = draw.randint(8, 60), draw.choice(["step", "prompt", "limit", "block"])
        share = draw.choice([None, 0.0, 0.2, 0.5, 1.0]) if when in ("prompt", "block") else None
        size = (None, tokens / 80) if when == "block" or draw.random() < 0.4 else (tokens, None)
        recent = draw.choice([draw.randint(0, 8), 0.0, 0.3, 1.0])
        layers = draw.choice(["uniform", *POLICIES])
        fit = Fit(draw.randint(5, 60), draw.randint(1, 60), draw.randint(1, 20))
        try:
            return Keep(
                Budget(*size, recent, layers, head_share=share),
                scorer,
                when,
                limit=tokens + draw.randint(0, 40) if when == "limit" else None,
                block=draw.randint(4, 40) if when == "block" else None,
                query_heads=draw.choice(["sum", "mean", "max"]),
                shared=draw.random() < 0.3,
                positions=draw.choice(["original", "original", "renumbered"]),
                seed=draw.randint(0, 3),
                fit=fit if scorer.of_prompt and draw.random() < 0.5 else None,
            )
        except RecipeError:
            continue


def _recall(draw: Random) -> Recall | None:
    """Return which tokens a step reads; None: all."""
    if draw.random() < 0.5:
        return None
    index = draw.choice(
        [
            Clusters(draw.choice([4, 8]), 16, draw.randint(1, 4)), TopK(),
            Pages(draw.choice([1, 4, 16])), PartialKeys(draw.choice([0.3, 1.0]), 16),
        ]
    )  # fmt: skip
    tier = draw.choice([None, "host", "file"])
    return Recall(
        index, draw.randint(20, 80), draw.choice([*HEAD_CHOICES]), draw.randint(0, 1),
        None if tier is None or index.reads_keys else Tier(tier, steps=draw.randint(0, 2)),
    )  # fmt: skip


def _renumbers(recipe: Recipe) -> bool:
    return recipe.keep is not None and recipe.keep.positions != "original"


def simpler(case: Case) -> Iterator[Case]:
    """Yield cases that differ from a case in one simpler part, to shrink one that fails."""
    operations, recipe = case.operations, case.recipe
    for i in range(len(operations) - 1, 0, -1):
        yield replace(case, operations=operations[:i] + operations[i + 1 :])
    for i, (name, *arguments) in enumerate(operations):
        if name == "step" and arguments[0] > 1:
            for tokens in (1, arguments[0] // 2, arguments[0] - 1):
                step = ("step", tokens)
                yield replace(case, operations=(*operations[:i], step, *operations[i + 1 :]))
    plain = {"layers": 1, "heads": (2, 1), "dim": 16, "dtype": "fp32", "alibi": False}
    for name, value in {**plain, "softcap": None}.items():
        if getattr(case, name) != value:
            yield replace(case, **{name: value})
    for pads in ((0,) * len(case.pads), case.pads[:1], case.pads[1:]):
        if pads and pads != case.pads:
            yield replace(case, pads=pads)
    store, protect = recipe.store, recipe.protect
    for part in (
        {"keep": None}, {"recall": None}, {"layers": ()}, {"compress_after": 0},
        {"store": replace(store, keys=None)}, {"store": replace(store, values=None)},
        {"protect": replace(protect, sinks=0)}, {"protect": replace(protect, exact_recent=0)},
        {"protect": replace(protect, outliers=None)}, {"protect": replace(protect, spans=None)},
        {"keep": recipe.keep and replace(recipe.keep, fit=None)},
    ):  # fmt: skip
        with suppress(RecipeError):
            changed = replace(recipe, **part)
            if changed != recipe:
                yield replace(case, recipe=changed)


# --- what is checked ---------------------------------------------------------------------------


def run(case: Case) -> None:
    """Apply the operations of a case; raises `AssertionError` where something is wrong."""
    sequence = Sequence(case)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")
        for operation in (*case.operations, ("step", 1)):
            try:
                sequence.apply(*operation)
            except RecipeError:  # a first prompt that is too short for unequal budgets
                done = any(layer.cache._state.prompt_done for layer in sequence.layers)
                assert not done or sequence.cache.guard.unusable
                return


class Sequence:
    """The layers of a cache, and the padding of its rows."""

    def __init__(self, case: Case) -> None:
        self.case, self.pads = case, torch.tensor(case.pads)
        self.draw = torch.Generator().manual_seed(case.seed)
        self.findings = Findings()
        self.cache = self._empty()

    @property
    def layers(self) -> list[CheckedLayer]:
        """The checked layers."""
        return self.cache.layers

    @property
    def seen(self) -> int:
        """The tokens that every layer has seen."""
        (seen,) = {layer.get_seq_length() for layer in self.layers}
        return seen

    @property
    def waits(self) -> bool:
        """Whether layers evict only when all of a prompt has been scored."""
        evictors = [layer.cache._state.evictor for layer in self.layers]
        return any(evictor is not None and evictor.defers for evictor in evictors)

    def apply(self, name: str, *arguments: Any) -> None:
        """Apply an operation, and check what it leaves."""
        getattr(self, f"_{name.replace(' ', '_')}")(*arguments)
        findings, eps = self.findings, torch.finfo(DTYPES[self.case.dtype]).eps
        assert not findings.wrong, findings.wrong
        assert findings.attention <= max(ATTENTION, 2 * eps * (eps > 1e-6)), findings
        assert findings.stored <= STORED, findings

    def _built(self) -> list[LayerCache]:
        """Return new layers of the recipe."""
        case, layers = self.case, range(self.case.layers)
        facts = []
        for layer in layers:
            formats = case.recipe.for_layer(layer, layers).store.quantized
            known = {
                side: kv_views.known(fmt, case.heads[1], case.dim, layer)
                for side, fmt in formats.items()
                if fmt.calibrated
            }
            facts.append(LayerFacts(known.get("keys"), known.get("values"), case.rope))
        return build_layers(case.recipe, layers, facts, [case.rope] * case.layers)

    def _empty(self) -> RoutedCache:
        """Return a new cache of checked layers."""
        built = self._built()
        for layer in built:
            layer.observe()
        checked = [CheckedLayer(layer, self.findings, self.case.rope) for layer in built]
        return RoutedCache(checked, ())

    def _inputs(self, tokens: int, repeated: slice | None = None) -> list[StepInputs]:
        """Return random inputs of each layer for the next tokens; repeated: those of the prompt."""
        case, rows = self.case, len(self.pads)
        hq, hk = case.heads
        visible = alibi = None
        if self.pads.any():
            visible = torch.arange(self.seen + tokens) >= self.pads[:, None]
            if repeated is not None:  # padding goes last
                new = visible[:, repeated].sort(dim=1, descending=True).values
                visible = torch.cat([visible[:, : self.seen], new], dim=1)
        if case.alibi:
            where = positions(visible, rows, self.seen + tokens, torch.device("cpu"))
            alibi = Alibi(SLOPES[:hq], where)
        visible = None if visible is None else visible[:, None]
        inputs = []
        for _ in range(case.layers):
            q, k, v = (
                torch.randn(rows, h, tokens, case.dim, generator=self.draw).to(DTYPES[case.dtype])
                for h in (hq, hk, hk)
            )
            norms = None
            if case.recipe.uses_input_norms:
                norms = torch.rand(rows, tokens, generator=self.draw) + 0.5
            queries = Queries(q, case.dim**-0.5, visible, case.softcap, alibi, norms=norms)
            inputs.append(StepInputs(queries, k, v))
        return inputs

    def _run(self, inputs: list[StepInputs], checked: bool = True) -> list[Tensor]:
        """Run a step of all layers, or of none; return their outputs."""
        repeats = not self.seen and any(layer.cache.repetition for layer in self.layers)
        keep, tokens = self.case.recipe.keep, inputs[0].tokens
        with self.cache.step():
            if not self.seen and keep is not None and keep.needs_examples(tokens):
                for layer in self.layers:
                    layer.predictor = layer.cache.fit_predictor(self._examples())
            outs = self._attend(inputs, checked)
            if repeats:
                self._repeat_prompt(inputs[0].tokens, checked)
        return outs

    def _examples(self) -> Examples:
        """Return random examples, of which some rows have fewer."""
        case, rows, count = self.case, len(self.pads), 16
        hq, hk = case.heads
        q, k, *repeated = (
            torch.randn(rows, h, count, case.dim, generator=self.draw).to(DTYPES[case.dtype])
            for h in (hq, hk, hq, hq)
        )
        distances = [torch.full((rows, 1), x) for x in (count, 3 * count)]
        real = torch.arange(count) < count - self.pads[:, None]
        return Examples(q, k, repeated, distances, torch.zeros(rows, 1, dtype=torch.long), real)

    def _attend(self, inputs: list[StepInputs], checked: bool) -> list[Tensor]:
        """Return the outputs of all layers."""
        outs = []
        for layer, step in zip(self.layers, inputs, strict=True):
            layer.update(step.k, step.v)
            if checked:
                outs.append(layer.attend(step))
            else:
                outs.append(super(CheckedLayer, layer).attend(step))
                if layer.repeated is None:
                    layer.give(step.k, step.v)
        return outs

    def _repeat_prompt(self, tokens: int, checked: bool) -> None:
        """Let the layers score a prompt as `Repetition` does, by random chunks; they then evict."""
        keep = self.case.recipe.keep
        assert keep is not None
        assert isinstance(keep.scorer, Reconstruction)
        needed = keep.budget.resolve(tokens) < tokens
        ends = [*range(0, tokens, keep.scorer.chunk), tokens] if needed else []
        try:
            for lo, hi in pairwise(ends):
                part = slice(max(0, lo - 8), hi)
                inputs = self._inputs(hi - part.start, part)
                for layer in self.layers:
                    layer.repeated = lo, hi
                self._attend(inputs, checked)
        finally:
            for layer in self.layers:
                layer.repeated = None
        for layer in self.layers:
            layer.cache.end_repetition()

    def _step(self, tokens: int) -> None:
        inputs, first = self._inputs(tokens), not self.seen
        self._run(inputs)
        if first and "variance" not in str(self.case.recipe) and not self.pads.any():
            self._check_bytes(inputs)

    def _check_bytes(self, prompt: list[StepInputs]) -> None:
        """Compare the bytes of a prompt in layers that record no decisions with the predicted."""
        case, plain = self.case, self._built()
        for layer, step in zip(plain, prompt, strict=True):
            layer.run(step)
        for layer in plain:
            layer.end_repetition()
        nbytes = sum(layer.nbytes for layer in plain)
        expected = case.recipe.nbytes(prompt[0].tokens, case.geometry, batch=len(self.pads))
        assert nbytes == expected, f"{nbytes} bytes, {expected} predicted"

    def _first_draft(self, prompt: int, tokens: int, rejected: int) -> None:
        """Compare a first step of a prompt and a draft with one of the accepted tokens.

        Layers that decide together evict from all of these as one prompt, others from the prompt.
        """
        twin, inputs, rejected = self._twin(), self._inputs(prompt + tokens), min(rejected, tokens)
        waits = self.waits
        accepted = prompt + tokens - rejected
        for layer in self.layers:
            layer.activate_past_recording()
            layer.cache.accepted_tokens = prompt
        outs = self._run(inputs, checked=False)
        self._end_draft(rejected)
        for layer in self.layers:
            layer.cache.accepted_tokens = 0
        keep = self.case.recipe.keep
        if keep is not None and (keep.scorer.repeats or keep.needs_examples(prompt + tokens)):
            return  # they are drawn for all tokens of the step
        ends = [0, accepted] if waits else [0, *range(prompt, accepted + 1)]
        for lo, hi in pairwise(ends):
            parts = [step.slice(lo, hi) for step in inputs]
            for out, expected in zip(outs, twin._run(parts, checked=False), strict=True):
                if not waits:
                    self._compare(out[:, :, lo:hi], expected)
        self._compare_layers(twin)

    def _draft(self, tokens: int, rejected: int) -> None:
        """Compare a draft with its accepted tokens, one by one, in a copy."""
        if not self.seen:
            return
        rejected = min(rejected, tokens)
        waits = self.waits
        twin = self._twin()
        inputs = self._inputs(tokens)
        for layer in self.layers:
            layer.activate_past_recording()
        outs = self._run(inputs, checked=False)
        self._end_draft(rejected)
        for number in range(tokens - rejected):
            each = [step.slice(number, number + 1) for step in inputs]
            for out, expected in zip(outs, twin._run(each, checked=False), strict=True):
                if not waits:  # until the crop, where layers decide together
                    self._compare(out[:, :, number : number + 1], expected)
        if not waits:
            self._compare_layers(twin)

    def _wait(self, tokens: int) -> None:
        """Compare tokens that wait, one by one, with a step of all of them in a copy."""
        twin, inputs, rows = self._twin(), self._inputs(tokens), len(self.pads)
        layers = [layer.cache for layer in self.layers]
        traces = [layer._state.trace for layer in layers]
        for layer in layers:
            layer._state.trace = None
        may_wait = self.seen and all(layer.may_wait for layer in layers)
        if may_wait and not self.case.alibi and (self.pads <= self.seen).all():
            shown = inputs[0].queries.visible
            shown = None if shown is None else shown[:, :, : self.seen]
            waiting = WaitingTokens(tokens, rows, torch.device("cpu"), shown)
            outs = [
                attend_one_by_one(layer, waiting, x)
                for layer, x in zip(layers, inputs, strict=True)
            ]
            for layer in layers:
                layer.commit_waiting(waiting, tokens)
            for out, expected in zip(outs, twin._run(inputs, checked=False), strict=True):
                self._compare(out, expected)
            for layer, step in zip(self.layers, inputs, strict=True):
                layer.give(step.k, step.v)
            self._compare_layers(twin)
        for layer, trace in zip(layers, traces, strict=True):
            layer._state.trace = trace

    def _end_draft(self, rejected: int) -> None:
        """Remove tokens of a draft, and record no more."""
        self.cache.crop(-rejected)
        for layer in self.layers:
            layer.cache.recording = False

    def _crop(self, tokens: int) -> None:
        """Remove tokens without a draft, or be refused before anything changes."""
        before, seen = self._twin(), self.seen
        try:
            self.cache.crop(-tokens)
        except CacheMisuse:
            self._compare_layers(before)
            return
        assert self.seen == max(0, seen - tokens)

    def _reorder(self, rows: tuple[int, ...]) -> None:
        self.cache.reorder_cache(torch.tensor(rows))
        self.pads = self.pads[list(rows)]

    def _repeat(self, times: int) -> None:
        self.cache.batch_repeat_interleave(times)
        self.pads = self.pads.repeat_interleave(times)

    def _select(self, rows: tuple[int, ...]) -> None:
        self.cache.batch_select_indices(torch.tensor(rows))
        self.pads = self.pads[list(rows)]

    def _save(self) -> None:
        """Continue with layers that were loaded from what these would save."""
        former, self.cache = self.layers, self._empty()
        for number, (new, old) in enumerate(zip(self.layers, former, strict=True)):
            tensors: dict[str, Tensor] = {}
            state = json.loads(json.dumps(flat(old.cache.state(), str(number), tensors)))
            device = torch.device("cpu")
            new.cache.load_state(nested(state, str(number), tensors.__getitem__, device))
            new.keys, new.values, new.padding = old.keys, old.values, old.padding
            new.fits = old.fits

    def _copy(self) -> None:
        """Continue with a copy, and give the original other tokens."""
        former, self.cache = self.cache, copy.deepcopy(self.cache)
        for layer in self.layers:
            layer.findings = self.findings
        copied, self.cache = self.cache, former
        self._run(self._inputs(3), checked=False)
        self.cache = copied

    def _reset(self) -> None:
        self.cache.reset()
        assert self.cache.nbytes == 0
        self.pads = torch.zeros_like(self.pads)

    def _not_finite(self, tokens: int) -> None:
        """Give a NaN, which is refused, where it is no padding."""
        before, inputs = self._twin(), self._inputs(tokens)
        if (self.pads >= self.seen + tokens).all():
            return
        inputs[-1].k[:, 0, -1, 3] = torch.nan
        try:
            self._run(inputs)
        except NotFinite:
            self._compare_layers(before)
            return
        raise AssertionError("a NaN was stored")

    def _interrupt(self, tokens: int, number: int) -> None:
        """Stop a step at a torch operation, if it has so many."""
        before, inputs = self._twin(), self._inputs(tokens)
        try:
            with StopAt(number):
                self._run(inputs, checked=False)
        except Stop:
            self._compare_layers(before)

    def _twin(self) -> Sequence:
        """Return a copy whose findings do not count."""
        twin = copy.copy(self)
        twin.cache, twin.findings = copy.deepcopy(self.cache), Findings()
        return twin

    def _compare(self, out: Tensor, expected: Tensor) -> None:
        """Assert that two outputs differ by rounding alone, except for those of padding."""
        eps = torch.finfo(out.dtype).eps
        size = max(1.0, float(expected.float().abs().max()))
        off = float((out.float() - expected.float()).abs().max())
        assert off <= 16 * eps * size, f"outputs differ by {off:.1e}"

    def _compare_layers(self, other: Sequence) -> None:
        """Assert that the layers have seen and hold as many tokens as those of another cache."""
        for layer, twin in zip(self.layers, other.layers, strict=True):
            a, b = layer.cache, twin.cache
            assert (a.seen, a.dropped) == (b.seen, b.dropped)
            if a.seen:
                assert torch.equal(_ordered(a.logical()), _ordered(b.logical()))


def attend_one_by_one(layer: LayerCache, waiting: WaitingTokens, step: StepInputs) -> Tensor:
    """Let the tokens of a step wait, one by one; return their outputs [B, Hq, T, D]."""
    outs = []
    layer.reserve(waiting.room)
    for number, one in enumerate(step.one_by_one()):
        waiting.slot.fill_(number)
        waiting.begin_step()
        queries = one.queries._replace(visible=None)
        outs.append(layer.attend_waiting(one._replace(queries=queries), waiting))
    return torch.cat(outs, dim=2)


def _ordered(index: Tensor) -> Tensor:
    return index.sort(dim=-1).values
