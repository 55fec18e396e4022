"""Distributions: what the model's own layers hold, spreads by their definition, and the command."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pytest
import torch
from typer.testing import CliRunner
from zoo import build

from backends import by_reference
from kvloom.errors import UnsupportedModel
from kvloom.recipe.resolve import resolve
from kvloom_lab.analyse.distribution import Distribution, measure
from kvloom_lab.cli.app import app

pytestmark = by_reference  # none of this depends on kernels

IDS = torch.randint(3, 199, (1, 48), generator=torch.Generator().manual_seed(0))


def test_keys_and_values_are_those_the_model_caches():
    model, plain = build("llama-gqa"), build("llama-gqa")
    layers = plain(IDS, use_cache=True).past_key_values.layers
    found = measure(model, IDS, resolve("rtn:group=16"))
    assert [(d.layer, d.kind) for d in found] == [
        (n, kind) for n in range(3) for kind in ("keys", "raw_keys", "values")
    ]
    by = {(d.layer, d.kind): d.x for d in found}
    for n, layer in enumerate(layers):
        for kind, held in (("keys", layer.keys), ("values", layer.values)):
            want = held[0].transpose(1, 2).flatten(0, 1)  # [heads * D, tokens]
            torch.testing.assert_close(by[n, kind], want, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(by[n, "raw_keys"][:, 0], by[n, "keys"][:, 0])  # position 0
        assert not torch.allclose(by[n, "raw_keys"], by[n, "keys"], atol=1e-2)
    assert not hasattr(model, "_kvloom")


def test_a_raw_key_does_not_know_its_position():
    model, same = build("llama-gqa", num_hidden_layers=1), torch.full((1, 20), 7)
    raw = {d.kind: d.x for d in measure(model, same, resolve("full"))}["raw_keys"]
    torch.testing.assert_close(raw, raw[:, :1].expand(-1, 20), rtol=1e-3, atol=1e-4)


def test_figures_by_their_definition():
    g = torch.Generator().manual_seed(1)
    x = torch.randn(12, 5, generator=g) * torch.rand(12, 1, generator=g)
    group_of = torch.tensor([0, 0, 1, 2, 2, 2, 2, 1, 0, 2, 2, 2])
    d = Distribution(0, "keys", x, 4, group_of)
    a = x.double().numpy()

    def spread(groups):
        ranges = [[np.ptp(a[groups == groups[c], t]) for t in range(5)] for c in range(12)]
        return np.mean(ranges) / np.abs(a).mean()

    assert d.before == pytest.approx(spread(np.arange(12) // 4), rel=1e-5)
    assert d.after == pytest.approx(spread(group_of.numpy()), rel=1e-5)
    largest = np.abs(a).max(1)
    assert d.outliers == pytest.approx(largest.max() / np.median(largest), rel=1e-5)
    order = d.order.tolist()
    assert sorted(order) == list(range(12))
    assert group_of[order].tolist() == sorted(group_of.tolist())
    for low, high in itertools.pairwise(order):
        assert group_of[low] < group_of[high] or largest[low] <= largest[high]


def test_models_without_rotary_positions_have_no_raw_keys():
    found = measure(build("gpt2"), IDS, resolve("full"), [1])
    assert [(d.layer, d.kind, d.after) for d in found] == [(1, "keys", None), (1, "values", None)]


def test_a_layer_that_is_not_compressed():
    with pytest.raises(UnsupportedModel, match=r"layers \[7\]; choose from \[0, 1, 2\]"):
        measure(build("llama-gqa"), IDS, resolve("full"), [0, 7])


def run(*args):
    return CliRunner().invoke(app, ["analyse", *map(str, args)])


def test_the_commands_on_the_reference_model(tmp_path):
    picture, data = tmp_path / "d.png", tmp_path / "d.json"
    args = ["--context", 128, "--layers", "1,5", "--plot", picture, "--json", data]
    found = run("distribution", *args)
    assert found.exit_code == 0, found.output
    assert "keys before RoPE" in found.stdout
    assert picture.read_bytes().startswith(b"\x89PNG")
    rows = json.loads(data.read_text())["rows"]
    assert {row["layer"] for row in rows} == {1, 5}
    raw = next(r for r in rows if (r["layer"], r["kind"]) == (1, "raw_keys"))
    assert raw["spread_reordered"] < raw["spread"]  # calibration puts like beside like
    assert sorted(raw["order"]) == list(range(len(raw["channels"])))

    found = run("error", "--recipes", "rtn,kivi,kivi-4", "--context", 128, "--samples", 1,
                "--json", "-")  # fmt: skip
    rtn, kivi, kivi_4 = json.loads(found.stdout)["rows"]
    assert kivi_4["output"] < kivi["output"] < rtn["output"]
