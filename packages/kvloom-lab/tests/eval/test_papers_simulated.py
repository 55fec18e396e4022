"""The quantizers of SKVQ's Table 2, beside sums by hand and kvloom's own formats."""

import pytest
import torch

import tiny
from kvloom.store import LayerFacts, Packed, Store, round_trip
from kvloom_lab.papers.simulated import (
    SINKS,
    Levels,
    asymmetric,
    losses,
    outputs,
    projections,
    replaced,
    symmetric,
)


def test_symmetric_has_one_scale_a_group():
    x = torch.tensor([[3.0, -1.4, 0.2, 0.0, 7.0, 3.4, -7.0, 1.0]])
    assert symmetric(x, 2, 4).tolist() == [[3, 0, 0, 0, 7, 0, -7, 0]]
    assert symmetric(x, 4, 4)[0, 4:].tolist() == [7, 3, -7, 1]


def test_asymmetric_rounds_in_groups_of_any_channels():
    x = torch.tensor([[0.0, 10.0, 1.1, 16.0, 1.9, 40.0]])
    group_of = torch.tensor([0, 1, 0, 1, 0, 1])
    codes = asymmetric(x + torch.tensor([0, 0, 0, 0, 1.1, 0]), 2, group_of)
    assert codes.tolist() == [[0, 10, 1, 20, 3, 40]]
    clipped = asymmetric(torch.tensor([[-4.0, 4.0]]), 2, torch.tensor([0, 0]), clip=0.5)
    assert clipped.tolist() == [[-2, 2.125]]  # the scale 4/3 is 1.375 in fp8


def test_asymmetric_is_what_kvloom_stores():
    x = torch.randn(1, 2, 64, 32, generator=torch.Generator().manual_seed(0))
    fmt = Packed(2, "token", 32, "fp8", span="layer", clip=0.96)
    encoding = LayerFacts(values=fmt.encoding.bind(2, 32))
    stored = round_trip(x, Store(values=fmt), "values", encoding)[0].transpose(0, 1).flatten(1)
    simulated = asymmetric(x[0].transpose(0, 1).flatten(1), 2, torch.arange(64) // 32, 0.96)
    assert (stored - simulated).abs().max() < 1e-5


def test_levels_keep_outliers_and_round_the_others():
    x = torch.randn(400, 8, generator=torch.Generator().manual_seed(0))
    x[3] = 50.0
    for dim in (0, 1):
        levels = Levels.fit(x, 2, dim)
        assert len(levels.levels) == 4
        assert levels.levels.diff().min() > 0
    rounded = Levels.fit(x, 2, 0)(x)
    assert torch.equal(rounded[3], x[3])
    assert len(rounded[:, 0].unique()) < 12
    errors = [(Levels.fit(x, bits, 0)(x) - x).square().mean() for bits in (2, 3, 4)]
    assert errors == sorted(errors, reverse=True)


def test_only_tokens_after_the_sinks_are_quantized_and_the_model_is_as_before():
    model = tiny.llama()
    ids = torch.arange(3, 35)[None]
    exact = outputs(model, ids)
    assert set(exact) == set(projections(model))
    [plain] = losses(model, ids, {})
    zero = dict.fromkeys(exact, torch.zeros_like)
    with replaced(model, zero):
        model(input_ids=ids[:, :SINKS])
        assert losses(model, ids[:, :SINKS], {}) == losses(model, ids[:, :SINKS], zero)
    [zeroed] = losses(model, ids, zero)
    assert zeroed != pytest.approx(plain, abs=1e-6)
    assert losses(model, ids, {}) == [plain]
