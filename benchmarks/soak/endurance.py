"""Up to a million random tokens in one layer: memory is flat, outputs are those of a new layer.

Memory is what this process has for itself, without files. Its slope is compared with that of the
bytes that the cache reports: the difference is what leaks. The last steps are compared with
attention in float64 over the tokens that the layer holds and reads (tools/held.py), and with a new
layer that was given the tokens held alone, where the recipe keeps exact tokens, or all of them.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from held import CheckedLayer, Findings
from kvloom.cache.layer import LayerCache
from kvloom.cache.step import Queries, StepInputs
from kvloom.kernels import dispatch
from kvloom.recipe.resolve import resolve

from .tally import Tally

TOKENS, D, PROMPT, LAST = 1_000_000, 16, 1_000, 20
RECIPES = {  # with the tokens of a step
    "streaming:tokens=256": 1,
    "h2o:tokens=256": 1,
    "clusterkv:tokens=256,size=40,full_layers=0,tier=file": 1,
    "near-lossless:group=16": 250,
}
LEAK = 1.0  # bytes a token


def run_all(tally: Tally) -> None:
    """Feed a layer of each recipe."""
    generator = torch.Generator().manual_seed(tally.seed)
    keys, values = (torch.randn(1, 1, TOKENS + LAST, D, generator=generator) for _ in range(2))
    backend = "auto" if tally.seconds > 120 else "ref"  # kernels take a while to compile
    with torch.no_grad(), dispatch.use(backend):
        for number, (recipe, tokens) in enumerate(RECIPES.items()):
            with tally.case(f"endurance of {recipe}", limit_s=4 * 3600):
                endure(tally, recipe, tokens, keys, values, (number + 1) / len(RECIPES))


def endure(
    tally: Tally, recipe: str, tokens: int, keys: Tensor, values: Tensor, until: float
) -> None:
    """Feed one layer, in steps of so many tokens, as long as the budget lasts."""
    layer = LayerCache(resolve(recipe))
    layer.observe()
    step(layer, keys, values, PROMPT)
    samples = []
    every = max(tokens, 1_000)
    for _ in tally.numbers((TOKENS - PROMPT) // every, until):
        for _ in range(every // tokens):
            step(layer, keys, values, tokens)
        samples.append((layer.seen, own_bytes(), layer.nbytes - tier_bytes(layer)))
    name, seen = recipe.partition(":")[0], layer.seen
    tally.figures[f"{name} tokens"] = seen
    if seen >= 200_000:  # of fewer tokens, what the allocator keeps is more than what a leak adds
        warm = np.array(samples[len(samples) // 3 :], dtype=float)
        memory, reported = (np.polyfit(warm[:, 0], warm[:, i], 1)[0] for i in (1, 2))
        tally.figures[f"{name} B/token"] = round(float(memory), 2)
        assert memory <= reported + LEAK, f"{memory:.2f} bytes a token, {reported:.2f} reported"
    findings = Findings()
    checked = CheckedLayer(layer, findings, None)
    checked.give(keys[:, :, :seen], values[:, :, :seen])
    others = fresh(recipe, layer, keys, values)
    for place in range(seen, seen + LAST):
        inputs = step_inputs(keys, values, place, 1)
        checked.update(inputs.k, inputs.v)
        out = checked.attend(inputs)
        if others is not None and place == seen:
            off = float((out - others.run(inputs)).abs().max())
            assert off < 1e-5, f"a new cache of the tokens held differs by {off:.1e}"
    assert not findings.wrong, findings.wrong
    assert findings.attention < 2.0**-22, findings
    assert findings.stored < 1e-6, findings


def fresh(recipe: str, layer: LayerCache, keys: Tensor, values: Tensor) -> LayerCache | None:
    """Return a new layer with the tokens that a layer holds; None if it does not read all alike."""
    if layer.recipe.recall is not None:
        return None
    kept = layer.logical()[0, 0].sort().values
    plain = layer.recipe if layer.recipe.keep is None else resolve("full")
    new = LayerCache(plain)
    k, v = keys[:, :, kept], values[:, :, kept]
    new.prefill(StepInputs(Queries(k[:, :, -1:], D**-0.5), k, v))
    return new


def step_inputs(keys: Tensor, values: Tensor, begin: int, tokens: int) -> StepInputs:
    """Return the inputs of a step of the tokens from `begin` on; a token's query is its value."""
    k, v = (x[:, :, begin : begin + tokens] for x in (keys, values))
    return StepInputs(Queries(v.contiguous(), D**-0.5), k.contiguous(), v.contiguous())


def step(layer: LayerCache, keys: Tensor, values: Tensor, tokens: int) -> None:
    """Feed the next tokens."""
    layer.run(step_inputs(keys, values, layer.seen, tokens))


def tier_bytes(layer: LayerCache) -> int:
    """Return the bytes of a layer's tier."""
    retriever = layer._state.retriever
    store = None if retriever is None else retriever.store
    return 0 if store is None else sum(buffer.nbytes for buffer in store.buffers)


def own_bytes() -> int:
    """Return the memory that this process uses and no file has."""
    ctypes.CDLL(None).malloc_trim(0)  # what was freed goes back to the system
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("RssAnon:"))
