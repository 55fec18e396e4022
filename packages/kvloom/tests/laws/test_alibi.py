"""ALiBi: what is stored keeps its distance, whatever was dropped, packed, padded or taken back."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import naive
import probe
from kvloom.cache.layer import LayerCache
from kvloom.kernels.attend import reference as ref
from kvloom.positions.alibi import Alibi, positions
from kvloom.recipe.resolve import resolve
from sampling import slow_except
from steps import SCALE, draw, feed, unpacked

SLOPES = torch.tensor([0.5, 0.02, 0.1, 0.25])
BY_AGE = ("full", "window:tokens=20", "kivi:group=32,residual=32", "rtn:group=16")
SINKS = ("streaming:tokens=24,sinks=4", "streaming:tokens=5,sinks=4")
BY_SCORE = (
    "h2o:tokens=24",
    "h2o:tokens=70",
    "keyformer:tokens=24,noise=none",
    "snapkv:tokens=24,window=8",
    "minikv:bits=8,group=16,residual=32",
    "minikv-snap:bits=8,window=8,residual=32",
)
RENUMBERED = (
    "streaming:tokens=24,sinks=4,positions=renumbered",
    "h2o:tokens=24,positions=renumbered",
    "h2o:tokens=24,limit=40,positions=renumbered",
    "snapkv:tokens=24,window=8,positions=renumbered",
)
DRAFTED = (
    "kivi:group=32,residual=32",
    "streaming:tokens=24,sinks=4",
    "snapkv:tokens=24,window=8",
    "minikv:bits=8,group=16,residual=32",
    "streaming:tokens=24,sinks=4,positions=renumbered",
    "h2o:tokens=24,limit=40,positions=renumbered",
)
"""By default, those with every part of a cache between them."""
SIZES = [50, 1, 1, 1, 9, 1, 1, 30, 1]
TOKENS = sum(SIZES)


def fresh(name):
    return LayerCache(resolve(name), "layer 0", 0, 1)


def stored(cache):
    """All that a step of this cache attends to in the past, [B, Hk, N, D]."""
    if probe.in_slots(cache):
        return probe.tokens(cache).in_order()[:2]
    tokens = probe.tokens(cache)
    held = [[unpacked(side)] for side in (tokens.keys, tokens.values) if len(side)]
    sinks = probe.sinks(cache)
    if sinks is not None and sinks.keys is not None:
        held = [
            [sinks.keys, *(held[0] if held else [])],
            [sinks.values, *(held[1] if held else [])],
        ]
    return [torch.cat(parts, dim=2) for parts in held] or None


@pytest.mark.sample
@pytest.mark.parametrize(
    ("name", "padded"),
    [(name, False) for name in BY_AGE + SINKS + BY_SCORE + RENUMBERED]
    + [(n, True) for n in BY_AGE + BY_SCORE],
)
def test_every_step_is_attention_at_the_tokens_own_distances(name, padded):
    """The oracle finds out which tokens are held by looking for their keys among all keys."""
    q, k, v = draw(0, TOKENS, batch=2, hq=4, hk=2)
    visible = torch.ones(2, TOKENS, dtype=torch.bool)
    if padded:
        visible[1, :17] = visible[0, 62:66] = (
            False  # a padded first prompt, and a padded second one
        )
    k, v = (x.masked_fill(~visible[:, None, :, None], 0.0) for x in (k, v))
    place = (visible.cumsum(-1) - 1).numpy()
    cache, at = fresh(name), 0
    for t in SIZES:
        now = slice(at, at + t)
        past = stored(cache) if at else None
        out = feed(
            cache, *(x[:, :, now] for x in (q, k, v)), None, visible if padded else None, SCALE,
            None, SLOPES,
        )  # fmt: skip
        keys, values = k[:, :, now], v[:, :, now]
        index = torch.arange(at, at + t).expand(2, 2, -1)
        if past is not None:
            index = torch.cat([torch.cdist(past[0], k[:, :, :at]).argmin(-1), index], dim=-1)
            keys, values = torch.cat([past[0], keys], dim=2), torch.cat([past[1], values], dim=2)
        at += t
        distance = (
            np.take_along_axis(place[:, None], index.numpy(), 2) - place[:, None, at - 1 : at]
        )
        if name in RENUMBERED:
            distance = np.arange(1 - distance.shape[2], 1) + 0 * distance
        expected, _ = naive.attention(
            *(x.double().numpy() for x in (q[:, :, now], keys, values)),
            SCALE,
            causal=True,
            visible=np.take_along_axis(visible[:, None].numpy(), index.numpy(), 2),
            bias=SLOPES.double().numpy()[:, None] * distance.repeat(2, axis=1),
        )
        seen = visible[:, None, now].expand(2, 4, -1).numpy()  # padding rows may hold anything
        np.testing.assert_allclose(out.double().numpy()[seen], expected[seen], rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", slow_except([*BY_AGE, *SINKS, *BY_SCORE, *RENUMBERED], *DRAFTED))
@pytest.mark.parametrize("prompt", [5, 50])
def test_a_rejected_draft_leaves_no_trace(name, prompt):
    q, k, v = draw(0, prompt + 5, batch=2, hq=4, hk=2)
    caches = []
    for drafted in (prompt + 5, prompt + 2):
        cache = fresh(name)
        feed(cache, *(x[:, :, :prompt] for x in (q, k, v)), slopes=SLOPES)
        probe.record(cache, True)
        feed(cache, *(x[:, :, prompt:drafted] for x in (q, k, v)), slopes=SLOPES)
        cache.crop(drafted - prompt - 2)
        probe.record(cache, False)
        caches.append(cache)
    new = draw(1, 10, batch=2, hq=4, hk=2)
    outputs = [feed(cache, *new, [1, 1, 5, 1, 1, 1], slopes=SLOPES) for cache in caches]
    torch.testing.assert_close(*outputs, rtol=0, atol=2e-6)


@pytest.mark.parametrize("name", slow_except([*BY_AGE, *SINKS, *BY_SCORE, *RENUMBERED], *DRAFTED))
def test_beams_in_the_middle_of_a_draft(name):
    beams = torch.tensor([2, 0, 0])
    qkv, draft, new = (draw(i, n, batch=3, hq=4, hk=2) for i, n in enumerate((50, 3, 6)))
    visible = torch.ones(3, 58, dtype=torch.bool)
    visible[0, 20:29] = visible[1, 45:48] = (
        False  # gaps: the rows' positions differ by more than a shift
    )
    outputs = []
    for before in (True, False):  # the beams move before the draft is taken back, or after
        cache = fresh(name)
        move = lambda cache=cache: cache.map(lambda x: x.index_select(0, beams))  # noqa: E731
        feed(cache, *qkv, visible=visible[:, :50], slopes=SLOPES)
        probe.record(cache, True)
        feed(cache, *draft, visible=visible[:, :53], slopes=SLOPES)
        if before:
            move()
        cache.crop(1)
        if not before:
            move()
        probe.record(cache, False)
        outputs.append(feed(cache, *new, [1, 1, 4], visible=visible[beams], slopes=SLOPES))
    torch.testing.assert_close(*outputs, rtol=0, atol=2e-6)


def test_bias_by_hand():
    # the second row begins with padding; slopes 1/2 for head 0, 1/4 for head 1
    position = positions(torch.tensor([[True] * 4, [False, True, True, True]]), 2, 4, "cpu")
    assert position.tolist() == [[[0, 1, 2, 3]], [[-1, 0, 1, 2]]]
    alibi = Alibi(torch.tensor([0.5, 0.25]), position)
    shared = alibi.bias(torch.tensor([[[1, 3]]]))
    assert shared.tolist() == [[[-1.0, 0.0], [-0.5, 0.0]], [[-1.0, 0.0], [-0.5, 0.0]]]
    by_head = alibi.bias(torch.tensor([[[0], [2]], [[2], [1]]]))
    assert by_head.tolist() == [[[-1.5], [-0.25]], [[-0.5], [-0.5]]]
    assert positions(None, 2, 3, "cpu").tolist() == [[[0, 1, 2]]] * 2


def test_precise_at_a_hundred_thousand_tokens():
    """Counted from the newest token, whose neighbours matter, not from the first."""
    n = 100_000
    q, k, v = draw(0, 64, hq=4, hk=4)
    slopes = 2 ** -torch.tensor([0.5, 1.5, 2.5, 3.5])  # no bias is exact in fp32
    alibi = Alibi(slopes, positions(None, 1, n, "cpu"))
    bias = alibi.bias(torch.arange(n - 64, n).expand(1, 1, -1))
    got = ref.attend_exact(q[:, :, -1:], k, v, SCALE, bias=bias).out
    exact = slopes.double()[:, None].numpy() * np.arange(n - 64, n)
    want, _ = naive.attention(
        *(x.double().numpy() for x in (q[:, :, -1:], k, v)), SCALE, bias=exact[None]
    )
    np.testing.assert_allclose(got.double().numpy(), want, rtol=0, atol=1e-6)
