"""The entry point: vLLM calls `register` in each of its processes, before it reads a model.

It may call it again in a process.

Decides which of vLLM's attention backends kvloom stands in for; `choice` decides in which engines.
"""

from __future__ import annotations

from . import choice, request


def register() -> None:
    """Let `choice` resolve vLLM's attention backends for the CPU, and name kvloom's connector."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.v1.attention.backends.registry import register_backend

    for name in choice.NAMES:
        register_backend(
            choice.member(name), f"{choice.__name__}.{name}", is_mamba=name in choice.STATES
        )
    if request.CONNECTOR not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(
            request.CONNECTOR, f"{__package__}.connector", request.CONNECTOR
        )
