"""This machine: what is measured of it once, and the time of a decode step that follows from it.

A layer's step takes a fixed time, a time per row, and its bytes divided by the throughput of its
kernels. The model around it takes a time per step, a time per layer, and the time of its products
with weights at this batch. They add up, because a CPU waits for each operation.

`complete` times reads of memory, products with weights at several batches, decode steps of two
small Llamas (their difference is the overhead of a layer), and one layer's decode step for each
kind of layer that a plan asks about. Data is random: speed does not depend on it. Weights and
caches are larger than the processor's caches near its cores, as those of a model are. Compilation
of kernels is not timed.
"""

from __future__ import annotations

import copy
import json
import os
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kvloom import Cache
from kvloom.cache import fill, read_nbytes
from kvloom.errors import InputError, RecipeError
from kvloom.progress import Progress
from kvloom.recipe import Geometry, Recipe, resolve

from ..models import random_llama
from ..workload import clock
from ..workload.files import cache_folder, write_whole
from ..workload.layers import LayerShape, ModelShape, empty_layers, random_qkv
from ..workload.machine import versions
from ..workload.passes import available_bytes
from .hardware import PRESETS
from .step import LayerWork, StepTime, StepWork
from .units import Range

TOLERANCE = 0.2
"""The bounds of a time: the mark that docs/guides/plan.md checks, not a measured interval."""


@dataclass(frozen=True)
class LayerRate:
    """Seconds of one layer's decode step: fixed + row * rows + bytes / bytes_s."""

    fixed_s: float
    row_s: float
    bytes_s: float


@dataclass(frozen=True)
class Machine:
    """Measurements of this machine.

    about: processor, threads and versions. memory: bytes. bandwidth: bytes per second. linear:
    seconds per byte of weights in products, by dtype and batch. overhead: (seconds per step,
    seconds per layer) of the model around the cache, by dtype. layers: by `layer_key`.
    """

    about: dict[str, Any]
    memory: int
    bandwidth: float
    linear: dict[str, dict[int, float]] = field(default_factory=dict)
    overhead: dict[str, tuple[float, float]] = field(default_factory=dict)
    layers: dict[str, LayerRate] = field(default_factory=dict)

    name = "this"

    def problem(self, work: StepWork) -> str | None:
        """Return why a step's time cannot be estimated; None if it can."""
        if work.quantized:
            return f"products with weights quantized by {work.quantized} are not measured"
        return None

    def step(self, work: StepWork) -> StepTime:
        """Return the seconds of a decode step; everything it needs must have been measured."""
        dtype = dtype_name(work.geometry.dtype)
        curve = self.linear[dtype]
        per_step, per_layer = self.overhead[dtype]
        reading = work.weights.scaled(at_batch(curve, 1))
        products = work.weights.scaled(at_batch(curve, work.batch))
        kv, fixed = 0.0, per_step + per_layer * work.layer_count
        for layer in work.layers:
            rate = self.layers[layer_key(layer, work.geometry)]
            kv += layer.layers * layer.nbytes / rate.bytes_s
            fixed += layer.layers * (rate.fixed_s + rate.row_s * work.batch)
        return StepTime(
            _widened(reading.low, reading.best, reading.high),
            _widened(kv, kv, kv),
            _widened(*vars(products.above(reading)).values()),
            _widened(fixed, fixed, fixed),
        )

    def describe(self) -> str:
        """Return the processor and its rates in one line."""
        threads = self.about["threads"]
        return (
            f"this machine ({self.about['cpu']}, {threads} thread{'s' * (threads > 1)}, "
            f"{self.memory / 2**30:,.0f} GiB, {self.bandwidth / 1e9:,.0f} GB/s)"
        )

    def notes(self) -> list[str]:
        """Return what a reader of its times has to know."""
        return [
            "Times are predicted from short measurements of this machine. In the comparison of the "
            "guide, 45 of 54 predictions are within 20% of the measured step."
        ]

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain data."""
        return {"name": self.name, **asdict(self)}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Machine:
        """Build from `to_dict`'s data."""
        return cls(
            data["about"],
            data["memory"],
            data["bandwidth"],
            {k: {int(b): s for b, s in v.items()} for k, v in data["linear"].items()},
            {k: (v[0], v[1]) for k, v in data["overhead"].items()},
            {k: LayerRate(**v) for k, v in data["layers"].items()},
        )


