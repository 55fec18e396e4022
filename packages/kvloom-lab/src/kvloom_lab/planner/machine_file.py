"""The file in the user's cache folder that keeps what was measured of this machine.

Measurements are used again where processor, threads and versions are the same. A file that cannot
be read, or is of another machine, counts as none.
"""

from __future__ import annotations

import json
from pathlib import Path

from kvloom.errors import InputError

from ..models.smollm2 import cache_folder
from ..workload import whole_file
from . import machine_measurement
from .machine import Machine

_FORMAT = 1


def path() -> Path:
    """Return the file with the measurements."""
    return cache_folder() / "hardware.json"


def load() -> Machine | None:
    """Return what was measured of this machine before; None if nothing fits."""
    try:
        data = json.loads(path().read_text(encoding="utf-8"))
        if data["format"] == _FORMAT and data["about"] == machine_measurement.about():
            return Machine.from_dict(data)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError):
        pass
    return None


def save(machine: Machine) -> None:
    """Write the measurements, completely or not at all. Raises `InputError`."""
    data = {"format": _FORMAT, **machine.to_dict()}
    target = path()
    try:
        whole_file.write(target, json.dumps(data, indent=2) + "\n")
    except OSError as error:
        raise InputError(
            f"measurements cannot be written to {target}: {error.strerror}; set XDG_CACHE_HOME to "
            "a folder that can be written"
        ) from error
