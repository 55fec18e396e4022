"""Which of the stored tokens a recalling step reads.

Decides their order: sinks, recalled tokens, all later tokens. Chooses none of them.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from ..kernels.attend.reference import First


class Selection(NamedTuple):
    """Which tokens of a part are read: at slots int64 [B, H, M], and all from `begin` on.

    first: exact keys and values [B, Hk, S, D] before them (sinks).
    """

    slots: Tensor
    begin: int
    first: First | None = None

    def tokens(self, stored: int) -> int:
        """Return how many of `stored` tokens are read, `first` included."""
        before = 0 if self.first is None else self.first[0].shape[2]
        return before + self.slots.shape[2] + stored - self.begin
