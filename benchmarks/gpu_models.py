"""Whole models with random weights, and one run of a recipe on them.

A run feeds a prompt of P tokens, times `steps` single tokens, feeds all but `steps` of the D new
tokens as one stretch (not timed) and times `steps` more: the cost of a step changes evenly in
between, so D of them take D times the mean of the two ends. Feeding D tokens one by one would take
minutes a row; `latency s` is therefore computed, and `tokens/s` says how fast the ends were.

", recorded" after a recipe: its steps are replayed by `kvloom.cuda_graphs`. As many steps are timed
as tokens wait at most, so they include one that runs, one that is recorded and one that packs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache, QuantizedCache, StaticCache

import kvloom
from gpu_clock import Bench
from kvloom.hf import cuda_graphs, geometry, recorded_steps
from kvloom.recipe import resolve
from kvloom_lab.bench import transformers_caches
from kvloom_lab.models import random_llama
from kvloom_lab.workload.layers import ModelShape

# Tokens, of all rows, that are fed at once between the timed ends.
_STRETCH = 1 << 15
RECORDED = ", recorded"
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
    with _replayed(bench, shape, recipe) as recorded:
        return _run(bench, shape, recipe, prompt, new, batch, recorded or steps)


def _run(
    bench: Bench, shape: str, recipe: str, prompt: int, new: int, batch: int, steps: int
) -> Run:  # fmt: skip
    fresh = cache_of(bench, shape, recipe.removesuffix(RECORDED))
    if bench.dry:
        prompt, new, batch, steps = min(prompt, 40), 6, min(batch, 2), 1
    steps = min(steps, new // 2)

    def feed(tokens: int, cache: Any, rows: int = batch) -> None:
        _feed(bench, shape, cache, rows, tokens)

    bench.free()
    if not bench.dry:  # kernels are compiled, and cuBLAS set up, on a short prompt
        _warm_up(bench, shape, fresh, min(prompt, 512), min(batch, 4), steps)
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
    kept = _nbytes(cache)
    held = bench.held_gb() - before
    del cache
    bench.free()
    return Run(times[1] - times[0], ends[0], ends[1], peak, prompt, new, batch, kept / 1e9, held)


@contextmanager
def _replayed(bench: Bench, shape: str, recipe: str) -> Iterator[int | None]:
    """Replay the steps of a recipe that ends with RECORDED.

    Yields how many steps to time; None for other recipes, whose steps are not replayed.
    """
    if not recipe.endswith(RECORDED) or bench.dry:
        yield None
        return
    with kvloom.cuda_graphs(model(bench, shape)) as graphs:
        yield recorded_steps.ROOM
        if graphs.refused:
            raise RuntimeError(graphs.refused)


def _feed(bench: Bench, shape: str, cache: Any, rows: int, tokens: int) -> None:
    made = model(bench, shape)
    ids = torch.randint(0, made.config.vocab_size, (rows, tokens), device=bench.device)
    seen = int(cache.get_seq_length())
    place = torch.arange(seen, seen + tokens, device=bench.device)[None]
    made(
        input_ids=ids, position_ids=place, past_key_values=cache, use_cache=True, logits_to_keep=1
    )  # fmt: skip


def _warm_up(
    bench: Bench, shape: str, fresh: Callable[[], Any], prompt: int, rows: int, steps: int
) -> None:
    """Compile the kernels of a prompt and its steps; recorded ones need two rounds of `steps`.

    Packing needs one kernel after an odd number of tokens, and another after an even one.
    """
    for first in (prompt, prompt - 1):
        cache = fresh()
        for tokens in (first, *[1] * (2 if steps < recorded_steps.ROOM else 2 * steps + 2)):
            _feed(bench, shape, cache, rows, tokens)
        del cache
        bench.free()


@dataclass
class Full:
    """How fast as many sequences decode as fit into the memory."""

    batch: int
    step: float  # seconds
    kept: float  # GB of the cache
    peak_gb: float

    def figures(self) -> dict[str, float]:
        """As a row has them."""
        return {
            "batch": self.batch, "ms a step": 1e3 * self.step, "tokens/s": self.batch / self.step,
            "cache GB": self.kept, "peak GB": self.peak_gb,
        }  # fmt: skip


@torch.inference_mode()
def decode_in_full_memory(
    bench: Bench, shape: str, recipe: str, prompt: int, rows: int = 8
) -> Full:
    """Decode with as many sequences as fit; `rows` are read, and the others are copies of them.

    Raises torch.OutOfMemoryError if nothing fits beside 20 GB for activations and fragments.
    """
    for spare_gb in (5.0, 10.0):
        with suppress(torch.OutOfMemoryError):
            return _decode_in_full_memory(bench, shape, recipe, prompt, rows, spare_gb)
        bench.free()
    return _decode_in_full_memory(bench, shape, recipe, prompt, rows, 20.0)


def _decode_in_full_memory(
    bench: Bench, shape: str, recipe: str, prompt: int, rows: int, spare_gb: float
) -> Full:
    with _replayed(bench, shape, recipe) as recorded:
        fresh = cache_of(bench, shape, recipe.removesuffix(RECORDED))
        steps = recorded or 16
        if bench.dry:
            prompt, rows, steps = 40, 2, 1
        else:
            _warm_up(bench, shape, fresh, 512, 4, steps)
        cache = fresh()
        _feed(bench, shape, cache, rows, prompt)
        bench.free()
        token = geometry(model(bench, shape)).token_nbytes()
        # tensors grow by a sixteenth; the tokens to come are exact for a while
        each = _nbytes(cache) * 17 / 16 + rows * steps * token
        times = max(1, int((bench.room_gb() + _nbytes(cache) / 1e9 - spare_gb) / (each / 1e9)))
        cache.batch_repeat_interleave(times)
        bench.free()
        for _ in range(1 if recorded is None else 2):
            _feed(bench, shape, cache, rows * times, 1)
        begin = bench.now()
        for _ in range(steps):
            _feed(bench, shape, cache, rows * times, 1)
        step = (bench.now() - begin) / steps
        found = Full(rows * times, step, _nbytes(cache) / 1e9, bench.peak_gb())
        del cache
        bench.free()
        return found


def _nbytes(cache: Any) -> int:
    ours = isinstance(cache, kvloom.Cache)
    return cache.nbytes if ours else transformers_caches.nbytes(cache)


@torch.inference_mode()
def static_ms(bench: Bench, shape: str, prompt: int, new: int, batch: int) -> float:
    """Milliseconds a step of transformers' StaticCache, replayed as a CUDA graph."""
    made = model(bench, shape)
    cache_of(bench, shape, "DynamicCache")  # the model's attention is transformers' own
    cache = StaticCache(config=made.config, max_cache_len=prompt + new)
    _feed(bench, shape, cache, batch, prompt)
    ids = torch.zeros(batch, 1, dtype=torch.long, device=bench.device)

    def step() -> Any:
        return made(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)

    step()
    replay, _ = cuda_graphs.record(bench.device, step)
    begin = bench.now()
    for _ in range(new - 2):
        replay()
    return 1e3 * (bench.now() - begin) / (new - 2)


def fits(bench: Bench, shape: str, recipe: str, tokens: int, room_gb: float) -> int:
    """How many sequences of so many tokens a recipe's cache has room for in so many GB."""
    name = "full" if recipe == "DynamicCache" else recipe.removesuffix(RECORDED)
    each = resolve(name).nbytes(tokens, geometry(model(bench, shape)))
    return max(1, int(room_gb * 1e9 / each))
