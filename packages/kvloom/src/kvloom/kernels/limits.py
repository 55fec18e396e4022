"""What a backend covers, declared once: in words for documentation, and as a check of each case.

Decides nothing about devices: see `dispatch`. Imports neither Numba nor Triton.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..encoding import Encoding, LayerEncoding, unknown_fields

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
"""Dtypes of exact tokens that kernels read."""

READ_FIELDS = (
    "bits", "axis", "group", "meta", "span", "reorder", "clip", "smooth", "static", "rotation",
    "pre_rope",
)  # fmt: skip
"""Fields of an `Encoding` that kernels read."""

MAX_STEP = 8
"""Queries, and new tokens, of a step that decoding kernels take: with more, reading keys no longer
dominates, and torch's fused attention and its threads are as fast."""

Limit = tuple[str, Callable[..., str | Sequence[str] | None]]
"""What is covered, in words; and a check, which returns why a case is not: reasons, or None."""


class Coverage:
    """Limits of a backend; `str` gives them in words."""

    def __init__(self, *limits: Limit) -> None:
        self.limits = limits

    def __str__(self) -> str:
        return "; ".join(words for words, _ in self.limits)

    def problems(self, *case: Any, **options: Any) -> list[str]:
        """Return why a case is not covered; empty if it is. The arguments are those of a check."""
        reasons: list[str] = []
        for _, check in self.limits:
            found = check(*case, **options) or ()
            reasons += [found] if isinstance(found, str) else found
        return reasons

    def of(self, case: Callable[..., tuple[Any, ...]]) -> Coverage:
        """Return this coverage for other arguments, from which `case` returns those of a check."""
        return Coverage((str(self), lambda *args, **kwargs: self.problems(*case(*args, **kwargs))))


def _joined_heads(encoding: Encoding) -> str | None:
    what = "channels of a layer's heads that are grouped or scaled together"
    return what if encoding.regroups else None


OF_ONE_HEAD: Limit = ("groups of one head, not clipped, divided or static", _joined_heads)
"""Encodings of tokens that each head keeps in a number of its own."""


def unread_fields(layer_encoding: LayerEncoding, dtype: torch.dtype) -> str | None:
    """Return which fields of an encoding kernels do not read."""
    return "; ".join(unknown_fields(layer_encoding.encoding, READ_FIELDS)) or None


def dtype_problem(dtype: torch.dtype, what: str = "tokens are") -> str | None:
    """Return why kernels do not read exact numbers of a dtype."""
    return None if dtype in DTYPES else f"{what} {dtype}, not fp32, fp16 or bf16"


def head_dim_problem(d: int) -> str | None:
    """Return why CPU kernels do not read heads of size d."""
    fits = d % 16 == 0 and d <= 512
    return None if fits else f"head_dim={d} is not a multiple of 16, up to 512"
