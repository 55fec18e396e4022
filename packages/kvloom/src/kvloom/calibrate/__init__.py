"""Calibration: measure once what calibrated formats need from a model, and write it to a file.

`ranges` measures the range of every channel, `channel_groups` groups channels with similar ranges,
`clip_search` chooses how far each group is clipped, and `run` does all of it and writes the file
that `kvloom.store.calibration` reads. Knows no recipe by name.
"""

from __future__ import annotations

from .run import calibrate
from .settings import Settings, cut_contexts

__all__ = ["Settings", "calibrate", "cut_contexts"]
