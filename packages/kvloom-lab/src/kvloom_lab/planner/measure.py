"""Measures what `machine` needs to know of this machine, once.

`complete` times reads of memory, products with weights at several batches, decode steps of two
small Llamas (their difference is the overhead of a layer), and one layer's decode step for each
kind of layer that a plan asks about. Data is random: speed does not depend on it. Weights and
caches are larger than the processor's caches near its cores, as those of a model are. Compilation
of kernels is not timed.
"""

from __future__ import annotations

import copy
import os
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

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
from ..workload.layers import LayerShape, ModelShape, empty_layers, random_qkv
from ..workload.passes import available_bytes
from .hardware import PRESETS
from .machine import LayerRate, Machine, about, dtype_name, unmeasured
from .step import StepWork

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


def complete(
    machine: Machine,
    works: Sequence[StepWork],
    g: Geometry,
    on_start: Callable[[int], Progress] | None = None,
) -> Machine:
    """Return a machine with all that these steps need; measures what is missing alone.

    on_start: called with the number of measurements, if there are any; returns a function that is
    called with the current work, and with 1 when it is finished. Raises `InputError` where there is
    a GPU: its steps are not measured yet.
    """
    measurements = list(_missing(machine, works, g))
    if not measurements:
        return machine
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
    report = on_start(len(measurements)) if on_start else (lambda what, done: None)
    with torch.no_grad():
        for what, measure in measurements:
            report(what, 0)
            machine = measure(machine)
            report("", 1)
    return machine


def _missing(
    machine: Machine, works: Sequence[StepWork], g: Geometry
) -> Iterator[tuple[str, Callable[[Machine], Machine]]]:
    """Yield what these steps need and the machine lacks: its name, and a function that adds it."""
    dtype = dtype_name(g.dtype)
    if not machine.bandwidth:
        yield "reading memory", _with_memory
    if dtype not in machine.linear:
        yield f"products with weights in {dtype}", partial(_with_products, g.dtype)
    for key, layer in unmeasured(machine, works, g).items():
        recipe = resolve("full") if layer.kind is None else layer.kind.recipe
        yield f"a layer with {recipe.name}", partial(_with_layer, key, recipe, g)
    if dtype not in machine.overhead:
        yield "overhead of a model's layers", partial(_with_overhead, g.dtype)


def _with_memory(machine: Machine) -> Machine:
    bandwidth = 1e9 * clock.read_bandwidth_gb_s()
    return replace(machine, about=about(), memory=total_memory(), bandwidth=bandwidth)


def _with_products(dtype: torch.dtype, machine: Machine) -> Machine:
    return replace(machine, linear={**machine.linear, dtype_name(dtype): linear_curve(dtype)})


def _with_layer(key: str, recipe: Recipe, g: Geometry, machine: Machine) -> Machine:
    return replace(machine, layers={**machine.layers, key: layer_rate(recipe, g)})


def _with_overhead(dtype: torch.dtype, machine: Machine) -> Machine:
    return replace(machine, overhead={**machine.overhead, dtype_name(dtype): model_overhead(dtype)})


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


def measured_recipe(recipe: Recipe, tokens: int) -> Recipe:
    """Return the plain recipe that is measured in place of another, at `tokens` tokens.

    A budget of tokens to keep changes the bytes alone, so half of the tokens are kept.
    `compress_after` and the first layers that recall leaves out do not matter to a layer.
    """
    recipe = replace(recipe, compress_after=0, name="measured")
    if recipe.keep is None:
        return recipe
    try:
        return replace(recipe, keep=replace(recipe.keep, shared=False)).with_budget(tokens // 2)
    except RecipeError:  # its window is larger than that
        return recipe


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
