"""How far distributions of the next token are from those of the exact cache."""

from __future__ import annotations

import torch
from torch import Tensor


def divergences(logp: Tensor, logits: Tensor) -> Tensor:
    """Return KL(exact || other) in nats, fp32 [rows, T].

    logp: fp32 [T, V], log-probabilities of the exact cache. logits: [rows, T, V].
    """
    exact = logp.exp()
    rows = [(exact * (logp - torch.log_softmax(x.float(), dim=-1))).sum(-1) for x in logits]
    return torch.stack(rows).clamp(min=0)