def about() -> dict[str, object]:
    """Return what measurements depend on: processor, threads, versions, kernels."""
    return {**versions(), "kernels": os.environ.get("KVLOOM_KERNELS", "auto")}


def dtype_name(dtype: torch.dtype) -> str:
    """Return "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def at_batch(curve: dict[int, float], batch: int) -> float:
    """Return the seconds per byte at a batch, on straight lines through the measured batches."""
    batches = sorted(curve)
    above = next((i for i, b in enumerate(batches) if b >= batch), len(batches) - 1)
    low, high = batches[max(0, above - 1)], batches[above]
    if low == high:
        return curve[high]
    slope = (curve[high] - curve[low]) / (high - low)
    return curve[low] + slope * (batch - low)


def measured_recipe(recipe: Recipe, tokens: int) -> Recipe:
    """Return the plain recipe that is measured in place of another, at `tokens` tokens.

    A budget of tokens to keep changes the bytes alone, so half of the tokens are kept; `start` and
    the first layers that recall leaves out do not matter to a layer.
    """
    recipe = replace(recipe, compress_after=0, name="measured")
    if recipe.keep is None:
        return recipe
    try:
        return replace(recipe, keep=replace(recipe.keep, shared=False)).with_budget(tokens // 2)
    except RecipeError:  # its window is larger than that
        return recipe


def layer_key(layer: LayerWork, g: Geometry) -> str:
    """Return what a layer's speed depends on, as text: recipe without its budget, heads, dtype."""
    shape = f"{g.q_heads}/{g.kv_heads}x{g.head_dim} {dtype_name(g.dtype)}"
    if layer.kind is None:
        return f"{shape} {{}}"
    data = layer.kind.recipe.to_dict()
    data.pop("name"), data.pop("compress_after", None)
    if keep := data.get("keep"):
        keep.pop("budget", None), keep.pop("seed", None), keep.pop("limit", None)
    text = "{}" if _acts_as_full(layer.kind.recipe) else json.dumps(data, sort_keys=True)
    return f"{shape} {text}"


def _acts_as_full(recipe: Recipe) -> bool:
    """Return whether a layer with this plain recipe does what one with `full` does."""
    parts = recipe.keep, recipe.recall, recipe.protect.outliers
    return recipe.store.exact and parts == (None, None, None) and not recipe.protect.sinks


def unmeasured(machine: Machine, works: Iterable[StepWork], g: Geometry) -> dict[str, LayerWork]:
    """Return the kinds of layers without a rate, by key."""
    layers = {layer_key(layer, g): layer for work in works for layer in work.layers}
    return {key: layer for key, layer in layers.items() if key not in machine.layers}


def _widened(low: float, best: float, high: float) -> Range:
    """Return a range widened by the tolerance."""
    return Range(low * (1 - TOLERANCE), best, high * (1 + TOLERANCE))


_FILE_FORMAT = 1


def machine_path() -> Path:
    """Return the file with the measurements."""
    return cache_folder() / "hardware.json"


def load_machine() -> Machine | None:
    """Return what was measured of this machine before; None if nothing fits."""
    try:
        data = json.loads(machine_path().read_text(encoding="utf-8"))
        if data["format"] == _FILE_FORMAT and data["about"] == about():
            return Machine.from_dict(data)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError):
        pass
    return None


def save_machine(machine: Machine) -> None:
    """Write the measurements, completely or not at all. Raises `InputError`."""
    data = {"format": _FILE_FORMAT, **machine.to_dict()}
    target = machine_path()
    try:
        write_whole(target, json.dumps(data, indent=2) + "\n")
    except OSError as error:
        raise InputError(
            f"measurements cannot be written to {target}: {error.strerror}; set XDG_CACHE_HOME to "
            "a folder that can be written"
        ) from error


