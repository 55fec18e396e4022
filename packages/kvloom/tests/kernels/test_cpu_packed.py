"""The store by kernels.quantize.cpu and by the reference: the same bytes, and who packed them."""

from __future__ import annotations

import pytest
import torch

import steps
from kvloom.cache.layer import LayerCache
from kvloom.kernels import dispatch
from kvloom.positions.rope import Rope
from kvloom.recipe import Protect, Recipe
from kvloom.store import LayerFacts, Packed, Store
from kvloom.store.packed import PackedTokens
from sampling import slow_except


@pytest.fixture(autouse=True)
def _auto():
    dispatch.ran.clear()
    with dispatch.use("auto"):
        yield


CACHES = {
    **steps.RECIPES,
    "skvq's": Recipe(
        store=Store(
            Packed(2, "token", 32, "fp8", span="layer", clip=0.9, pre_rope=True),
            Packed(1.5, "token", 32, "fp8", span="layer"),
        ),
        protect=Protect(2, 7),
    ),
    "rotated before RoPE": Recipe(
        store=Store(
            Packed(3, "token", 0, rotation="group", pre_rope=True),
            Packed(8, "token", 16, "bf16", rotation="group"),
        ),
        protect=Protect(2, 7),
    ),
}
KNOWN = LayerFacts(rope=Rope(10_000.0 ** (-torch.arange(16) / 16)))


# Attention takes long to compile.
@pytest.mark.parametrize("name", slow_except(list(CACHES), "kivi:group=32,residual=32"))
@pytest.mark.parametrize("padded", [False, True], ids=["plain", "padded"])
def test_caches_hold_the_same_bytes_by_kernels_and_by_the_reference(name, padded):
    recipe = CACHES[name]
    sizes = [70, *[1] * 9, 3, 20, *[1] * 35]
    q, k, v = steps.draw(0, sum(sizes), batch=2, hq=2, hk=2)
    visible = steps.padded([0, 37], sum(sizes)) if padded else None
    caches = []
    for backend in dispatch.CHOICES:
        with dispatch.use(backend), torch.no_grad():
            caches.append(LayerCache(recipe, facts=KNOWN))
            steps.feed(caches[-1], q, k, v, sizes, visible)
    assert caches[0].nbytes == caches[1].nbytes
    steps.assert_same_state(*(steps.state(cache) for cache in caches))


def test_what_is_left_to_the_reference_says_why():
    x = torch.randn(1, 1, 5, 32)
    held = PackedTokens(Packed(2, "token"))
    held.append(x.double())
    assert held.view().tensor().dtype == torch.float64
    with dispatch.use("ref"):
        PackedTokens(Packed(2, "token")).append(x)
    rotated = PackedTokens(Packed(3, "token", 0, rotation="group"))
    rotated.append(x)
    assert rotated.view().tensor().dtype == torch.float32
    assert dispatch.ran == {
        ("pack", "ref", "tokens are torch.float64, not fp32, fp16 or bf16"): 1,
        ("unpack", "ref", "tokens are torch.float64, not fp32, fp16 or bf16"): 1,
        ("pack", "ref", "the setting selects the reference"): 1,
        ("pack", "cpu", ""): 1,
        ("unpack", "cpu", ""): 1,
    }


@pytest.mark.parametrize("backend", dispatch.CHOICES)
@pytest.mark.parametrize("axis", ["channel", "token"])
def test_no_tokens_are_packed_to_nothing(backend, axis):
    fmt = Packed(2, axis, 16, residual=16)
    with dispatch.use(backend):
        held = PackedTokens(fmt)
        held.append(torch.empty(2, 1, 0, 32))
        assert (len(held), held.nbytes) == (0, 0)
        assert held.view().tensor().shape == (2, 1, 0, 32)
        x = torch.randn(2, 1, 16, 32)
        alone = PackedTokens(fmt)
        for part in (x, x[:, :, :0]):
            held.append(part)
            alone.append(part)
        assert len(held) == len(alone) == 16
        assert torch.equal(held.view().tensor(), alone.view().tensor())
