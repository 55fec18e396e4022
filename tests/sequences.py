"""Random sequences of all that can happen to a cache, under any recipe, checked in float64.

`cases` draws a recipe, a batch and a list of operations. `run` applies them to the layers of a
cache, without a model. After each operation it compares:

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
from dataclasses import dataclass, replace
from typing import Any

import torch
from hypothesis import assume
from hypothesis import strategies as st
from torch import Tensor

from held import CheckedLayer, Findings
from kvloom.cache.build import build_layers
from kvloom.cache.layer import LayerCache
from kvloom.cache.step import Queries, StepInputs
from kvloom.errors import CacheMisuse, IncompatibleRecipe, NotFinite, RecipeError
from kvloom.hf.routed import RoutedCache
from kvloom.hf.save import flat, nested
from kvloom.keep import SCORERS, Budget, Keep, Outliers
from kvloom.positions.rope import Rope
from kvloom.recall import Clusters, Pages, PartialKeys, Recall, Tier, TopK
from kvloom.recipe import LayerOverride, Protect, Recipe
from kvloom.recipe.geometry import Geometry
from kvloom.store import LayerFacts, Packed, Store
from stopping import Stop, StopAt

ATTENTION = 2.0**-22  # four rounding errors of fp32, over the size that `held.Findings` names
STORED = 1e-6
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
Operation = tuple[Any, ...]


@dataclass(frozen=True)
class Case:
    """A recipe, the shape of a cache, and what happens to it.

    pads: the padded slots before each row. Operations: ("step", tokens), ("draft", tokens,
    rejected), ("crop", tokens), ("reorder", rows), ("repeat", times), ("select", rows), ("save",),
    ("copy",), ("reset",), ("not finite", tokens), ("interrupt", tokens, number): the step stops at
    this torch operation.
    """

    recipe: Recipe
    layers: int
    heads: tuple[int, int]
    dim: int
    dtype: str
    pads: tuple[int, ...]
    operations: tuple[Operation, ...]
    seed: int = 0

    @property
    def rope(self) -> Rope:
        """A rotary embedding of all channels."""
        return Rope(1e4 ** -(torch.arange(0, self.dim, 2).float() / self.dim))

    @property
    def geometry(self) -> Geometry:
        """The model whose layers these are."""
        return Geometry(self.layers, *self.heads, self.dim, DTYPES[self.dtype])


# --- what is drawn -------------------------------------------------------------------------------

_some = st.integers


def _sides(dim: int) -> st.SearchStrategy[Packed | None]:
    """Formats of keys or values, None for exact ones; some are refused."""
    return st.none() | st.builds(
        _packed,
        bits=st.sampled_from([1, 1.5, 2, 3, 4, 8]),
        axis=st.sampled_from(["channel", "token"]),
        group=st.sampled_from([16, dim, 0]),
        meta=st.sampled_from(["fp32", "fp16", "bf16", "fp8"]),
        rotation=st.sampled_from(["none", "none", "group", "head"]),
        span=st.sampled_from(["head", "head", "layer"]),
        clip=st.sampled_from([1.0, 1.0, 0.9]),
        pre_rope=st.sampled_from([False, False, True]),
        blocks=_some(1, 3),
        unit=st.booleans(),
    )


def _packed(axis: str, group: int, blocks: int, unit: bool, **options: Any) -> Packed | None:
    """Return a format whose residual is whole blocks; None if it is refused."""
    block = group if axis == "channel" else 1 + 4 * (blocks - 1)
    residual = blocks * group if axis == "channel" else block
    try:
        return Packed(
            axis=axis, group=group, residual=residual, unit=block if unit else None, **options
        )
    except RecipeError:
        return None


@st.composite
def _keeps(draw: Any) -> Keep | None:
    """Which tokens stay; None: all, or the keep is refused."""
    kind = draw(st.none() | st.sampled_from([k for k, s in SCORERS.items() if not s.repeats]))
    if kind is None:
        return None
    tokens = draw(_some(8, 60))
    share = draw(st.none() | st.sampled_from([0.0, 0.2, 0.5, 1.0]))
    policies = [
        "uniform",
        "uniform",
        "pyramid",
        "pyramidkv",
        "variance",
        "inverse-variance",
        "joint",
    ]
    when = draw(st.sampled_from(["step", "prompt", "prompt", "limit", "block"]))
    fraction = when == "block" or draw(st.booleans())
    try:
        budget = Budget(
            None if fraction else tokens,
            tokens / 80 if fraction else None,
            draw(_some(0, min(8, tokens)) | st.sampled_from([0.0, 0.3, 1.0])),
            draw(st.sampled_from(policies)),
            head_share=share if when in ("prompt", "block") else None,
        )
        return Keep(
            budget,
            SCORERS[kind](),
            when=when,
            limit=tokens + draw(_some(0, 40)) if when == "limit" else None,
            block=draw(_some(4, 40)) if when == "block" else None,
            query_heads=draw(st.sampled_from(["sum", "mean", "max"])),
            shared=draw(st.booleans()) and share is None,
            positions=draw(st.sampled_from(["original", "original", "renumbered"])),
            seed=draw(_some(0, 3)),
        )
    except (RecipeError, TypeError):
        return None


@st.composite
def _recalls(draw: Any) -> Recall | None:
    """Which tokens a step reads; None: all."""
    index = draw(
        st.none()
        | st.builds(Clusters, st.sampled_from([4, 8]), st.just(16), _some(1, 4))
        | st.builds(Pages, st.sampled_from([1, 4, 16]))
        | st.just(TopK())
        | st.builds(PartialKeys, st.sampled_from([0.3, 1.0]), st.sampled_from([1, 16]))
    )
    if index is None:
        return None
    tier = draw(st.none() | st.builds(Tier, st.sampled_from(["host", "file"]), steps=_some(0, 2)))
    group = draw(st.sampled_from(["mean", "max", "turns", "each"]))
    tier = None if index.reads_keys else tier
    return Recall(index, draw(_some(20, 80)), group, full_layers=draw(_some(0, 1)), tier=tier)


@st.composite
def recipes(draw: Any, geometry: Geometry) -> Recipe:
    """Any recipe that a model of this geometry takes, without calibration and repeated prompts."""
    sides, keep, recall = _sides(geometry.head_dim), draw(_keeps()), draw(_recalls())
    keys, values = draw(sides), draw(sides)
    if values is not None:
        values = replace(values, pre_rope=False)
    sinks, recent = draw(_some(0, 5)), draw(_some(0, 9) | st.tuples(_some(0, 9), _some(0, 9)))
    outliers = draw(st.none() | st.builds(Outliers, _some(1, 20)))
    start = draw(st.sampled_from([0, 0, 0, 30]))
    spans = draw(st.none() | st.tuples(st.tuples(_some(0, 9), _some(10, 20))))
    other = draw(st.none() | st.sampled_from(["0", "last 1"]))
    # parts that do not combine are left out, one after the other
    options: dict[str, Any] = {
        "store": Store(keys, values), "keep": keep, "recall": recall, "start": start,
        "protect": Protect(sinks, recent, outliers, spans=spans),
        "layers": () if other is None else (LayerOverride(other, store=Store(values=values)),),
    }  # fmt: skip
    for without in (
        {}, {"layers": ()}, {"protect": Protect(sinks, recent)}, {"start": 0}, {"recall": None},
        {"store": Store()}, {"keep": None},
    ):  # fmt: skip
        options |= without
        try:
            recipe = Recipe(**options)
            recipe.check(geometry)
            return recipe
        except (RecipeError, IncompatibleRecipe):
            continue
    assume(False)
    raise AssertionError


_steps = st.one_of(st.just(1), st.just(1), _some(2, 9), _some(10, 70)).map(lambda t: ("step", t))


@st.composite
def _operations(draw: Any, rows: int) -> tuple[Operation, ...]:
    """A prompt, and up to 7 operations after it."""
    operations: list[Operation] = [("step", draw(_some(1, 120)))]
    for _ in range(draw(_some(0, 7))):
        row = _some(0, rows - 1)
        operation = draw(
            st.one_of(
                _steps,
                _steps,
                _steps,
                st.tuples(st.just("draft"), _some(1, 9), _some(0, 9)),
                st.tuples(st.just("crop"), _some(0, 5)),
                st.tuples(st.just("reorder"), st.tuples(*[row] * rows)),
                st.tuples(st.just("repeat"), _some(1, 2 if rows <= 3 else 1)),
                st.tuples(st.just("select"), st.lists(row, min_size=1, max_size=rows).map(tuple)),
                st.tuples(st.sampled_from(["save", "copy", "copy", "reset"])),
                st.tuples(st.just("not finite"), _some(1, 9)),
                st.tuples(st.just("interrupt"), st.sampled_from([1, 1, 7, 30]), _some(0, 400)),
            )
        )
        if operation[0] == "repeat":
            rows *= operation[1]
        if operation[0] == "select":
            rows = len(operation[1])
        operations.append(operation)
    return tuple(operations)


@st.composite
def cases(draw: Any) -> Case:
    """Any case."""
    layers = draw(_some(1, 3))
    heads = draw(st.sampled_from([(2, 1), (4, 2), (2, 2), (4, 1)]))
    dim = draw(st.sampled_from([16, 32]))
    dtype = draw(st.sampled_from(["fp32", "fp32", "fp32", "bf16", "fp16"]))
    recipe = draw(recipes(Geometry(layers, *heads, dim, DTYPES[dtype])))
    rows = draw(_some(1, 3))
    operations = draw(_operations(rows))
    pad = st.just(0) | _some(0, operations[0][1] - 1)
    pads = tuple(draw(pad) for _ in range(rows))
    if _renumbers(recipe):  # tools/held.py counts no positions of padded rows, nor rounds angles
        pads, dtype = (0,) * rows, "fp32"
    return Case(recipe, layers, heads, dim, dtype, pads, operations, draw(_some(0, 999)))


def _renumbers(recipe: Recipe) -> bool:
    keeps = [recipe.keep, *(part.keep for part in recipe.layers)]
    return any(getattr(keep, "positions", "original") != "original" for keep in keeps)


# --- what is checked -----------------------------------------------------------------------------


def run(case: Case) -> None:
    """Apply the operations of a case; raises `AssertionError` where something is wrong."""
    sequence = Sequence(case)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")
        for operation in (*case.operations, ("step", 1)):
            try:
                sequence.apply(*operation)
            except RecipeError:  # a first prompt that is too short for a pyramid of budgets
                assert not sequence.seen
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

    def apply(self, name: str, *arguments: Any) -> None:
        """Apply an operation, and check what it leaves."""
        getattr(self, f"_{name.replace(' ', '_')}")(*arguments)
        findings, eps = self.findings, torch.finfo(DTYPES[self.case.dtype]).eps
        assert not findings.wrong, findings.wrong
        assert findings.attention <= max(ATTENTION, 2 * eps * (eps > 1e-6)), findings
        assert findings.stored <= STORED, findings

    def _built(self) -> list[LayerCache]:
        """Return new layers of the recipe."""
        case = self.case
        facts = [LayerFacts(rope=case.rope)] * case.layers
        return build_layers(case.recipe, range(case.layers), facts, [case.rope] * case.layers)

    def _empty(self) -> RoutedCache:
        """Return a new cache of checked layers."""
        built = self._built()
        for layer in built:
            layer.observe()
        checked = [CheckedLayer(layer, self.findings, self.case.rope) for layer in built]
        return RoutedCache(checked, ())

    def _inputs(self, tokens: int) -> list[StepInputs]:
        """Return random inputs of each layer for the next tokens."""
        case, rows = self.case, len(self.pads)
        hq, hk = case.heads
        visible = None
        if self.pads.any():
            visible = torch.arange(self.seen + tokens) >= self.pads[:, None]
            visible = visible[:, None]
        inputs = []
        for _ in range(case.layers):
            q, k, v = (
                torch.randn(rows, h, tokens, case.dim, generator=self.draw).to(DTYPES[case.dtype])
                for h in (hq, hk, hk)
            )
            norms = None
            if case.recipe.uses_input_norms:
                norms = torch.rand(rows, tokens, generator=self.draw) + 0.5
            queries = Queries(q, case.dim**-0.5, visible, norms=norms)
            inputs.append(StepInputs(queries, k, v))
        return inputs

    def _run(self, inputs: list[StepInputs], checked: bool = True) -> list[Tensor]:
        """Run a step of all layers, or of none; return their outputs."""
        outs = []
        with self.cache.step():
            for layer, step in zip(self.layers, inputs, strict=True):
                layer.update(step.k, step.v)
                if checked:
                    outs.append(layer.attend(step))
                else:
                    outs.append(super(CheckedLayer, layer).attend(step))
                    layer.give(step.k, step.v)
        return outs

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
        nbytes = sum(layer.nbytes for layer in plain)
        expected = case.recipe.nbytes(prompt[0].tokens, case.geometry, batch=len(self.pads))
        assert nbytes == expected, f"{nbytes} bytes, {expected} predicted"

    def _draft(self, tokens: int, rejected: int) -> None:
        """Compare a draft with its accepted tokens, one by one, in a copy."""
        if not self.seen:
            return
        rejected = min(rejected, tokens)
        evictors = [layer.cache._state.evictor for layer in self.layers]
        waits = any(evictor is not None and evictor.defers for evictor in evictors)
        twin = self._twin()
        inputs = self._inputs(tokens)
        for layer in self.layers:
            layer.activate_past_recording()
        outs = self._run(inputs, checked=False)
        self.cache.crop(-rejected)
        for layer in self.layers:
            layer.cache.recording = False
        for number in range(tokens - rejected):
            each = [step.slice(number, number + 1) for step in inputs]
            for out, expected in zip(outs, twin._run(each, checked=False), strict=True):
                if not waits:  # until the crop, where layers decide together
                    self._compare(out[:, :, number : number + 1], expected)
        if not waits:
            self._compare_layers(twin)

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
        """Give a NaN, which is refused."""
        before, inputs = self._twin(), self._inputs(tokens)
        step = inputs[-1]
        step.k[0, 0, -1, 3] = torch.nan
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


def _ordered(index: Tensor) -> Tensor:
    return index.sort(dim=-1).values
