"""Groups of channels that are alike, and how far each is clipped."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvloom.calibrate.clip import GRID, Attention, Sample, search
from kvloom.calibrate.groups import group, kmeans
from kvloom.calibrate.record import Seen
from kvloom.rope import Rope
from kvloom.store import Packed, Transform
from kvloom.store.codec import Channels, codec


def partition(of) -> set[frozenset[int]]:
    return {frozenset((of == g).nonzero().flatten().tolist()) for g in of.unique()}


def test_blobs_are_found_whatever_their_sizes():
    sizes, centers = [3, 40, 12, 9], torch.tensor([[0.0, 0], [30, 1], [-20, 20], [5, -40]])
    true = torch.arange(4).repeat_interleave(torch.tensor(sizes))
    points = centers[true] + 0.1 * torch.randn(64, 2)
    mixed = torch.randperm(64)
    assert partition(kmeans(points[mixed], 4)) == partition(true[mixed])


@given(st.integers(1, 40), st.integers(1, 12), st.integers(1, 5), st.integers(0, 99))
def test_every_group_has_a_member_even_among_equal_points(n, count, different, seed):
    count = min(n, count)
    g = torch.Generator().manual_seed(seed)
    points = torch.randint(0, different, (n, 2), generator=g).double()
    of = kmeans(points, count)
    assert of.shape == (n,)
    assert of.unique().tolist() == list(range(count))


def test_the_same_ranges_give_the_same_groups():
    low, high = torch.randn(2, 2, 32).sort(dim=0).values
    assert torch.equal(group(low, high, "layer", 16), group(low, high, "layer", 16))


@pytest.mark.parametrize(("span", "size", "count"), [("layer", 16, 6), ("layer", 64, 1),
                                                     ("head", 16, 6), ("head", 32, 3)])  # fmt: skip
def test_groups_are_as_many_as_predicted_and_stay_in_their_heads(span, size, count):
    low, high = torch.randn(2, 3, 32).sort(dim=0).values
    of = group(low, high, span, size)
    assert of.unique().tolist() == list(range(count))
    assert Packed(2, "token", size, transform=Transform(span)).groups(3, 32) == count
    if span == "head":
        heads = [set(of[h].tolist()) for h in range(3)]
        assert sum(map(len, heads)) == len(set.union(*heads))


# --- clipping ------------------------------------------------------------------------------------


def sample(seed=0, tokens=48, outlier=0.0, softcap=None) -> Sample:
    g = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(2, h, tokens, 16, generator=g) for h in (4, 2, 2))
    k[..., 3] += outlier
    return Sample.of(Seen(q, k, v, 0.25, softcap), 8)


def spoilt(side: str, alpha, softcap=None, rope=None) -> torch.Tensor:
    """Squared error of attention, straight from the definition, with one side clipped by alpha."""
    s, fmt = sample(softcap=softcap), two_bit(1.0)
    group_of = torch.arange(32).view(2, 16) // 16
    k, v = s.k, s.v
    at = torch.arange(k.shape[2]).view(1, 1, -1)

    def back(x):
        by = codec(fmt, Channels(group_of, torch.as_tensor(alpha)), x)
        return by.dequantize(*by.quantize(x, None), torch.float32)

    if side == "keys":
        k = back(k) if rope is None else rope.turn(back(rope.turn(k, -at)), at)
    else:
        v = back(v)

    def out(k, v):
        total = []
        for b in range(2):
            for h in range(4):
                logits = s.q[b, h] @ k[b, h // 2].T * 0.25
                logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
                hidden = torch.arange(48) > s.rows[:, None]
                total.append(logits.masked_fill(hidden, -torch.inf).softmax(-1) @ v[b, h // 2])
        return torch.stack(total)

    return (out(k, v) - out(s.k, s.v)).square().sum()


def two_bit(clip) -> Packed:
    return Packed(2, "token", 16, "fp32", transform=Transform("layer", clip=clip))


ROPE = Rope(100.0 ** -(torch.arange(0, 16, 2) / 16))


@pytest.mark.parametrize(
    ("side", "softcap", "rope"),
    [("values", None, None), ("keys", None, None), ("keys", 2.0, None), ("keys", None, ROPE)],
)
def test_the_factor_of_a_layer_is_the_best_of_the_grid(side, softcap, rope):
    errors = torch.stack([spoilt(side, a, softcap, rope) for a in GRID])
    channels = Channels(torch.arange(32).view(2, 16) // 16)
    alone, together = search(sample(softcap=softcap), side, two_bit("group"), channels, rope)
    assert alone.shape == (2,)
    assert together.item() == pytest.approx(GRID[errors.argmin()])
    assert together.item() < 1  # at 2 bit, clipping helps
    # each group's own factor is no worse than all of them at 1
    assert spoilt(side, alone, softcap, rope) < errors[-1]
    # and each of them the best while the others stay at the layer's
    for g in range(2):
        base = together.repeat(2)
        base[g] = alone[g]
        least = spoilt(side, base, softcap, rope)
        for a in GRID[::4]:
            base[g] = a
            assert spoilt(side, base, softcap, rope) >= least * (1 - 1e-4)


def test_values_factors_are_the_best_for_each_group_alone():
    channels = Channels(torch.arange(32).view(2, 16) // 16)
    alone, _ = search(sample(), "values", two_bit("group"), channels, None)
    best = spoilt("values", alone)
    for g in range(2):
        for a in GRID[::4]:
            other = alone.clone()
            other[g] = a
            assert spoilt("values", other) >= best * (1 - 1e-4)


def test_attention_of_a_sample_sees_no_later_token():
    exact = Attention(sample())
    assert exact.weights.shape == (2, 2, 2, 8, 48)
    assert not exact.weights[..., exact.hidden].any()
    torch.testing.assert_close(exact.weights.sum(-1), torch.ones(2, 2, 2, 8))


def test_what_a_query_sees_exactly_costs_nothing_in_the_search():
    """One query, token 24, that sees the first 4 and the newest 10 tokens exactly."""
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, h, 48, 16, generator=g) for h in (4, 2, 2))
    found = Attention(Sample.of(Seen(q, k, v, 0.25, None), 1, exact=(4, 10)))
    for token in range(48):
        off = torch.zeros(2, 2, 48, 16)
        off[:, :, token] = 9.0
        counts = 4 <= token <= 14
        assert (found.missed_by_keys(off) > 0) == counts
        assert bool(found.missed_by_values(off).any()) == counts
