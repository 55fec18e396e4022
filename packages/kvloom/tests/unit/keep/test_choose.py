"""Which tokens stay, given scores: padding goes first, sinks and the newest tokens stay."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvloom.keep import choose, protect_sinks

N = 20


def expected(scores, visible, heavy, recent):
    """The slots of one row and head, by sorting."""
    older = sorted(range(N - recent), key=lambda j: (not visible[j], -scores[j]))
    return [*sorted(older[:heavy]), *range(N - recent, N)]


@given(st.integers(0, 99), st.integers(0, 10), st.integers(0, 9), st.integers(0, 17))
def test_the_best_real_tokens_stay_and_the_newest(seed, heavy, recent, pad):
    """Padding may have the highest scores of all: pooled votes reach into it."""
    heavy = min(heavy, max(0, N - recent - pad))  # enough real tokens before the newest
    g = torch.Generator().manual_seed(seed)
    visible = torch.arange(N) >= torch.tensor([[[0]], [[pad]]])
    scores = torch.randn(2, 3, N, generator=g) + 10 * ~visible
    found = choose(scores, heavy, recent, visible)
    for b in range(2):
        for h in range(3):
            want = expected(scores[b, h].tolist(), visible[b, 0].tolist(), heavy, recent)
            assert found[b, h].tolist() == want


def test_everything_stays_within_the_budget():
    scores = torch.zeros(1, 1, N)
    assert choose(scores, 10, 10) is None
    assert choose(scores, 0, 30) is None
    assert choose(scores, 10, 9).shape == (1, 1, 19)


@pytest.mark.parametrize("sinks", [0, 1, 3])
def test_sinks_are_the_first_real_tokens_of_each_row(sinks):
    pads = (0, 5)
    visible = torch.arange(N) >= torch.tensor(pads)[:, None, None]
    scores = torch.randn(2, 3, N)
    for mask, begins in ((None, (0, 0)), (visible, pads)):
        found = protect_sinks(scores, sinks, mask)
        for row, begin in enumerate(begins):
            protected = torch.arange(N).sub(begin).clamp(min=-1)
            protected = (protected >= 0) & (protected < sinks)
            assert torch.equal(found[row].isinf(), protected.expand(3, -1))
            assert torch.equal(found[row][:, ~protected], scores[row][:, ~protected])
