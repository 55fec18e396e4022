"""Find out about a model, once, what calibrated formats need: ranges, groups, clip factors.

`record` runs the model on a text and sees every layer's queries, keys and values; `groups` puts
channels that are alike together; `clip` searches how far to clip each group; `run` does all of it
and writes the file that `store.calibration` reads. Knows no recipe by name.
"""

from __future__ import annotations

from .run import Settings, calibrate, contexts

__all__ = ["Settings", "calibrate", "contexts"]
