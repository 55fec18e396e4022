"""Decoding with CUDA graphs: steps of one token are recorded, and replayed.

On a GPU, Python takes longer for a step than its kernels do. `recorded_steps` decides which steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel

from ..errors import CacheMisuse, InputError
from .recorded_steps import Graphs
from .routing import route
from .supported import supported_model


@contextmanager
def cuda_graphs(model: PreTrainedModel) -> Iterator[Graphs]:
    """Replay steps of one token with CUDA graphs, in a `with` statement.

    In the block, `generate()`, and calls of the model with a kvloom cache and `position_ids`,
    record a step and replay it. These run as outside the block: prompts, speculative decoding, beam
    search, recipes that evict or recall at each step, models with sliding windows or an adapter of
    kvloom, and those whose step cannot be recorded. New tokens stay unpacked, up to 64, and are
    packed at once; so logits differ a little from those outside. Reading the cache, for example
    its `nbytes`, packs them too, and the next steps are recorded again. Change the model (its
    modules, hooks and adapters of weights) outside the block only.

    After `with kvloom.cuda_graphs(model) as graphs:`, `print(graphs)` says how many steps were
    replayed, and why others were not.

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
    graphs = Graphs(partial(record, devices.pop()))
    with replayed(model, graphs):
        yield graphs


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


def record(device: torch.device, run: Callable[[], Any]) -> tuple[Callable[[], object], Any]:
    """Record a function as a CUDA graph on a device: see `recorded_steps.Record`."""
    with torch.cuda.device(device):
        torch.cuda.empty_cache()  # unused memory cannot be released while a graph is recorded
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

    def replay() -> None:
        with torch.cuda.device(device):
            graph.replay()

    return replay, out
