"""Measure once what calibrated formats need of a model: ranges, groups, clip factors.

`record` runs the model on a text and hands over every layer's queries, keys and values; `groups`
puts channels that are alike together; `attention` computes the error that packing causes; `clip`
searches how far to clip each group; `run` does all of it and writes the file that
`store.calibration` reads. Knows no recipe by name.
"""

from __future__ import annotations

from .run import Settings, calibrate, contexts

__all__ = ["Settings", "calibrate", "contexts"]
