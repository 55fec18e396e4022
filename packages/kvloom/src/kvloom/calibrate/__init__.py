"""Calibration: measure once what calibrated formats need from a model, and write it to a file.

`ranges` measures the range of every channel, `channel_groups` groups channels with similar ranges,
`clip_search` chooses how far each group is clipped, and `run` does all of it and writes the file
that `kvloom.store.calibration` reads. `recorder` and `sampled_attention` pass the inputs of
attention to a function; `read_prompt` measures how far candidate recipes are from an exact cache.
Knows no recipe by name.
"""

from __future__ import annotations

from .read_prompt import LayerContext, ReadPrompt, can_repeat, kl_divergence
from .recorder import AttentionInputs, record
from .run import calibrate
from .sampled_attention import AttentionSample, ExactAttention
from .settings import Settings, cut_contexts

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
