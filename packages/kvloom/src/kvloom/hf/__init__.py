"""How kvloom gets under a Hugging Face transformers model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..lazy import lazy_names

if TYPE_CHECKING:
    from .access import read_tokens, stock_layers, supported_model
    from .attach import attachment_restored
    from .compat import adapted as has_adapter
    from .compat import geometry
    from .fan_out import Follower, prefill_together
    from .metadata import BESIDE as CALIBRATION_FILE
    from .metadata import identity, load_layer_metadata
    from .observe import ObservedStep
    from .observe import observe as observe_steps
    from .rotary import rope as model_rope
    from .self_check import batch as sample_batch
    from .self_check import difference as logits_difference
    from .self_check import generate as generate_sample
    from .self_check import tolerance as rounding_tolerance
    from .self_check import trial as routed_trial
    from .together import Together, can_step_together

__all__ = [
    "CALIBRATION_FILE",
    "Follower",
    "ObservedStep",
    "Together",
    "attachment_restored",
    "can_step_together",
    "generate_sample",
    "geometry",
    "has_adapter",
    "identity",
    "load_layer_metadata",
    "logits_difference",
    "model_rope",
    "observe_steps",
    "prefill_together",
    "read_tokens",
    "rounding_tolerance",
    "routed_trial",
    "sample_batch",
    "stock_layers",
    "supported_model",
]
__getattr__ = lazy_names(
    __name__,
    {
        "CALIBRATION_FILE": "metadata:BESIDE",
        "Follower": "fan_out",
        "ObservedStep": "observe",
        "Together": "together",
        "attachment_restored": "attach",
        "can_step_together": "together",
        "generate_sample": "self_check:generate",
        "geometry": "compat",
        "has_adapter": "compat:adapted",
        "identity": "metadata",
        "load_layer_metadata": "metadata",
        "logits_difference": "self_check:difference",
        "model_rope": "rotary:rope",
        "observe_steps": "observe:observe",
        "prefill_together": "fan_out",
        "read_tokens": "access",
        "rounding_tolerance": "self_check:tolerance",
        "routed_trial": "self_check:trial",
        "sample_batch": "self_check:batch",
        "stock_layers": "access",
        "supported_model": "access",
    },
)
