"""kvloom's overhead in `generate()`: tokens/s, and Python time per layer and step.

`generate()` of the reference model with transformers' DynamicCache and with recipes, alternately,
after a prompt; the time of a token is the time between two calls of a streamer. All use the same
model object, detached for DynamicCache: the memory addresses of a second copy's weights change the
time by up to 3%. `python_us` is the time in kvloom's attention function and in a layer's cache,
without the time in compiled kernels, the median over steps. It comes from separate runs, because
measuring it takes time.

    python benchmarks/overhead.py
    python benchmarks/overhead.py --prompt 4096 --recipes full --repeats 4
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from itertools import pairwise
from unittest.mock import patch

import torch
from transformers import DynamicCache

import kvloom
import kvloom_lab
import record
from kvloom.hf.routed_layer import RoutedLayer
from kvloom.kernels import cpu_runtime

STOCK = "DynamicCache"


class Clock:
    """A streamer that records the time of each token, and the time spent in wrapped functions."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.spent: list[dict[str, float]] = [{}]

    def put(self, value: object) -> None:
        self.times.append(time.perf_counter())
        self.spent.append({})

    def end(self) -> None:
        pass

    def around(self, name: str, fn: Callable) -> Callable:
        def timed(*args, **kwargs):
            begin = time.perf_counter()
            out = fn(*args, **kwargs)
            spent = self.spent[-1]
            spent[name] = spent.get(name, 0.0) + time.perf_counter() - begin
            return out

        return timed


def tokens(model, cache, prompt: int, new: int, clock: Clock) -> None:
    ids = 3 + torch.arange(prompt)[None] % (model.config.vocab_size - 3)
    model.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), past_key_values=cache,
        max_new_tokens=new, min_new_tokens=new, do_sample=False, streamer=clock,
    )  # fmt: skip


def cache(model, name: str):
    """Return a recipe's cache, or detach the model and return transformers' DynamicCache."""
    if name != STOCK:
        return kvloom.Cache(model, name)
    if getattr(model, "_kvloom", None) is not None:
        kvloom.detach(model)
    return DynamicCache(config=model.config)


def python_us(model, recipe: str, prompt: int, new: int) -> float:
    """Return the microseconds per layer and step outside compiled kernels."""
    clock = Clock()
    with (
        patch.object(cpu_runtime.Kernel, "run", clock.around("kernel", cpu_runtime.Kernel.run)),
        patch.object(RoutedLayer, "update", clock.around("kvloom", RoutedLayer.update)),
        patch.object(RoutedLayer, "attend", clock.around("kvloom", RoutedLayer.attend)),
    ):
        tokens(model, kvloom.Cache(model, recipe), prompt, new, clock)
    steps = [s["kvloom"] - s["kernel"] for s in clock.spent[4:-1]]
    return 1e6 * statistics.median(steps) / model.config.num_hidden_layers


def main() -> None:
    options = record.options(
        __doc__, prompt=512, new_tokens=64, repeats=20, recipes=["full", "kivi", "window"]
    )
    rows = []
    for dtype in (torch.float32, torch.bfloat16):
        model = kvloom_lab.reference_model(dtype)
        times: dict[str, list[float]] = {name: [] for name in (STOCK, *options.recipes)}
        for i in range(options.repeats + 1):
            for name in times:
                clock = Clock()
                tokens(model, cache(model, name), options.prompt, options.new_tokens, clock)
                if i:  # kernels are compiled in the first run
                    times[name] += [b - a for a, b in pairwise(clock.times[2:])]
        median = {name: statistics.median(x) for name, x in times.items()}
        for name in times:
            row = {
                "dtype": str(dtype).removeprefix("torch."),
                "name": name,
                "ms": 1e3 * median[name],
                "least_ms": 1e3 * min(times[name]),
                "speed_ratio": median[STOCK] / median[name],
            }
            if name != STOCK:
                row["python_us"] = python_us(model, name, options.prompt, options.new_tokens)
            rows.append(row)
            print(
                f"{row['dtype']:>9} {name:>14}: {row['ms']:6.2f} ms per token, least "
                f"{row['least_ms']:6.2f}, {row['speed_ratio']:.2f}x DynamicCache's speed"
                + (f", {row['python_us']:.0f} us of Python per layer" if "python_us" in row else "")
            )
    name = "overhead" if options.prompt == 512 else f"overhead_{options.prompt}"
    record.write(name, {"environment": record.environment(prompt=options.prompt), "rows": rows})


if __name__ == "__main__":
    main()
