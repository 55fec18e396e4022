"""Python calls and microseconds of a decode step in the cache of one layer, by recipe.

Every layer of the reference model's cache gets a prompt and then steps of random queries, keys and
values; no model runs. `calls` counts the calls of kvloom's Python functions in `LayerCache.attend`,
itself included, as `sys.setprofile` reports them; `python_us` is its time without that of compiled
kernels. Both are means over the layers, and medians over the steps.

    python benchmarks/calls.py
    python benchmarks/calls.py --prompt 4096 --recipes kivi --result calls_4096  # calls_4096.json
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path
from types import FrameType
from unittest.mock import patch

import torch

import kvloom
import kvloom_lab
import record
from kvloom.cache import fill
from kvloom.kernels import cpu_runtime

PACKAGE = str(Path(kvloom.__file__).parent)
RECIPES = ["full", "kivi", "near-lossless", "small", "minikv", "clusterkv", "h2o"]


class Steps:
    """The steps of all layers of one cache."""

    def __init__(self, recipe: str, prompt: int, dtype: torch.dtype) -> None:
        model = kvloom_lab.reference_model(dtype)
        config = model.config
        self.shape = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        self.dtype = dtype
        self.layers = [layer.cache for layer in kvloom.Cache(model, recipe).full_layers]
        for layer in self.layers:
            fill(layer, *self.inputs(prompt))

    def inputs(self, tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        heads, kv_heads, d = self.shape
        return tuple(
            torch.randn(1, h, tokens, d, dtype=self.dtype) for h in (heads, kv_heads, kv_heads)
        )

    @torch.no_grad()
    def run(self, tokens: int) -> list[float]:
        """Attend once in every layer; return the seconds of each."""
        seconds = []
        for layer in self.layers:
            q, k, v = self.inputs(tokens)
            begin = time.perf_counter()
            layer.attend(q, k, v, scale=self.shape[2] ** -0.5)
            seconds.append(time.perf_counter() - begin)
            layer.forget_undo()
        return seconds

    @torch.no_grad()
    def calls(self) -> float:
        """Return the Python calls of one step, a layer."""
        count = 0

        def profile(frame: FrameType, event: str, argument: object) -> None:
            nonlocal count
            count += event == "call" and frame.f_code.co_filename.startswith(PACKAGE)

        for layer in self.layers:
            q, k, v = self.inputs(1)
            sys.setprofile(profile)
            layer.attend(q, k, v, scale=self.shape[2] ** -0.5)
            sys.setprofile(None)
            layer.forget_undo()
        return count / len(self.layers)


def measure(recipe: str, prompt: int, steps: int, dtype: torch.dtype) -> dict[str, object]:
    """Return the figures of a recipe."""
    layers = Steps(recipe, prompt, dtype)
    in_kernel = 0.0
    run = cpu_runtime.Kernel.run

    def timed(*args):
        nonlocal in_kernel
        begin = time.perf_counter()
        out = run(*args)
        in_kernel += time.perf_counter() - begin
        return out

    total, python = [], []
    with patch.object(cpu_runtime.Kernel, "run", timed):
        for _ in range(8):  # kernels are compiled
            layers.run(1)
        for _ in range(steps):
            in_kernel = 0.0
            spent = sum(layers.run(1))
            total.append(spent)
            python.append(spent - in_kernel)
    each = 1e6 / len(layers.layers)
    return {
        "dtype": str(dtype).removeprefix("torch."),
        "recipe": recipe,
        "calls": statistics.median(layers.calls() for _ in range(16)),
        "us": each * statistics.median(total),
        "python_us": each * statistics.median(python),
        "least_python_us": each * min(python),
    }


def main() -> None:
    options = record.options(__doc__, prompt=512, steps=300, recipes=RECIPES, result="calls")
    rows = []
    for dtype in (torch.float32, torch.bfloat16):
        for recipe in options.recipes:
            row = measure(recipe, options.prompt, options.steps, dtype)
            rows.append(row)
            print(
                f"{row['dtype']:>9} {recipe:>10}: {row['calls']:4.0f} calls, {row['us']:6.1f} us a "
                f"layer and step, {row['python_us']:6.1f} outside kernels "
                f"(least {row['least_python_us']:.1f})"
            )
    environment = record.environment(prompt=options.prompt, steps=options.steps)
    record.write(options.result, {"environment": environment, "rows": rows})


if __name__ == "__main__":
    main()
