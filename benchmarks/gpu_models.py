"""Whole models with random weights, and one run of a recipe on them.

A run feeds a prompt of P tokens, times `steps` single tokens, feeds all but `steps` of the D new
tokens as one stretch (not timed) and times `steps` more: the cost of a step changes evenly in
between, so D of them take D times the mean of the two ends. Feeding D tokens one by one would take
minutes a row; `latency s` is therefore computed, and `tokens/s` says how fast the ends were.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache, QuantizedCache

import kvloom
from gpu_clock import Bench
from kvloom.hf import geometry
from kvloom.recipe import resolve
from kvloom_lab.bench import transformers_caches
from kvloom_lab.models import random_llama
from kvloom_lab.workload.layers import ModelShape

# Tokens, of all rows, that are fed at once between the timed ends.
_STRETCH = 1 << 15
SHAPES = {
    "Llama-3-8B": ModelShape(32, 8, 128, 1, torch.bfloat16, 32, 4096, 14336, 128256),
    "Llama-2-7B": ModelShape(32, 32, 128, 1, torch.bfloat16, 32, 4096, 11008, 32000),
}
_POSITIONS = 1 << 20


def model(bench: Bench, name: str) -> Any:
    """The model of a shape; only one is held at a time."""
    if name not in bench.models:
        bench.models.clear()
        bench.free()
        shape = SHAPES[name]
        if bench.dry:
            heads = max(1, 4 * shape.kv_heads // shape.q_heads)
            shape = ModelShape(4, heads, 32, 1, torch.float16, 1, 128, 96, 199)
        torch.manual_seed(0)
        with bench.device:
            bench.models[name] = random_llama(shape, _POSITIONS)
    return bench.models[name]


@dataclass
class Run:
    """What one run took: seconds, GB, and the tokens fed."""

    prefill: float
    early: float  # seconds a step
    late: float
    peak_gb: float
    prompt: int
    new: int
    batch: int
    kept: float  # GB of the cache at the end, by its own count
    held: float  # GB that the allocator holds for the cache then

    @property
    def step(self) -> float:
        """Seconds a step, on the average."""
        return (self.early + self.late) / 2

    @property
    def latency(self) -> float:
        """Seconds for prompt and new tokens."""
        return self.prefill + self.new * self.step

    @property
    def tokens_s(self) -> float:
        """New tokens a second while decoding."""
        return self.batch / self.step

    @property
    def processed_s(self) -> float:
        """Prompt and new tokens a second, as the papers count throughput."""
        return self.batch * (self.prompt + self.new) / self.latency

    def figures(self) -> dict[str, float]:
        """As a row has them."""
        return {
            "batch": self.batch, "prefill s": self.prefill, "ms a step": 1e3 * self.step,
            "latency s": self.latency, "tokens/s": self.tokens_s, "peak GB": self.peak_gb,
            "cache GB": self.kept, "held GB": self.held,
        }  # fmt: skip


def cache_of(bench: Bench, shape: str, cache: str) -> Callable[[], Any]:
    """What makes an empty cache: "DynamicCache" or "QuantizedCache" of transformers, or a recipe.

    Under transformers' own, the model's attention is transformers' own, without cuDNN's, which
    plans anew for each number of tokens; "DynamicCache, torch's defaults" has it.
    """
    made = model(bench, shape)
    stock = cache.startswith(("DynamicCache", "QuantizedCache"))
    if stock and getattr(made, "_kvloom", None) is not None:
        kvloom.detach(made)
    torch.backends.cuda.enable_cudnn_sdp(not stock or cache.endswith("defaults"))
    if cache.startswith("DynamicCache"):
        return lambda: DynamicCache(config=made.config)
    if cache == "QuantizedCache":
        return lambda: QuantizedCache(backend="quanto", config=made.config, nbits=4)
    return lambda: kvloom.Cache(made, cache)


@torch.inference_mode()
def run(
    bench: Bench, shape: str, recipe: str, prompt: int, new: int, batch: int = 1, steps: int = 12
) -> Run:  # fmt: skip
    """One run; raises torch.OutOfMemoryError where it does not fit."""
    made, fresh = model(bench, shape), cache_of(bench, shape, recipe)
    if bench.dry:
        prompt, new, batch, steps = min(prompt, 40), 6, min(batch, 2), 1
    steps = min(steps, new // 2)

    def feed(tokens: int, cache: Any, rows: int = batch) -> None:
        ids = torch.randint(0, made.config.vocab_size, (rows, tokens), device=bench.device)
        made(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)

    bench.free()
    if not bench.dry:  # kernels are compiled, and cuBLAS set up, on a short prompt
        warm = fresh()
        for tokens in (min(prompt, 512), 1, 1):
            feed(tokens, warm, min(batch, 4))
        del warm
        bench.free()
    before = bench.held_gb()
    cache = fresh()
    times = [bench.now()]
    feed(prompt, cache)
    times.append(bench.now())
    ends = []
    for stretch in (0, new - 2 * steps - 2):
        while stretch > 0:  # so many at a time that activations take no more than a prompt's
            now = min(stretch, max(1, _STRETCH // batch))
            feed(now, cache)
            stretch -= now
        feed(1, cache)
        begin = bench.now()
        for _ in range(steps):
            feed(1, cache)
        ends.append((bench.now() - begin) / steps)
    peak = bench.peak_gb()
    kept = cache.nbytes if isinstance(cache, kvloom.Cache) else transformers_caches.nbytes(cache)
    held = bench.held_gb() - before
    del cache
    bench.free()
    return Run(times[1] - times[0], ends[0], ends[1], peak, prompt, new, batch, kept / 1e9, held)


def fits(bench: Bench, shape: str, recipe: str, tokens: int, room_gb: float) -> int:
    """How many sequences of so many tokens a recipe's cache has room for in so many GB."""
    each = resolve(recipe).nbytes(tokens, geometry(model(bench, shape)))
    return max(1, int(room_gb * 1e9 / each))
