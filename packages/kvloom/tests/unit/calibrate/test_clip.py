"""How far groups of channels are clipped: the search beside one that tries every factor."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import torch

import naive
from kvloom.calibrate.clip_search import (
    GRID,
    AttentionSample,
    ExactAttention,
    QuantizedGroups,
    search_clip,
)
from kvloom.hf.recording import AttentionInputs
from kvloom.positions.rope import Rope
from kvloom.store import LayerEncoding, Packed

GROUP_OF = torch.tensor([[0] * 10 + [1] * 6, [1] * 9 + [2] * 7])
ROPE = Rope(100.0 ** -(torch.arange(0, 16, 2) / 16))
AT = torch.arange(32).view(1, 1, -1)
SCALE = 0.25


def sample(seed=0, softcap=None, exact=(0, 0)) -> AttentionSample:
    """Two contexts of 32 tokens, 4 query heads on 2; a channel that is larger than the others."""
    g = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(2, h, 32, 16, generator=g) for h in (4, 2, 2))
    k[:, :, :, 3] *= 3
    return AttentionSample.of(AttentionInputs(q, k, v, SCALE, softcap), 16, exact)


def packed(bits, side="values") -> Packed:
    return Packed(
        bits, "token", 16, "fp32", span="layer", reorder=True, clip="group",
        pre_rope=side == "raw_keys",
    )  # fmt: skip


def bound_layer(fmt: Packed, divisor=None) -> LayerEncoding:
    return LayerEncoding(fmt.encoding, 2, 16, GROUP_OF, divisor=divisor)


def misses(given: AttentionSample, bits: float, side: str):
    """A function from factors of the groups to the error, straight from the definition."""
    q, k, v = (x.double().numpy() for x in (given.q, given.k, given.v))
    raw = ROPE.rotate(given.k, -AT).double() if side == "raw_keys" else given.k.double()

    @cache
    def back(b: int, alpha: float):
        x = v[b] if side == "values" else raw[b].numpy()
        return naive.mapped(x, bits, GROUP_OF.numpy(), clip=alpha)[0]

    def missed(alphas) -> float:
        total = 0.0
        for b in range(len(q)):
            x = np.zeros_like(k[b])
            for group, alpha in enumerate(alphas):
                here = np.broadcast_to((group == GROUP_OF).numpy()[:, None], x.shape)
                x[here] = back(b, float(alpha))[here]
            if side == "raw_keys":
                x = ROPE.rotate(torch.from_numpy(x)[None], AT)[0].numpy()
            pair = (k[b], x) if side == "values" else (x, v[b])
            total += naive.output_error(q[b], k[b], v[b], *pair, SCALE, given.rows.tolist(),
                                        given.exact, given.softcap)  # fmt: skip
        return total

    return missed


@pytest.mark.parametrize(
    ("bits", "side", "softcap", "exact"),
    [(1, "values", None, (0, 0)), (2, "values", None, (3, 9)), (1.5, "keys", None, (3, 9)),
     (2, "keys", 2.0, (0, 0)), (1, "raw_keys", None, (0, 0)), (1.5, "raw_keys", None, (3, 9)),
     (2, "raw_keys", None, (3, 9)), (3, "raw_keys", None, (3, 9))],
)  # fmt: skip
def test_the_search_is_as_good_as_trying_every_factor(bits, side, softcap, exact):
    """At most 5% more squared error than by trying all factors; never more than the layer's."""
    given, fmt = sample(softcap=softcap, exact=exact), packed(bits, side)
    rope = ROPE if side == "raw_keys" else None
    alone, together = search_clip(
        ExactAttention(given), side.removeprefix("raw_"), bound_layer(fmt), rope
    )
    assert (alone.shape, together.shape) == ((3,), (1,))
    missed = misses(given, bits, side)
    layer, groups = naive.clip_factors(missed, GRID, 3)
    error, least = missed(alone.tolist()), missed(together.tolist() * 3)
    assert least <= missed([layer] * 3) * 1.05
    assert error <= missed(groups) * 1.05
    assert error <= least * (1 + 1e-6)
    if bits < 2:
        assert error < least < missed([1.0] * 3)  # clipping helps


def test_the_error_of_a_channel_that_is_divided_is_in_its_own_unit():
    given, divisor = sample(), torch.linspace(0.5, 4, 32).view(2, 16)
    groups = QuantizedGroups(given.v, bound_layer(packed(2), divisor))
    x = (given.v / divisor[:, None]).double().numpy()
    off = groups.tokens(groups.all_deltas(torch.tensor([16, 26, 51])))
    clip = [GRID[i] for i in (16, 26, 51)]
    for b in range(2):
        back = naive.mapped(x[b], 2, GROUP_OF.numpy(), clip=clip)[0] * divisor[:, None].numpy()
        want = back - given.v[b].double().numpy()
        np.testing.assert_allclose(off[b].numpy(), want, rtol=0, atol=1e-5)


def test_attention_of_a_sample_sees_no_later_token():
    exact = ExactAttention(sample())
    assert exact.weights.shape == (2, 2, 32, 32)
    assert not exact.weights[..., exact.masked].any()
    torch.testing.assert_close(exact.weights.sum(-1), torch.ones(2, 2, 32))


def test_the_errors_of_a_sample_are_those_of_the_definition():
    given = sample(softcap=3.0, exact=(2, 5))
    exact, off = ExactAttention(given), torch.randn(2, 2, 32, 16) / 3
    q, k, v, more = (x.double().numpy() for x in (given.q, given.k, given.v, off))
    common = SCALE, given.rows.tolist(), (2, 5), 3.0
    by_keys = sum(naive.output_error(q[b], k[b], v[b], k[b] + more[b], v[b], *common)
                  for b in range(2))  # fmt: skip
    by_values = sum(naive.output_error(q[b], k[b], v[b], k[b], v[b] + more[b], *common)
                    for b in range(2))  # fmt: skip
    assert exact.error_of_keys(off).item() == pytest.approx(by_keys, rel=1e-4)
    assert exact.error_of_values(off).sum().item() == pytest.approx(by_values, rel=1e-4)
    shifted = exact.weights_with_keys(off)
    again = (shifted @ exact.v - exact.out).square().sum().item()
    assert again == pytest.approx(by_keys, rel=1e-4)


def test_what_a_query_sees_unpacked_costs_nothing():
    """One query, token 24, that sees the first 4 and the newest 10 tokens unpacked."""
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, h, 48, 16, generator=g) for h in (4, 2, 2))
    found = ExactAttention(
        AttentionSample.of(AttentionInputs(q, k, v, 0.25, None), 1, exact=(4, 10))
    )
    for token in range(48):
        off = torch.zeros(2, 2, 48, 16)
        off[:, :, token] = 9.0
        counts = 4 <= token <= 14
        assert (found.error_of_keys(off) > 1e-6) == counts
        assert bool(found.error_of_values(off).any()) == counts
