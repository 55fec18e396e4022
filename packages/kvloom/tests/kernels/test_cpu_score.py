"""kernels.score.cpu: any shape, dtype, layout and number of threads, and a step's products.

What `column_mass` means is tested for all backends in test_column_mass; here is what only a kernel
can get wrong. Relative error 1e-4 at most against float64, as there.
"""

from __future__ import annotations

import dataclasses
from functools import cache

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

import naive
import steps
from kv_views import cpu_attend, draw
from kvloom.cache.layer import LayerCache
from kvloom.keep import Budget, Keep, Noisy
from kvloom.kernels import dispatch, ops, simd
from kvloom.kernels.attend.regions import Region
from kvloom.kernels.score import cpu
from kvloom.kernels.score import reference as ref
from kvloom.kernels.score.arguments import NUMBERS, PAIRS, TILES
from kvloom.kernels.score.noise import KINDS, Noise
from kvloom.kernels.simd import has_pairs, has_tiles
from kvloom.recipe import Protect, Recipe
from kvloom.recipe.resolve import resolve
from kvloom.store import Store

HEADS = [(4, 4), (4, 2), (4, 1), (6, 2), (1, 1)]
FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16


def drawn(b, hq, hk, t, n, d, dtype=FP32, seed=0):
    """Queries and keys with NaN around."""
    return draw((b, hq, t, d), 2 * seed, dtype), draw((b, hk, n, d), 2 * seed + 1, dtype)


def masks(b, hk, t, n, seed=0):
    """visible, real and bias; the last row of the batch sees nothing."""
    g = torch.Generator().manual_seed(seed)
    visible = torch.rand(b, hk, n, generator=g) > 0.3
    visible[-1] = False
    real = torch.rand(b, 1, t, generator=g) > 0.3
    return {
        "visible": visible,
        "visible_queries": real,
        "bias": 3 * torch.randn(b, 1, n, generator=g),
    }


