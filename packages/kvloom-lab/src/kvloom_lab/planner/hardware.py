"""Hardware by its data sheet, and the roofline of a decode step on it.

A part of a step takes the longer of reading its bytes and of its arithmetic. No hardware reaches
the rates of its data sheet, so each rate is multiplied by a measured share: low, best and high.
Python launches the work at the same time: a step takes the longer of the two.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvloom.errors import InputError

from ..workload.files import read_toml
from .step import StepTime, StepWork
from .units import Range

SOURCES = {
    "weights": "Llama-2-7B on an A100 with 2,039 GB/s (gpt-fast, README): 1,397 GB/s in 16 bits "
    "(best) and 863 GB/s in 4 bits (low); high: as for KV",
    "kv": "kvloom's kernels on an H100 at 131,072 tokens (benchmarks/gpu.py): kivi 16% (low), "
    "near-lossless 31% (best), full 90% (high) of the bandwidth",
    "arithmetic": "FlashAttention-2 35% (low) and FlashAttention-3 75% (best) of an H100's fp16 "
    "rate (arXiv:2407.08608), and all of it (high)",
    "overhead": "Python of a layer on that H100's host (benchmarks/gpu.py, 32 layers, batch 1): "
    "full 1.9 ms (best), tiny 2.8 ms (high); low: none, as in a captured graph",
}
"""Where the shares and the overhead of presets come from."""
_WEIGHTS = Range(0.42, 0.69, 0.90)
_KV = Range(0.16, 0.31, 0.90)
_ARITHMETIC = Range(0.35, 0.75, 1.0)
_OVERHEAD = Range(0.0, 1.9e-3, 2.8e-3)


@dataclass(frozen=True)
class Hardware:
    """A machine by its data sheet.

    Attributes:
        name: As tables print it.
        memory: Bytes.
        bandwidth: Bytes per second.
        flops: Dense 16-bit operations per second with matrices.
        sources: Where the numbers come from, by name.
        weights: The share of the bandwidth at which a step reads weights.
        kv: The share of the bandwidth at which a step reads the cache.
        arithmetic: The share of the operations per second that a step reaches.
        overhead: Seconds of Python per layer.
    """

    name: str
    memory: int
    bandwidth: float
    flops: float
    sources: dict[str, str] = field(default_factory=dict)
    weights: Range = _WEIGHTS
    kv: Range = _KV
    arithmetic: Range = _ARITHMETIC
    overhead: Range = _OVERHEAD

    def problem(self, work: StepWork) -> str | None:
        """Return why a step's time cannot be estimated; None if it can."""
        tiers = {layer.kind.recipe.recall.tier for layer in work.layers
                 if layer.kind is not None and layer.kind.recipe.recall is not None}  # fmt: skip
        if tiers - {None}:
            return "its tokens move over the bus from another memory, which is not estimated"
        return None

    def step(self, work: StepWork) -> StepTime:
        """Return the seconds of a decode step."""
        weights = self._read(work.weights, self.weights)
        kv = self._read(Range.exactly(work.kv_nbytes), self.kv)
        peak = self.arithmetic.scaled(self.flops)
        arithmetic = peak.over(work.weight_flops).above(weights)
        arithmetic += peak.over(work.attention_flops).above(kv)
        device = weights + kv + arithmetic
        return StepTime(
            weights, kv, arithmetic, self.overhead.scaled(work.layer_count).above(device)
        )

    def _read(self, nbytes: Range, share: Range) -> Range:
        """Return the seconds of reading bytes at a share of the bandwidth."""
        rate = share.scaled(self.bandwidth)
        return Range(nbytes.low / rate.high, nbytes.best / rate.best, nbytes.high / rate.low)

    def describe(self) -> str:
        """Return the name and the rates in one line."""
        return (
            f"{self.name} ({self.memory / 1e9:,.0f} GB, {self.bandwidth / 1e9:,.0f} GB/s, "
            f"{self.flops / 1e12:,.0f} TFLOP/s)"
        )

    def notes(self) -> list[str]:
        """Return what a reader of its times has to know."""
        return ["Times are estimates from a data sheet, and from kvloom's rates on one H100."]

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain data, with the source of every number."""
        ranges = {name: vars(getattr(self, name)) for name in ("weights", "kv", "arithmetic")}
        return {
            "name": self.name,
            "memory": self.memory,
            "bandwidth": self.bandwidth,
            "flops": self.flops,
            "shares": ranges,
            "overhead_s": vars(self.overhead),
            "sources": self.sources,
        }


_REQUIRED = {"memory_gb": 1e9, "bandwidth_gb_s": 1e9, "tflops": 1e12}
_OPTIONAL = {"weights": 1.0, "kv": 1.0, "arithmetic": 1.0, "overhead_us": 1e-6}
_TEXT = ("name", "source")


def read_hardware(path: Path) -> Hardware:
    """Return the hardware that a TOML file describes. Raises `InputError`.

    memory_gb, bandwidth_gb_s and tflops are required; name and source are text; weights, kv,
    arithmetic (shares of the rates) and overhead_us (per layer) are [low, best, high].
    """
    try:
        data = read_toml(path)
    except (OSError, ValueError) as error:
        raise InputError(
            f"hardware file {str(path)!r} cannot be read ({error}); give a TOML file"
        ) from error
    return _hardware(data, path)


def _hardware(data: dict[str, Any], path: Path) -> Hardware:
    """Return the hardware of a file's data; raises `InputError`."""
    unknown = sorted(set(data) - set(_REQUIRED) - set(_OPTIONAL) - set(_TEXT))
    missing = [name for name, unit in _REQUIRED.items() if not _positive(data.get(name), unit)]
    no_text = [name for name in _TEXT if not isinstance(data.get(name, ""), str)]
    mistakes = {
        "has unknown fields": unknown, "has no number above 0 for": missing,
        "has no text for": no_text,
    }  # fmt: skip
    for mistake, names in mistakes.items():
        if not names:
            continue
        raise InputError(
            f"hardware file {str(path)!r} {mistake} {', '.join(names)}; it takes "
            f"{', '.join([*_REQUIRED, *_OPTIONAL, *_TEXT])}"
        )
    ranges: dict[str, Any] = {}
    for name, unit in _OPTIONAL.items():
        if name in data:
            ranges[name.removesuffix("_us")] = _range(path, name, data[name], unit)
    memory, bandwidth, flops = (data[name] * unit for name, unit in _REQUIRED.items())
    sources = {**SOURCES, "rates": str(data.get("source", f"the file {path.name}"))}
    for name in ranges:
        sources[name] = sources["rates"]
    return Hardware(
        str(data.get("name", path.stem)), int(memory), bandwidth, flops, sources, **ranges
    )


def _positive(value: Any, unit: float = 1) -> bool:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_number and 0 < value * unit < math.inf


def _range(path: Path, name: str, value: Any, unit: float) -> Range:
    numbers = value if isinstance(value, list) and len(value) == 3 else []
    valid = all(_positive(x) or (name == "overhead_us" and x == 0) for x in numbers)
    if not numbers or not valid or numbers != sorted(numbers):
        raise InputError(
            f"hardware file {str(path)!r}: {name}={value!r} must be [low, best, high], ascending"
        )
    if unit == 1 and numbers[-1] > 1:
        raise InputError(
            f"hardware file {str(path)!r}: {name}={value!r} are shares of a rate; give 1 at most"
        )
    return Range(*(x * unit for x in numbers))


PRESETS = {
    name: _hardware({"name": name, **data}, Path("hardware.toml"))
    for name, data in read_toml(Path(__file__).with_name("hardware.toml")).items()
}
"""GPUs by name."""
