"""Decoding with CUDA graphs: steps of one token are recorded, and replayed.

On a GPU, Python takes longer for a step than its kernels do. `recorded_steps` decides which steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from transformers import PreTrainedModel

from ..errors import CacheMisuse, InputError
from .recorded_steps import Graphs
from .routing import route
from .supported import supported_model


@contextmanager
def cuda_graphs(model: PreTrainedModel) -> Iterator[None]:
    """Replay steps of one token with CUDA graphs, in a `with` statement.

    In the block, `generate()` and calls of the model with a kvloom cache record a step and replay
    it. These run as without it: prompts, drafts, recipes that evict or recall at each step, layers
    that kvloom does not compress, and models whose step cannot be recorded. A cache packs up to 64
    tokens at once, and has room for so many exact tokens. Change the model's modules or hooks
    outside the block only.

    Args:
        model: As for `Cache`, on one CUDA device.

    Raises:
        InputError: The model is not on one CUDA device.
        UnsupportedModel: kvloom cannot route the model.
        CacheMisuse: The model is in such a block already.
    """
    model = supported_model(model)
    devices = {parameter.device for parameter in model.parameters()}
    if len(devices) != 1 or next(iter(devices)).type != "cuda":
        found = ", ".join(sorted(map(str, devices)))
        raise InputError(
            f"kvloom.cuda_graphs needs a model on one CUDA device, and this one is on {found}; "
            "leave it out"
        )
    with replayed(model, Graphs(record)):
        yield


@contextmanager
def replayed(model: PreTrainedModel, graphs: Graphs) -> Iterator[None]:
    """Replay the steps of a model within a block: see `cuda_graphs`."""
    route(model)
    if model._kvloom.graphs is not None:
        raise CacheMisuse("this model is in a block of kvloom.cuda_graphs already; leave it first")
    model._kvloom.graphs = graphs
    try:
        yield
    finally:
        routing = getattr(model, "_kvloom", None)  # None: detached in the block
        if routing is not None:
            routing.graphs = None
        graphs.close()


def record(run: Callable[[], Any]) -> tuple[Callable[[], object], Any]:
    """Record a function as a CUDA graph: see `recorded_steps.Record`."""
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            out = run()
        except BaseException:
            with suppress(RuntimeError):  # the record is void already
                graph.capture_end()
            raise
        graph.capture_end()
    torch.cuda.current_stream().wait_stream(stream)
    return graph.replay, out
