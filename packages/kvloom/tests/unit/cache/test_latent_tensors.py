"""Latents: absorbed queries attend to both parts of a key, whatever tokens they read."""

from __future__ import annotations

import pytest
import torch

from kvloom.cache import latents
from kvloom.cache.attention import attend_to
from kvloom.kernels.attend import reference as ref
from kvloom.kernels.attend.regions import Region, Slots
from kvloom.kernels.select.reference import gather

B, HQ, P, R, SCALE = 2, 4, 16, 32, 0.3


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def attended(q, regions):
    q, regions = latents.absorbed(q, regions, SCALE)
    return attend_to(q, regions, SCALE, None)[0]


def agree(got, q, k, v, **options):
    want = ref.attend_exact(q, latents.whole_keys(k, v), v, SCALE, **options).out
    torch.testing.assert_close(got, want, rtol=0, atol=1e-5)


@pytest.mark.parametrize("heads", [1, 2, HQ])
def test_tokens_that_recall_chooses(heads):
    """Every head that chooses reads its own tokens, then all from the 40th on."""
    q, k, v = draw(B, HQ, 1, P + R), draw(B, 1, 50, P), draw(B, 1, 50, R)
    slots = torch.stack([torch.randperm(40)[:7].sort().values for _ in range(B * heads)])
    where = Slots(slots.view(B, heads, 7), 40)
    got = attended(q, [Region.exact(k, v, where=where, step_tokens=1)])
    rest = torch.arange(40, 50).expand(B, heads, -1)
    read = torch.cat([where.slots, rest], dim=-1)
    parts = (gather(x.expand(-1, heads, -1, -1), read) for x in (k, v))
    agree(got, q, *parts)


@pytest.mark.parametrize("step_tokens", [5, 16, 40])
def test_long_chunks_are_unpacked_in_parts(step_tokens, monkeypatch):
    """The step's own tokens stay in one part, in which each sees the ones before it."""
    monkeypatch.setattr(latents, "UNPACK_TOKENS", 16)
    q, k, v = draw(B, HQ, step_tokens, P + R), draw(B, 1, 45, P), draw(B, 1, 45, R)
    agree(attended(q, [Region.exact(k, v, step_tokens=step_tokens)]), q, k, v, causal=True)


@pytest.mark.parametrize("queries", [1, 3])
def test_padding(queries):
    q, k, v = draw(B, HQ, queries, P + R), draw(B, 1, 45, P), draw(B, 1, 45, R)
    visible = torch.ones(B, 1, 45, dtype=torch.bool)
    visible[1, :, :20] = False
    regions = [Region.exact(k, v, visible=visible, step_tokens=queries)]
    agree(attended(q, regions), q, k, v, causal=True, visible=visible)
