"""The entry point: vLLM calls `register` in each of its processes, before it reads a model.

Decides which of vLLM's attention backends kvloom stands in for; `choice` decides in which engines.
"""

from __future__ import annotations

from . import choice


def register() -> None:
    """Let `choice` resolve vLLM's attention backends for the CPU."""
    from vllm.v1.attention.backends.registry import register_backend

    for name in choice.NAMES:
        register_backend(
            choice.member(name), f"{choice.__name__}.{name}", is_mamba=name in choice.STATES
        )
