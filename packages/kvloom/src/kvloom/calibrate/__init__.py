"""Calibration: measure once what calibrated formats need from a model, and write it to a file.

`ranges` measures the range of every channel and groups channels with similar ranges, `clip_search`
chooses how far each group is clipped. `run` does both. It writes the file that
`kvloom.store.calibration` reads. `recorder` passes the inputs of attention to a function;
`read_prompt` measures how far candidate recipes are from an exact cache. This package knows no
recipe by name.
"""

from __future__ import annotations

from ..hf.recording import AttentionInputs
from .clip_search import AttentionSample, ExactAttention
from .read_prompt import LayerContext, ReadPrompt, can_repeat, kl_divergence
from .recorder import record
from .run import Settings, calibrate, cut_contexts

__all__ = [
    "AttentionInputs",
    "AttentionSample",
    "ExactAttention",
    "LayerContext",
    "ReadPrompt",
    "Settings",
    "calibrate",
    "can_repeat",
    "cut_contexts",
    "kl_divergence",
    "record",
]
