"""Read hardware from a TOML file."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from kvloom.errors import InputError

from .hardware import SOURCES, Hardware
from .ranges import Range

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_REQUIRED = {"memory_gb": 1e9, "bandwidth_gb_s": 1e9, "tflops": 1e12}
_OPTIONAL = {"weights": 1.0, "kv": 1.0, "arithmetic": 1.0, "overhead_us": 1e-6}
_TEXT = ("name", "source")


def read_file(path: Path) -> Hardware:
    """Return the hardware that a TOML file describes. Raises `InputError`.

    memory_gb, bandwidth_gb_s and tflops are required; name and source are text; weights, kv,
    arithmetic (shares of the rates) and overhead_us (per layer) are [low, best, high].
    """
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise InputError(
            f"hardware file {str(path)!r} cannot be read ({error}); give a TOML file"
        ) from error
    unknown = sorted(set(data) - set(_REQUIRED) - set(_OPTIONAL) - set(_TEXT))
    missing = [name for name in _REQUIRED if not _positive(data.get(name))]
    if unknown or missing:
        mistake = f"has unknown fields {', '.join(unknown)}" if unknown else (
            f"has no number above 0 for {', '.join(missing)}"
        )  # fmt: skip
        raise InputError(
            f"hardware file {str(path)!r} {mistake}; it takes "
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


def _positive(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0


def _range(path: Path, name: str, value: Any, unit: float) -> Range:
    numbers = value if isinstance(value, list) and len(value) == 3 else []
    valid = all(_positive(x) or (name == "overhead_us" and x == 0) for x in numbers)
    if not numbers or not valid or numbers != sorted(numbers):
        raise InputError(
            f"hardware file {str(path)!r}: {name}={value!r} must be [low, best, high], ascending"
        )
    return Range(*(x * unit for x in numbers))
