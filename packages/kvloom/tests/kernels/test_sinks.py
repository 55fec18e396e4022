"""Attention sinks: one more logit of each head, without a value, in every way to attend."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import naive
from kv_views import FP32, agrees, channel, chosen_agree, cpu_attend, draw, hidden, mapped, token
from kvloom.cache import LayerCache
from kvloom.kernels.attend import reference as ref
from kvloom.kernels.attend.cpu import attend as cpu
from kvloom.kernels.attend.regions import KVView, Region, Spans
from steps import RECIPES
from steps import draw as draw_step

FORMS = {
    "exact": (None, None, 16, FP32),
    "small": (channel(2, 32), token(2, 32), 32, FP32),
    "rotated": (channel(2, 32, rotation="head"), mapped(3, 16, rotation="head"), 48, FP32),
}
SINKS = torch.tensor([0.5, -30.0, 40.0, 2.0])


@pytest.mark.parametrize("form", ["exact", "small"])
@pytest.mark.parametrize(("t", "causal"), [(1, False), (3, True)])
def test_dense_tokens(form, t, causal):
    for n in (t, 130, 300):
        options = {"causal": causal, "sinks": SINKS}
        agrees(FORMS[form], 4, 2, t, n, (n - t, n - t), **options)
        agrees(FORMS[form], 4, 2, t, n, (n - t, n - t), visible=hidden(2, 1, n), **options)


def test_no_tokens_leave_the_sink_alone():
    agrees(FORMS["exact"], 4, 2, 1, 0, (0, 0), sinks=SINKS)


def test_rotated_sums():
    agrees(FORMS["rotated"], 4, 2, 1, 200, (160, 180), sinks=SINKS)


def test_chosen_tokens_behind_first_ones():
    for first in (0, 5):
        chosen_agree(FORMS["small"], (4, 2, 2), 300, 40, 256, first, sinks=SINKS)


@pytest.mark.parametrize("threads", [1, 4])
def test_one_sink_for_all_tasks_and_passes(threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        agrees(FORMS["exact"], 4, 1, 1, 20_000, (0, 0), b=1, sinks=SINKS)
        q = draw((1, 4, 1, 16), 0)
        keys, values = (tuple(draw((1, 2, n, 16), seed) for n in (40, 200)) for seed in (1, 2))
        regions = [Region.exact(*pair, step_tokens=1) for pair in zip(keys, values, strict=True)]
        assert len(cpu.kernel_calls(regions)) == 2
        got = cpu_attend(q, regions, 0.3, sink_logits=SINKS)
        want = ref.attend_regions(q, regions, 0.3, sink_logits=SINKS)
        torch.testing.assert_close(got.out, want.out, rtol=0, atol=2e-6)
        torch.testing.assert_close(got.lse, want.lse, rtol=2e-6, atol=2e-6)
    finally:
        torch.set_num_threads(before)


def test_heads_with_different_numbers_of_tokens():
    q, k, v = draw((1, 4, 1, 16), 0), draw((1, 1, 30, 16), 1), draw((1, 1, 30, 16), 2)
    none = torch.empty(1, 2, 0, 16)
    where = Spans(torch.tensor([[[0, 10], [10, 20]]]), 20)
    regions = [Region.exact(none, none), Region(KVView(None, k), KVView(None, v), where)]
    got = cpu_attend(q, regions, 0.3, sink_logits=SINKS)
    for h in range(4):
        own = slice(10 * (h // 2), 10 + 20 * (h // 2))
        head = [x.double().numpy() for x in (q[:, h : h + 1], k[:, :, own], v[:, :, own])]
        out, lse = naive.attention(*head, 0.3, sinks=SINKS[h : h + 1])
        np.testing.assert_allclose(got.out[:, h : h + 1].double(), out, rtol=0, atol=2e-6)
        np.testing.assert_allclose(got.lse[:, h : h + 1].double(), lse, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize(("t", "n", "causal"), [(1, 7, False), (9, 9, True), (4, 9, True)])
@pytest.mark.parametrize("padded", [False, True])
def test_torchs_fused_attention(t, n, causal, padded):
    q, k, v = draw((2, 4, t, 16), 0), draw((2, 2, n, 16), 1), draw((2, 2, n, 16), 2)
    visible = torch.arange(n) >= torch.tensor([0, 2])[:, None, None] if padded else None
    got = ref.sdpa(q, k, v, 0.3, causal=causal, visible=visible, sink_logits=SINKS)
    arrays = [x.double().numpy() for x in (q, k, v)]
    mask = None if visible is None else visible.numpy()
    out, _ = naive.attention(*arrays, 0.3, causal=causal, visible=mask, sinks=SINKS.numpy())
    real = np.isfinite(out) if visible is None else np.ones_like(out, bool)
    if padded and causal:  # rows of padding see themselves in torch
        real[1, :, : max(0, 2 - (n - t))] = False
    np.testing.assert_allclose(got.double().numpy()[real], out[real], rtol=0, atol=2e-6)


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_a_sink_shrinks_the_output_of_every_recipe(recipe):
    """Without and with sinks, what a layer keeps is the same, and outputs differ by a factor."""
    caches = [LayerCache(recipe, "layer 0", 0, 1) for _ in range(2)]
    q, k, v = draw_step(0, 90, hq=4, hk=2)
    for lo, hi in ((0, 80), (80, 81), (81, 86), *((i, i + 1) for i in range(86, 90))):
        step = [x[:, :, lo:hi] for x in (q, k, v)]
        plain = caches[0].attend(*step, scale=0.3)
        sunk = caches[1].attend(*step, scale=0.3, sink_logits=SINKS)
        factor = (sunk / plain).median(dim=-1, keepdim=True).values
        torch.testing.assert_close(sunk, plain * factor, rtol=0, atol=1e-5)
        assert (factor[:, 0] < 1).all()
        assert (factor[:, 2] < 1e-6).all()
        assert factor[:, 1].min() > 0.999
    assert caches[0].nbytes == caches[1].nbytes
