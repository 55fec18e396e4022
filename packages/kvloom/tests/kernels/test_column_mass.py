"""column_mass of every backend against the full softmax in float64: relative error 1e-4 at most."""

import numpy as np
import pytest
import torch

import naive
from kvloom.kernels.attend.reference import attend_exact
from kvloom.kernels.score import cpu
from kvloom.kernels.score import reference as ref
from kvloom.kernels.score.noise import Noise

SHAPES = {"first token": (1, 1), "decode": (1, 65), "prompt": (17, 17), "second turn": (5, 64)}
T, N, HQ, HK = 17, 40, 4, 2
BACKENDS = {"ref": ref, "cpu": cpu}


@pytest.fixture(params=BACKENDS.values(), ids=BACKENDS)
def backend(request):
    return request.param


def in_blocks(backend, monkeypatch):
    """Have as little as possible done at once."""
    for size in ("_BLOCK_NUMEL",) if backend is ref else ("_LOGITS", "_PANEL_NUMBERS"):
        monkeypatch.setattr(backend, size, 1)


def agrees(mass, q, k, scale, **options):
    if "noise" in options:
        (_, hq, t, _), (_, hk, n, _) = q.shape, k.shape
        noise = options["noise"].block(hk, hq // hk, 0, t, n).flatten(1, 2)
        options["noise"] = noise.expand(2, hq, t, n)
    options = {n: x.double().numpy() if torch.is_tensor(x) else x for n, x in options.items()}
    for name in ("visible", "visible_queries"):
        if options.get(name) is not None:
            options[name] = options[name] > 0
    expected = naive.column_mass(q.double().numpy(), k.double().numpy(), scale, **options)
    assert mass.dtype == torch.float32
    np.testing.assert_allclose(mass.double().numpy(), expected, rtol=1e-4, atol=1e-30)


def drawn(seed, hq, hk, t, n):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(2, hq, t, 16, generator=g), torch.randn(2, hk, n, 16, generator=g), g


def alibi(hq, n):
    """ALiBi as in its paper: [1, Hq, N], 0 for the newest token."""
    slopes = 2.0 ** -torch.arange(1, hq + 1)
    return (slopes[:, None] * torch.arange(1 - n, 1))[None]


def options(names, g):
    """What the named parts of a case are, for shapes T, N, HQ, HK."""
    places, first = torch.rand(2, HK, N, generator=g).argsort(-1) + 9, 9 + N - T
    parts = {
        "left padding": {
            "visible": torch.arange(N) >= torch.tensor([0, 30])[:, None, None],
            "visible_queries": torch.arange(N - T, N) >= torch.tensor([0, 30])[:, None, None],
        },
        "kept by head": {"visible": torch.rand(2, HK, N, generator=g) > 0.4},
        "alibi": {"bias": alibi(HQ, N)},
        "noise": {"noise": Noise("gumbel", 5, places, first)},
        "fixed noise": {"noise": Noise("gumbel", 5, places, first, fixed=True)},
        "tau": {"tau": 1.7},
        "softcap": {"softcap": 3.0},
        "largest": {"reduce_max": True},
    }
    return {key: value for name in names for key, value in parts[name].items()}


ALONE = [
    (), ("left padding",), ("kept by head",), ("alibi",), ("noise",),
    ("fixed noise",), ("tau",), ("softcap",), ("largest",),
]  # fmt: skip
TOGETHER = [
    ("left padding", "alibi"),
    ("kept by head", "alibi", "tau"),
    ("kept by head", "softcap"),
    ("alibi", "noise", "tau"),
    ("left padding", "alibi", "noise", "tau"),
    ("kept by head", "alibi", "fixed noise", "tau"),
    ("left padding", "noise", "tau", "softcap"),
    ("left padding", "alibi", "noise", "tau", "softcap"),
    ("kept by head", "alibi", "noise", "tau", "softcap"),
    ("left padding", "largest", "softcap"),
    ("kept by head", "largest"),
]


@pytest.mark.parametrize("names", ALONE + TOGETHER, ids=lambda names: ", ".join(names) or "plain")
def test_equals_the_full_softmax(names, monkeypatch):
    q, k, g = drawn(0, HQ, HK, T, N)
    given = options(names, g)
    for backend in BACKENDS.values():
        agrees(backend.column_mass(q, k, 0.4, **given), q, k, 0.4, **given)  # at once
        in_blocks(backend, monkeypatch)
        agrees(backend.column_mass(q, k, 0.4, **given), q, k, 0.4, **given)


@pytest.mark.parametrize(("hq", "hk"), [(4, 4), (4, 2), (3, 1)], ids=["MHA", "GQA", "MQA"])
@pytest.mark.parametrize(("t", "n"), SHAPES.values(), ids=SHAPES)
def test_every_shape(backend, hq, hk, t, n):
    q, k, g = drawn(hq * 100 + n, hq, hk, t, n)
    visible = torch.rand(2, hk, n, generator=g) > 0.3
    real = torch.rand(2, 1, t, generator=g) > 0.3
    given = {
        "visible": visible,
        "visible_queries": real,
        "bias": alibi(hq, n),
        "tau": 1.3,
        "softcap": 5.0,
    }
    agrees(backend.column_mass(q, k, 0.4, **given), q, k, 0.4, **given)


def test_a_bias_for_each_row(backend):
    q, k, g = drawn(0, HQ, HK, T, N)
    bias = 5 * torch.randn(2, HQ, N, generator=g)
    agrees(backend.column_mass(q, k, 0.4, bias=bias), q, k, 0.4, bias=bias)


@pytest.mark.parametrize("largest", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_keys_take_their_part_of_each_row(backend, dtype, largest):
    """All see the first keys; the others, which are seen causally, are given by their lse."""
    q, k, g = drawn(3, HQ, HK, T, N)
    q, k, first = q.to(dtype), k.to(dtype), N - T
    given = {"softcap": 3.0, "reduce_max": largest} | options(["left padding"], g)
    given["visible"] = given["visible"] & (torch.rand(2, 1, N, generator=g) > 0.2)
    seen = given["visible"]
    others = attend_exact(q, k[:, :, first:], k[:, :, first:], 0.3, softcap=3.0, causal=True,
                    visible=seen[..., first:])  # fmt: skip
    want = backend.column_mass(q, k, 0.3, **given)[..., :first]
    given["visible"] = seen[..., :first]
    got = backend.column_mass(q, k[:, :, :first], 0.3, other_lse=others.lse, **given)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-30)


def test_rows_are_normalised_and_blocks_do_not_show(backend, monkeypatch):
    q, k = torch.randn(1, 4, 50, 16), torch.randn(1, 2, 50, 16)
    whole = backend.column_mass(q, k, 0.25)
    torch.testing.assert_close(whole.sum(-1), torch.full((1, 4), 50.0))
    in_blocks(backend, monkeypatch)
    torch.testing.assert_close(backend.column_mass(q, k, 0.25), whole)


@pytest.mark.parametrize("fixed", [False, True])
def test_blocks_do_not_show_in_noise(backend, monkeypatch, fixed):
    q, k = torch.randn(3, 4, 50, 16), torch.randn(3, 2, 50, 16)
    noise = Noise("gumbel", 3, torch.arange(50)[None, None], 0, fixed)
    whole = backend.column_mass(q, k, 0.25, noise=noise)
    in_blocks(backend, monkeypatch)
    torch.testing.assert_close(backend.column_mass(q, k, 0.25, noise=noise), whole)