_BATCHES = (1, 2, 4, 8, 16)  # of products with weights
_POINTS = ((512, 1), (512, 4), (8192, 1), (8192, 4))  # tokens and rows of a layer's step
_MATRICES = (
    (1280, 1280),
    (320, 1280),
    (320, 1280),
    (1280, 1280),
    (3456, 1280),
    (3456, 1280),
    (1280, 3456),
)  # of a layer: rows and columns
_WEIGHTS = 1 << 27  # bytes of all matrices
_CACHES = 1 << 26  # bytes of the caches of all layers, at least
_MOST_LAYERS = 16
_SECONDS = 0.25  # of each point; twice as long for each model
_REPEATS = 5  # at least
_SMALL_LAYERS = 2, 10
_SMALL_TOKENS = 64


def units(machine: Machine | None, works: Sequence[StepWork], g: Geometry) -> int:
    """Return how many units `complete` reports to `on_step`."""
    base = machine or Machine({}, 0, 0.0)
    kinds = len(_kinds(base, works, g))
    return (machine is None) + 2 * (dtype_name(g.dtype) not in base.linear) + kinds


def complete(
    machine: Machine | None, works: Sequence[StepWork], g: Geometry, on_step: Progress
) -> Machine:
    """Return a machine with all that these steps need; measures what is missing alone.

    on_step: called with the current work, and with one unit when it is finished. Raises
    `InputError` where there is a GPU: its steps are not measured yet.
    """
    if torch.cuda.is_available():
        raise InputError(
            "hardware 'this' measures processors, and models run on this machine's GPU; use a "
            f"preset ({', '.join(PRESETS)}) or a hardware file"
        )
    if g.latent or len({*g.dims}) > 1:
        raise InputError(
            "hardware 'this' measures layers whose keys and values have equally many channels, and "
            f"this model has {g.dims[0]} and {g.dims[1]}; use a preset ({', '.join(PRESETS)}) or a "
            "hardware file"
        )
    with torch.no_grad():
        if machine is None:
            on_step("reading memory", 0)
            memory = total_memory()
            machine = Machine(about(), memory, 1e9 * clock.read_bandwidth_gb_s())
            on_step("", 1)
        dtype = dtype_name(g.dtype)
        if dtype not in machine.linear:
            on_step(f"products with weights in {dtype}", 0)
            machine = replace(machine, linear={**machine.linear, dtype: linear_curve(g.dtype)})
            on_step("", 1)
        for key, recipe in _kinds(machine, works, g).items():
            on_step(f"a layer with {recipe.name}", 0)
            rates = {**machine.layers, key: layer_rate(recipe, g)}
            machine = replace(machine, layers=rates)
            on_step("", 1)
        if dtype not in machine.overhead:
            on_step("overhead of a model's layers", 0)
            overhead = {**machine.overhead, dtype: model_overhead(g.dtype)}
            machine = replace(machine, overhead=overhead)
            on_step("", 1)
    return machine


def total_memory() -> int:
    """Return the bytes of this machine's memory."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # Windows
        return available_bytes(torch.device("cpu")) or 0


def linear_curve(dtype: torch.dtype) -> dict[int, float]:
    """Return the seconds per byte of weights in products with 1 to 16 rows."""
    layer = [torch.randn(size).to(dtype) for size in _MATRICES]
    layers = max(1, _WEIGHTS // sum(x.nbytes for x in layer))
    matrices = [*layer, *(x.clone() for _ in range(layers - 1) for x in layer)]
    seconds_per_byte = {}
    for batch in _BATCHES:
        inputs = {n: torch.randn(batch, 1, n).to(dtype) for _, n in _MATRICES}
        seconds = _median(partial(_multiply, inputs, matrices), _SECONDS)
        seconds_per_byte[batch] = seconds / sum(x.nbytes for x in matrices)
    return seconds_per_byte


def model_overhead(dtype: torch.dtype) -> tuple[float, float]:
    """Return the seconds per step and per layer of a Llama around its cache.

    A layer of `full` is subtracted: the cache is counted by itself.
    """
    few, many = _SMALL_LAYERS
    shapes = [
        ModelShape(4, 2, 64, 1, dtype, layers, hidden=256, intermediate=512, vocabulary=512)
        for layers in _SMALL_LAYERS
    ]
    seconds = [_small_step(shape) for shape in shapes]
    layer = (seconds[1] - seconds[0]) / (many - few)
    per_step = seconds[0] - few * layer
    cache = _layer_seconds(resolve("full"), shapes[0], _SMALL_TOKENS)[0]
    return max(0.0, per_step), max(0.0, layer - cache)


def layer_rate(recipe: Recipe, g: Geometry) -> LayerRate:
    """Return how long a layer's decode step takes with a plain recipe, by bytes and rows."""
    measured = []
    for tokens, rows in _POINTS:
        shape = LayerShape(g.q_heads, g.kv_heads, g.head_dim, rows, g.dtype)
        seconds, nbytes = _layer_seconds(measured_recipe(recipe, tokens), shape, tokens)
        measured.append((rows, nbytes, seconds))
    return fit_rate(measured)


