"""What a layer decided in its last step, for those who observe it: `LayerCache.observe`."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass
class Trace:
    """Decisions of the last step.

    scored: logical indices int64 and scores fp32, both [B, Hk, N], among which the evictor chose.
    recalled: slots int64 [B, H, M] of the segment that the retriever chose; None: it read all.
    """

    scored: tuple[Tensor, Tensor] | None = None
    recalled: Tensor | None = None