def numpy(options, hk, hq, t, n, b):
    """Options as the naive formula takes them."""
    options = dict(options)
    if options.get("noise") is not None:
        noise = options["noise"].block(hk, hq // hk, 0, t, n).flatten(1, 2)
        options["noise"] = noise.expand(b, hq, t, n).double()
    if "bias" in options:
        options["bias"] = options["bias"].expand(-1, hq, -1)
    return {n: x.numpy() if isinstance(x, torch.Tensor) else x for n, x in options.items()}


def close(mass, want):
    assert mass.dtype == FP32
    np.testing.assert_allclose(mass.double().numpy(), want, rtol=1e-4, atol=1e-12)


def agrees(q, k, scale=0.3, **options):
    """The kernel's mass is the naive formula's."""
    (b, hq, t, _), (_, hk, n, _) = q.shape, k.shape
    assert not cpu.COVERAGE.problems(q, k, scale, **options)
    if "bias" in options:
        options["bias"] = options["bias"].expand(-1, hq, -1)
    mass = cpu.column_mass(q, k, scale, **options)
    given = numpy(options, hk, hq, t, n, b)
    close(mass, naive.column_mass(q.double().numpy(), k.double().numpy(), scale, **given))


# A micro-tile is 12 or 6 rows and 32 or 16 keys, a block up to 48 rows, a tile 256 keys.
@pytest.mark.parametrize("t", [1, 11, 12, 13, 48, 49])
@pytest.mark.parametrize("n", [49, 255, 256, 257, 530])
def test_ragged_blocks_and_tiles(t, n):
    agrees(*drawn(1, 2, 1, t, n, 20))


# A micro-tile of tiles is 32 rows and 32 keys, and takes 32 channels at once.
@pytest.mark.parametrize("unit", [NUMBERS, PAIRS, TILES])
@pytest.mark.parametrize(
    ("t", "n"), [(1, 1), (31, 33), (32, 256), (33, 257), (128, 700), (300, 300)]
)
def test_whatever_the_machine_multiplies_at_once(monkeypatch, unit, t, n):
    monkeypatch.setattr(simd, "has_tiles", lambda: unit == TILES and has_tiles())
    monkeypatch.setattr(simd, "has_pairs", lambda: unit != NUMBERS and has_pairs())
    monkeypatch.setattr(cpu, "compiled", cache(cpu.compiled.__wrapped__))
    for d in (32, 96):
        q, k = drawn(2, 4, 2, t, n, d, BF16, seed=t)
        agrees(q, k, 0.3, **masks(2, 2, t, n), tau=1.3)
        lse = torch.randn(2, 4, t, generator=torch.Generator().manual_seed(1))
        largest = {"reduce_max": True, "other_lse": lse}
        want = ref.column_mass(q.float(), k.float(), 0.3, **largest)
        close(cpu.column_mass(q, k, 0.3, **largest), want.numpy())


@given(
    st.sampled_from(HEADS),
    st.integers(0, 70),
    st.integers(0, 300),
    st.integers(1, 70),
    st.sampled_from([FP32, FP16, BF16]),
    st.sampled_from([None, *KINDS]),
    st.sampled_from([(1.0, None), (1.6, None), (0.7, 4.0)]),
    st.booleans(),
    st.integers(0, 99),
)
def test_drawn_shapes(heads, t, more, d, dtype, kind, how, masked, seed):
    (hq, hk), n, b = heads, t + more, 2
    tau, softcap = how
    given = masks(b, hk, t, n, seed) if masked else {}
    places = torch.rand(b, hk, n).argsort(-1) + 5
    noise = None if kind is None else Noise(kind, seed - 50, places, 3, seed % 2 == 0, seed % 3)
    q, k = drawn(b, hq, hk, t, n, d, dtype, seed)
    agrees(q, k, d**-0.5, noise=noise, tau=tau, softcap=softcap, **given)


@pytest.mark.parametrize("threads", [2, 5])
def test_threads_leave_no_seam(threads):
    before = torch.get_num_threads()
    q, k = drawn(1, 2, 1, 300, 700, 64)
    noise = Noise("gumbel", 1, torch.arange(700)[None, None], 400)
    alone = cpu.column_mass(q, k, 0.1, noise=noise)
    torch.set_num_threads(threads)
    try:
        together = cpu.column_mass(q, k, 0.1, noise=noise)
    finally:
        torch.set_num_threads(before)
    torch.testing.assert_close(together, alone, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_memory_layout_does_not_matter(dtype):
    q, k = drawn(2, 4, 2, 60, 300, 40, dtype)
    want = cpu.column_mass(q, k, 0.1)
    for layout in (
        lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
        lambda x: torch.stack([x, x], dim=-1)[..., 0],
        lambda x: x.transpose(2, 3).contiguous().transpose(2, 3),
        lambda x: F.pad(x, (0, 1))[..., :-1],
    ):
        got = cpu.column_mass(layout(q), layout(k), 0.1)
        # bf16 numbers side by side are multiplied in pairs
        rtol, atol = (0, 0) if dtype == FP32 else (1e-5, 1e-9)
        torch.testing.assert_close(got, want, rtol=rtol, atol=atol)


def test_hidden_tokens_may_hold_anything_finite():
    q, k = drawn(1, 4, 2, 60, 300, 32)
    visible = masks(2, 2, 60, 300)["visible"][:1]
    want = cpu.column_mass(q, k, 0.1, visible=visible)
    got = cpu.column_mass(q, k.masked_fill(~visible[..., None], 3e38), 0.1, visible=visible)
    assert torch.equal(got, want)
    assert not want.masked_select(~visible.repeat_interleave(2, dim=1)).any()


def test_huge_logits_neither_overflow_nor_lose_the_winner():
    q, k = drawn(1, 4, 2, 60, 600, 32)
    q, k = (q * 100).round(), (k * 40).round()
    assert (q @ k.repeat_interleave(2, dim=1).mT).abs().max() > 5e4
    agrees(q, k, 1.0)


def test_what_fills_registers_without_avx512_too(monkeypatch):
    from kvloom.kernels.score import cpu_kernel as mass
    from kvloom.kernels.score import cpu_microkernel as micro

    other = (6, 1) if micro.AT_ONCE[0] == 12 else (12, 2)
    made = cpu.compiled(NUMBERS)._replace(
        panels=mass.panels(other[1]), mass=mass.mass(*other, NUMBERS), rows=other[0]
    )
    monkeypatch.setattr(cpu, "compiled", lambda _: made)
    agrees(*drawn(2, 4, 2, 61, 300, 24), **masks(2, 2, 61, 300), tau=1.3)


@pytest.mark.parametrize("kind", ["gumbel", "gaussian"])
def test_noise_is_that_of_the_counters(kind):
    """With equal logits and tau 1, mass of one query is softmax(noise): its logarithm says all."""
    n = 20_000
    noise = Noise(kind, -7, torch.arange(n)[None, None], n - 1)
    mass = cpu.column_mass(torch.zeros(1, 1, 1, 4), torch.zeros(1, 1, n, 4), 1.0, noise=noise)
    want = noise.block(1, 1, 0, 1, n).flatten()
    got = mass.flatten().log()
    torch.testing.assert_close(got - got[0], want - want[0], rtol=0, atol=2e-5)


@pytest.mark.parametrize(("hq", "hk"), HEADS)
@pytest.mark.parametrize("t", [1, 2, 8])
def test_a_step_leaves_its_products_and_they_give_its_mass(subtests, hq, hk, t):
    for n in (8, 16, 127, 128, 300):
        with subtests.test(n=n):
            q, k = drawn(2, hq, hk, t, n, 32, seed=n)
            given = masks(2, hk, t, n)
            given["bias"] = given["bias"].expand(-1, hq, -1)
            region = Region.exact(k, k, visible=given["visible"], bias=given["bias"], step_tokens=t)
            products = cpu_attend(q, [region], 0.3, softcap=4.0, products=True).products
            wide = k.repeat_interleave(hq // hk, dim=1)
            torch.testing.assert_close(products[..., :n], 0.3 * q @ wide.mT, rtol=1e-5, atol=1e-5)
            given |= {"softcap": 4.0, "tau": 1.4}
            given["noise"] = Noise("gumbel", 1, torch.arange(n)[None, None], n - t)
            want = naive.column_mass(
                q.double().numpy(), k.double().numpy(), 0.3, **numpy(given, hk, hq, t, n, 2)
            )
            held = products[..., :n].clone()
            for backend in (cpu, ref):
                close(backend.step_mass(products, n, hk, **given), want)
            assert torch.equal(products[..., :n], held)


def test_a_step_on_several_threads_leaves_no_seam():
    before = torch.get_num_threads()
    products = torch.randn(2, 8, 3, 4112)
    alone = cpu.step_mass(products, 4100, 2)
    torch.set_num_threads(5)
    try:
        assert torch.equal(cpu.step_mass(products, 4100, 2), alone)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("n", [1, 2, 15, 16, 17, 200])
@pytest.mark.parametrize("hidden", [0.0, 0.2, 1.0])
def test_the_lowest_of_what_may_go(n, hidden):
    g = torch.Generator().manual_seed(n)
    for most in (3, 10**6):  # many equal scores, and none
        scores = torch.randint(most, (2, 3, n), generator=g).float()
        scores[0, 0, ::3] = torch.inf
        index = torch.rand(2, 3, n, generator=g).argsort(-1).int()
        see = torch.rand(2, 3, n, generator=g) >= hidden
        for before in (0, n // 2, n):
            for shown in (None, see, see[:, :1].expand(2, 3, n)):
                want = ref.lowest(scores, index, before, shown)
                for i, rank in enumerate(scores.flatten(0, 1).tolist()):
                    ages = index.flatten(0, 1)[i].tolist()
                    seen = [True] * n if shown is None else shown.flatten(0, 1)[i].tolist()
                    may = [j for j in range(n) if ages[j] < before]
                    key = [rank[j] if seen[j] else -torch.inf for j in range(n)]
                    first = min(may, key=lambda j: key[j], default=0)
                    first = 0 if not may or key[first] == torch.inf else first
                    assert want.flatten()[i] == first
                assert torch.equal(cpu.lowest(scores, index, before, shown), want)


def test_nothing_gives_nothing():
    q = torch.zeros(1, 4, 3, 8)
    assert not cpu.column_mass(q[:, :, :0], q, 1.0).any()
    assert cpu.column_mass(q[:, :, :0], q[:, :2, :0], 1.0).shape == (1, 4, 0)
    assert cpu.column_mass(q[:0], q[:0], 1.0).shape == (0, 4, 3)
    assert not cpu.step_mass(torch.zeros(1, 4, 0, 16), 3, 2).any()


def test_what_is_not_covered_is_left_to_the_reference_visibly(monkeypatch):
    monkeypatch.setattr(dispatch, "environment", lambda: "auto")
    dispatch.ran.clear()
    q, k = drawn(1, 4, 2, 3, 5, 8)
    ops.column_mass(q, k, 0.3)
    torch.testing.assert_close(
        ops.column_mass(q.double(), k.double(), 0.3), ref.column_mass(q, k, 0.3)
    )
    with dispatch.use("ref"):
        ops.column_mass(q, k, 0.3)
        ops.step_mass(torch.zeros(1, 4, 1, 16), 9, 2)
    asked = q.clone().requires_grad_()
    ops.column_mass(asked, k, 0.3).sum().backward()
    assert asked.grad is not None
    with pytest.raises(RuntimeError):
        ops.column_mass(q[..., :4], k, 0.3)
    assert dispatch.ran == {
        ("column_mass", "cpu", ""): 1,
        (
            "column_mass",
            "ref",
            "queries are torch.float64 and keys torch.float64, not both fp32, fp16 or bf16",
        ): 1,
        ("column_mass", "ref", "the setting selects the reference"): 1,
        ("step_mass", "ref", "the setting selects the reference"): 1,
        ("column_mass", "ref", "q requires a gradient; call under torch.no_grad()"): 1,
        (
            "column_mass",
            "ref",
            "queries (1, 4, 3, 4) and keys (1, 2, 5, 8) do not fit together",
        ): 1,
    }
    pink = Noise("pink", 1, torch.zeros(1, 1, 5), 0)
    assert cpu.COVERAGE.problems(q, k, 0.3, noise=pink) == [
        "noise 'pink' is not one of constant, gumbel, gaussian"
    ]
    with pytest.raises(RuntimeError, match="expand"):
        cpu.column_mass(q, k, 0.3, visible=torch.ones(1, 1, 4, dtype=torch.bool))


def test_a_gpu_that_has_no_kernel_for_it_leaves_it_to_the_reference(monkeypatch):
    monkeypatch.setattr(dispatch, "candidate", lambda x: ("gpu", []))  # as for CUDA tensors
    for op in (ops.step_mass, ops.lowest):
        monkeypatch.setattr(op, "bindings", {})
    dispatch.ran.clear()
    ops.step_mass(torch.zeros(1, 4, 1, 16), 9, 2)
    ops.lowest(torch.zeros(1, 2, 20), torch.arange(40).view(1, 2, 20).int(), 9)
    why = "there is no gpu kernel for it"
    assert dispatch.ran == {("step_mass", "ref", why): 1, ("lowest", "ref", why): 1}


WHOLE = {
    "h2o": resolve("h2o:tokens=40"),
    "keyformer": resolve("keyformer:tokens=40"),
    "keyformer with sinks": Recipe(
        keep=Keep(Budget(tokens=40, recent=8), Noisy("gaussian", fixed=True)),
        protect=Protect(sinks=3),
    ),
    "limit": resolve("h2o:tokens=30,limit=50"),
    "one choice for all layers": dataclasses.replace(resolve("h2o:tokens=40,shared=true")),
    "snapkv": resolve("snapkv:tokens=40,window=9"),
    "minikv": dataclasses.replace(resolve("minikv"), store=Store()),
}


@pytest.mark.parametrize("recipe", WHOLE.values(), ids=WHOLE)
@pytest.mark.parametrize("padded", [False, True], ids=["plain", "padded"])
def test_a_cache_keeps_the_same_tokens_by_kernels_and_by_the_reference(recipe, padded):
    sizes = [70, *[1] * 20, 3, 20, *[1] * 9]
    q, k, v = steps.draw(0, sum(sizes), batch=2, hq=4, hk=2)
    visible = steps.padded([0, 17], sum(sizes)) if padded else None
    found = []
    for backend in dispatch.CHOICES:
        dispatch.ran.clear()
        with dispatch.use(backend), torch.no_grad():
            cache = LayerCache(recipe)
            cache.observe()
            out = steps.feed(cache, q, k, v, sizes, visible)
            found.append((out[:, :, 17:], cache.logical().sort(-1).values))
        if backend == "auto":
            assert dispatch.ran["column_mass", "cpu", ""] >= 1
            stepped = dispatch.ran["step_mass", "cpu", ""]
            assert stepped >= 28 if recipe.keep.when != "prompt" else not stepped
    torch.testing.assert_close(found[0][0], found[1][0], rtol=0, atol=1e-5)
    assert torch.equal(found[0][1], found[1][1])
