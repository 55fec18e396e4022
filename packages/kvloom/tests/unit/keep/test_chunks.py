"""Chunks of a prompt are equally long, so that none has too few queries for its fit."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from kvloom.keep.chunks import chunks, longest, query_shift
from kvloom.positions.rope import Rope


@given(st.integers(0, 20_000), st.integers(1, 5_000))
def test_chunks_are_few_and_equally_long(tokens, most):
    found = list(chunks(tokens, most))
    assert [x for part in found for x in range(*part)] == list(range(tokens))
    sizes = {end - first for first, end in found}
    assert max(sizes, default=0) - min(sizes, default=0) <= 1
    assert max(sizes, default=0) == longest(tokens, most) <= most
    assert (len(found) - 1) * most < max(1, tokens)


def test_a_prompt_little_longer_than_a_chunk_is_halved():
    assert list(chunks(2304, 2048)) == [(0, 1152), (1152, 2304)]


@given(st.integers(1, 20_000), st.integers(1, 5_000), st.sampled_from([None, 10_000, 25_000]))
def test_queries_follow_the_prompt_if_the_model_has_the_positions(tokens, most, positions):
    rope = Rope(torch.ones(1), positions=positions)
    for first, end in chunks(tokens, min(most, (positions or 1 << 20) // 2)):
        by = query_shift(first, end, tokens, rope)
        assert end - first <= by <= tokens - first
        furthest = end - first + by  # from the last query to the first key, and one
        if positions is None or tokens + end - first <= positions:
            assert first + by == tokens
        else:
            assert furthest <= positions
