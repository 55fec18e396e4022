"""RPTQ and SmoothQuant as SKVQ's harness runs them (arXiv:2405.06219, section 4.2)."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import naive
import naive_recipes as rules
import probe
from kvloom.cache.layer import LayerCache
from kvloom.positions.rope import Rope
from kvloom.recipe.resolve import resolve
from kvloom.store import LayerEncoding, LayerFacts, Packed
from steps import draw

D = 32
SCALE = D**-0.5
HEADS = [(2, 2), (4, 2), (4, 1)]  # MHA, GQA, MQA
ROPE = Rope(10000.0 ** -(torch.arange(0, D, 2) / D))


def calibrated(seed: int, hk: int, fmt: Packed) -> LayerEncoding:
    """What calibration might say of one side of a layer."""
    g = torch.Generator().manual_seed(seed)
    group_of, divisor = torch.arange(hk * D) // 16, None
    if fmt.reorder:  # groups of unequal sizes over all heads
        group_of = torch.randint(hk * D // 16, (hk * D,), generator=g)
    if fmt.smooth:
        divisor = 0.5 + 3 * torch.rand(hk, D, generator=g)
    return LayerEncoding(fmt.encoding, hk, D, group_of.view(hk, D), None, divisor)


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("bits", [1.5, 2, 4])
@pytest.mark.parametrize("prompt", [1, 21])
@pytest.mark.parametrize("name", ["rptq", "smoothquant"])
def test_skvqs_baselines_store_what_its_harness_stores(name, prompt, bits, heads):
    seed, hk = int(10 * bits) + prompt, heads[1]
    recipe = resolve(f"{name}:bits={bits},group=16")
    formats = recipe.store.keys, recipe.store.values
    sides = [calibrated(seed + i, hk, fmt) for i, fmt in enumerate(formats)]
    layer = LayerCache(recipe, facts=LayerFacts(*sides, ROPE))
    q, k, v = draw(seed, prompt + 12, 2, *heads, D)
    for n in [prompt, *range(prompt + 1, prompt + 13)]:
        part = slice(layer.seen, n)
        layer.attend(q[:, :, part], k[:, :, part], v[:, :, part], scale=SCALE)
    tokens = probe.tokens(layer)
    assert len(tokens.keys.tail) == len(tokens.values.tail) == 0  # no window
    asked = torch.randn(2, heads[0], 1, D)
    out = layer.attend(asked, k[:, :, :1], v[:, :, :1], scale=SCALE)
    inv_freq = ROPE.inv_freq.double().numpy()
    for b in range(2):
        stored = []
        for x, side, freq in ((k, sides[0], inv_freq), (v, sides[1], None)):
            divisor = 1.0 if side.divisor is None else side.divisor.double().numpy()
            paper = rules.SkvqBaseline(bits, side.group_of.numpy(), divisor, freq, "fp16")
            stored.append(paper.fake(x[b].double().numpy()))
        here = [x[b, :, :1].double().numpy() for x in (k, v)]
        keys, values = (np.concatenate([s, x], 1)[None] for s, x in zip(stored, here, strict=True))
        want, _ = naive.attention(asked[b : b + 1].double().numpy(), keys, values, SCALE)
        np.testing.assert_allclose(out[b].double().numpy(), want[0], rtol=0, atol=3e-6)
