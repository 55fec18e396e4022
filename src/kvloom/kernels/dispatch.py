"""Which backend runs an operation, and why another does not.

`ref`, plain torch, runs everything. `cpu`, compiled by Numba on first use, runs what it covers on
CPU tensors, and is chosen wherever it does. KVLOOM_KERNELS=ref in the environment, or `use("ref")`
around some calls, leaves everything to the reference. Importing this does not import Numba.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from .attend import cpu, ref

CHOICES = ("auto", "ref")
COVERAGE = {
    "attend": (
        "1 to 8 queries a step; head_dim a multiple of 16 up to 512; exact tokens in fp32, fp16, "
        "bf16; packed at 2, 3, 4, 8 bit per channel or per token, metadata fp32, fp16, bf16; "
        "padding, softcap, bias, causal"
    ),
    "pack, unpack": None,
    "column_mass": None,
}
"""What the cpu backend covers, by operation; None: nothing, `ref` runs it."""

ran: Counter[tuple[str, str, str]] = Counter()
"""How often this process ran (operation, backend, why not cpu)."""

_forced: ContextVar[str | None] = ContextVar("kvloom_kernels", default=None)


@contextmanager
def use(backend: str) -> Iterator[None]:
    """Within the block, let `auto` choose or leave everything to `ref`."""
    token = _forced.set(_known(backend))
    try:
        yield
    finally:
        _forced.reset(token)


def setting() -> str:
    """What is asked for: `auto` or `ref`."""
    forced = _forced.get()
    return _known(os.environ.get("KVLOOM_KERNELS", "auto")) if forced is None else forced


def compile_seconds() -> float:
    """What compiling kernels, or reading them from the disk, has taken this process so far."""
    team = sys.modules.get(f"{__package__}.team")
    return 0.0 if team is None else sum(team.seconds.values())


def attends(tokens: int, like: Tensor, keys: Any = None, values: Any = None) -> list[str]:
    """Why `attend` of so many queries a step would be left to the reference; empty if it is not.

    like: exact keys [B, Hk, N, D]. keys, values: formats of packed tokens, None where all are
    exact.
    """
    if setting() == "ref":
        return ["the reference is asked for"]
    return cpu.problems(tokens, like, keys, values)


def attend(
    q: Tensor,
    keys: cpu.Strand,
    values: cpu.Strand,
    scale: float,
    *,
    causal: bool = False,
    valid: Tensor | None = None,
    softcap: float | None = None,
    bias: Tensor | None = None,
) -> ref.State | None:
    """Attend as `ref.attend` does, by the kernel that covers the case; None if none does."""
    why = attends(q.shape[2], keys.tail, keys.fmt, values.fmt)
    if not why and q.requires_grad and torch.is_grad_enabled():
        why = ["a gradient is asked for; call under torch.no_grad()"]
    ran["attend", "ref" if why else "cpu", "; ".join(why)] += 1
    if why:
        return None
    return cpu.attend(
        q, keys, values, scale, causal=causal, valid=valid, softcap=softcap, bias=bias
    )


def _known(backend: str) -> str:
    if backend not in CHOICES:
        raise ValueError(f"kernels {backend!r} are none of {', '.join(CHOICES)}")
    return backend
