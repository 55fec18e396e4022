"""The decisions of a layer's last step, which `LayerCache.observe` returns."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass
class Trace:
    """Decisions of the last step.

    scored: logical indices int64 and scores fp32, both [B, Hk, N], of the evictor's candidates.
    recalled: slots int64 [B, H, M] of the segment that the retriever chose; None: it read all.
    """

    scored: tuple[Tensor, Tensor] | None = None
    recalled: Tensor | None = None
