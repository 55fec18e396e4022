"""Pass over the first layers of a model, whose outputs are known.

How a layer stores the prompt changes no activation in front of it. Decides which modules are the
layers of a model; a model whose layers cannot be found is computed from the start.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from kvloom.hf import compat


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """Return the modules of a model's layers, in order; none if they are not one list."""
    count = compat.decoder_config(model).num_hidden_layers
    lists = [x for x in model.modules() if isinstance(x, nn.ModuleList) and len(x) == count]
    return list(lists[0]) if len(lists) == 1 else []


@contextmanager
def outputs_recorded(layers: Sequence[nn.Module]) -> Iterator[list[Any]]:
    """Yield a list to which each of these layers adds its output, a tensor or a tuple."""
    found: list[Any] = []
    with ExitStack() as hooks:
        for layer in layers:
            hook = layer.register_forward_hook(lambda _, given, output: found.append(output))
            hooks.callback(hook.remove)
        yield found


@contextmanager
def skipped(layers: Sequence[nn.Module], outputs: Sequence[Any], rows: int) -> Iterator[None]:
    """Let these layers return their outputs for one row, `rows` times, without computing."""
    with ExitStack() as restored:
        for layer, output in zip(layers, outputs, strict=False):
            restored.callback(_restore, layer, vars(layer).get("forward"))
            layer.forward = _FixedOutput(_repeated(output, rows))
        yield


class _FixedOutput:
    """A forward whose output is known."""

    def __init__(self, output: Any) -> None:
        self.output = output

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.output


def _repeated(output: Any, rows: int) -> Any:
    if isinstance(output, tuple):
        return (_repeated(output[0], rows), *output[1:])
    return output.expand(rows, *output.shape[1:])


def _restore(layer: nn.Module, forward: Any) -> None:
    if forward is None:
        del layer.forward
    else:
        layer.forward = forward
