"""Appending exact tokens by whichever kernel covers the case."""

from __future__ import annotations

from .. import dispatch
from . import reference as ref
from .cpu import append as cpu

COVERAGE = {
    "cpu": "1 to 8 tokens a step in fp32, fp16, bf16; head_dim a multiple of 16",
}
"""What a backend covers; `ref` runs the rest."""


def append(
    new: ref.Sides, rooms: tuple[ref.Room, ...], most: tuple[float, ...] | None = None
) -> bool:
    """Append as `ref.append` does, by the kernel that covers the case."""
    backend, why = dispatch.candidate(new[0])
    if not why:
        why = cpu.problems(new[0]) if backend == "cpu" else ["there is no kernel for it"]
    dispatch.count("append", backend, why)
    return (ref if why else cpu).append(new, rooms, most)
