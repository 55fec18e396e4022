"""Run a measurement on a model and leave the model as it was."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from transformers import PreTrainedModel

from ..hf import attach


@contextmanager
def attachment_restored(model: PreTrainedModel) -> Iterator[None]:
    """Detach kvloom from the model at the end, unless it was attached at the beginning."""
    attached_before = _attached(model)
    try:
        yield
    finally:
        if not attached_before and _attached(model):
            attach.detach(model)


def _attached(model: PreTrainedModel) -> bool:
    return getattr(model, "_kvloom", None) is not None
