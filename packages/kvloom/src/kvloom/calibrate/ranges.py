"""The range (minimum, maximum) of every channel of keys and values over a text.

Decides when enough text is read. The state is saved as reading proceeds, so that an interrupted run
continues where it stopped.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..positions.rope import Rope
from ..progress import TotalProgress
from ..store.calibration import Calibration
from .recorder import AttentionInputs, record

_CHECK_EVERY = 8  # contexts between two comparisons of the ranges; the state is saved then

CONTEXTS, FINISHED, LAYERS = range(3)
"""Indices into the saved state: contexts read, whether reading is finished, layers calibrated."""


def read_ranges(
    model: PreTrainedModel,
    ids: Tensor,
    found: Calibration,
    partial: Path,
    rope: Rope | None,
    settled: float,
    on_step: TotalProgress,
) -> None:
    """Add the ranges of all layers over contexts ids [M, T] to `found`, and save it to `partial`.

    Continues from the state in `found`. rope: also measure keys before this RoPE. settled: see
    `Settings`.
    """
    done, before = found.tensors["done"], _ranges(found)
    while not done[FINISHED]:
        context = int(done[CONTEXTS])
        on_step("reading contexts", context, len(ids))
        record(
            model,
            ids[context : context + 1],
            lambda layer, inputs: _widen(found.tensors, layer, inputs, rope),
        )
        done[CONTEXTS] = context + 1
        last = context + 1 == len(ids)
        if last or (context + 1) % _CHECK_EVERY == 0:
            current = _ranges(found)
            done[FINISHED] = last or bool(before and _share_added(before, current) < settled)
            before = current
            found.save(partial)


def _ranges(found: Calibration) -> dict[str, Tensor]:
    return {name: x for name, x in found.tensors.items() if name.startswith("range.")}


def _share_added(before: dict[str, Tensor], current: dict[str, Tensor]) -> float:
    """Return the share of the current ranges [2, Hk, D] that is new, the mean over channels."""
    shares = []
    for name, ends in current.items():
        width, width_before = ends[1] - ends[0], before[name][1] - before[name][0]
        shares.append(torch.where(width > 0, (width - width_before) / width, 0.0).mean())
    return float(torch.stack(shares).mean())


def _widen(
    tensors: dict[str, Tensor], layer: int, inputs: AttentionInputs, rope: Rope | None
) -> None:
    """Widen a layer's ranges so that they include the keys and values of these inputs."""
    kinds = {"keys": inputs.k.float(), "values": inputs.v.float()}
    if rope is not None:
        at = torch.arange(inputs.k.shape[2]).view(1, 1, -1)
        kinds["raw_keys"] = rope.rotate(kinds["keys"], -at)
    for kind, x in kinds.items():
        low, high = x.amin(dim=(0, 2)).cpu(), x.amax(dim=(0, 2)).cpu()  # [Hk, D]
        before = tensors.get(f"range.{layer}.{kind}")
        if before is not None:
            low, high = torch.minimum(low, before[0]), torch.maximum(high, before[1])
        tensors[f"range.{layer}.{kind}"] = torch.stack([low, high])