def fit_rate(measured: Sequence[tuple[int, int, float]]) -> LayerRate:
    """Return the rate that fits (rows, bytes, seconds) with the least relative errors.

    No part is negative: one that would be is left out, and the others are fitted again.
    """
    rows = torch.tensor([[1.0, b, n] for b, n, _ in measured], dtype=torch.float64)
    seconds = torch.tensor([[s] for *_, s in measured], dtype=torch.float64)
    scale = rows.abs().amax(0)
    used = [0, 1, 2]
    parts = [0.0, 0.0, 0.0]
    while used:
        weighted = (rows / scale)[:, used] / seconds
        coefficients = torch.linalg.lstsq(weighted, torch.ones_like(seconds)).solution[:, 0]
        if (coefficients >= 0).all():
            for i, x in zip(used, (coefficients / scale[used]).tolist(), strict=True):
                parts[i] = x
            break
        used.pop(int(coefficients.argmin()))
    fixed, row, per_byte = parts
    return LayerRate(fixed, row, 1 / per_byte if per_byte else float(1 << 60))


# timing


def _median(call: Callable[[], object], seconds: float) -> float:
    """Return the median seconds of a call, which is repeated for `seconds`; two calls warm up."""
    call(), call()
    times: list[float] = []
    while len(times) < _REPEATS or sum(times) < seconds:
        begin = clock.seconds()
        call()
        times.append(clock.seconds() - begin)
    return statistics.median(times)


def _multiply(inputs: dict[int, Tensor], matrices: Sequence[Tensor]) -> None:
    for matrix in matrices:
        F.linear(inputs[matrix.shape[1]], matrix)


def _small_step(shape: ModelShape) -> float:
    """Return the seconds of a decode step of a small Llama on an exact cache of 64 tokens."""
    model = random_llama(shape, _SMALL_TOKENS)
    cache = Cache(model, "full")
    model(input_ids=torch.zeros(1, _SMALL_TOKENS, dtype=torch.long), past_key_values=cache)
    ids = torch.ones(1, 1, dtype=torch.long)
    call = partial(model, input_ids=ids, past_key_values=cache, use_cache=True)
    return _median(call, 2 * _SECONDS)


def _layer_seconds(recipe: Recipe, shape: LayerShape, tokens: int) -> tuple[float, int]:
    """Return the seconds of a decode step of a layer after `tokens` tokens, and the bytes it reads.

    Several layers with equal content are called in turn, so that none stays in the processor's
    caches.
    """
    (first,) = empty_layers(recipe, shape)
    q, k, v = random_qkv(shape, tokens)
    fill(first, q, k, v)
    count = min(_MOST_LAYERS, max(2, -(-_CACHES // max(1, first.nbytes))))
    layers = [first, *(copy.deepcopy(first) for _ in range(count - 1))]
    q, k, v = (x[:, :, -1:].clone() for x in (q, k, v))

    def step() -> None:
        for layer in layers:
            layer.attend(q, k, v, scale=shape.head_dim**-0.5)
            layer.roll_back()

    seconds = _median(step, _SECONDS) / count
    first.attend(q, k, v, scale=shape.head_dim**-0.5)
    return seconds, read_nbytes(first)


def _kinds(machine: Machine, works: Sequence[StepWork], g: Geometry) -> dict[str, Recipe]:
    """Return the plain recipe of each kind of layers without a rate, by key."""
    return {key: _recipe_of(layer) for key, layer in unmeasured(machine, works, g).items()}


def _recipe_of(layer: LayerWork) -> Recipe:
    return resolve("full") if layer.kind is None else layer.kind.recipe
