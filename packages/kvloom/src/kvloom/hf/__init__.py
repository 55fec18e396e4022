"""How kvloom gets under a Hugging Face transformers model."""

from . import adapters
from .compat import geometry, has_adapter, stock_kinds
from .layer_facts import CALIBRATION_FILE, identity, load_layer_facts
from .observe import ObservedStep, observe_steps
from .passes import read_tokens
from .prompts.pages import StoredPages
from .rotary import layer_ropes
from .routing import attachment_restored
from .self_check import (
    generate_sample,
    least_tolerance,
    logits_difference,
    rounding_tolerance,
    routed_trial,
    sample_batch,
)
from .shared_pass import BatchedCaches, Follower, can_batch, prefill_many
from .states import state_nbytes
from .supported import supported_model

__all__ = [
    "CALIBRATION_FILE",
    "BatchedCaches",
    "Follower",
    "ObservedStep",
    "StoredPages",
    "adapters",
    "attachment_restored",
    "can_batch",
    "generate_sample",
    "geometry",
    "has_adapter",
    "identity",
    "layer_ropes",
    "least_tolerance",
    "load_layer_facts",
    "logits_difference",
    "observe_steps",
    "prefill_many",
    "read_tokens",
    "rounding_tolerance",
    "routed_trial",
    "sample_batch",
    "state_nbytes",
    "stock_kinds",
    "supported_model",
]
