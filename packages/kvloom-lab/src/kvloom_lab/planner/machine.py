"""This machine: what was measured of it, and the time of a decode step that follows from it.

A layer's step takes a fixed time, a time per row, and its bytes divided by the throughput of its
kernels. The model around it takes a time per step, a time per layer, and the time of its products
with weights at this batch. They add up, because a CPU waits for each operation.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from kvloom.errors import InputError
from kvloom.recipe import Geometry, Recipe

from ..workload.files import cache_folder, parsed_json, write_whole
from ..workload.machine import versions
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
            _widened(reading),
            _widened(Range.exactly(kv)),
            _widened(products.above(reading)),
            _widened(Range.exactly(fixed)),
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


UNMEASURED = Machine({}, 0, 0.0)


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


def _widened(x: Range) -> Range:
    """Return a range widened by the tolerance."""
    return Range(x.low * (1 - TOLERANCE), x.best, x.high * (1 + TOLERANCE))


_FILE_FORMAT = 1


def machine_path() -> Path:
    """Return the file with the measurements."""
    return cache_folder() / "hardware.json"


def load_machine() -> Machine | None:
    """Return what was measured of this machine before; None if nothing fits."""
    try:
        data = parsed_json(machine_path().read_text(encoding="utf-8"))
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
