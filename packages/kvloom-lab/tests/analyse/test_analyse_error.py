"""Errors of formats: against the definition in float64, and the order KIVI's Table 2 has."""

from __future__ import annotations

import io

import numpy as np
import pytest
import torch
from zoo import build

import kvloom
import naive
from backends import by_reference
from kvloom.calibrate.recorder import record
from kvloom.errors import IncompatibleRecipe
from kvloom.recipe.resolve import resolve
from kvloom_lab.analyse import error
from kvloom_lab.analyse.tables import error_table
from kvloom_lab.eval import load
from kvloom_lab.workload.text import cut_rows, leading_ids, library_text, tokenize

pytestmark = by_reference  # none of this depends on kernels

IDS = torch.randint(3, 199, (2, 48), generator=torch.Generator().manual_seed(0))


def recipe(keys=None, values=None, name="mine") -> kvloom.Recipe:
    return kvloom.Recipe(store=kvloom.Store(keys, values), name=name)


def test_errors_are_the_definition():
    model = build("llama-gqa")
    fmt = kvloom.Packed(2, "token", 16, "fp32")
    found = error.measure(model, IDS, [recipe(fmt, fmt)], queries=24)["mine"]
    seen = {}
    record(model, IDS, lambda n, s: seen.update({n: s}))
    for number, s in seen.items():
        q, k, v = (x.double().numpy() for x in (s.q, s.k, s.v))
        back = [np.stack([[naive.fake(h, 2, "token", 16) for h in b] for b in x]) for x in (k, v)]
        squares = np.zeros((5, 2))
        for b in range(2):
            for h in range(4):
                g = h // 2
                exact, off, keys_off = (attend(q[b, h], *pair, s.scale) for pair in (
                    (k[b, g], v[b, g]), (k[b, g], back[1][b, g]), (back[0][b, g], back[1][b, g])
                ))  # fmt: skip
                pairs = [(keys_off[0], exact[0]), (off[1], exact[1]), (keys_off[1], exact[1])]
                for i, (x, y) in enumerate(pairs):
                    squares[2 + i] += ((x - y) ** 2).sum(), (y**2).sum()
        for i, x in enumerate((k, v)):
            squares[i] = ((back[i] - x) ** 2).sum(), (x**2).sum()
        want = np.sqrt(squares[:, 0] / squares[:, 1])
        got = [getattr(found[number], name) for name in error.NAMES]
        np.testing.assert_allclose(got, want, rtol=1e-3)


def attend(q, k, v, scale):
    """Weights and output of the second half of the queries."""
    logits = q[24:] @ k.T * scale
    logits[np.arange(48) > np.arange(24, 48)[:, None]] = -np.inf
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return weights, weights @ v


def test_exact_sides_have_no_error_and_finer_codes_less():
    model = build("llama-gqa")
    found = error.measure(
        model,
        IDS,
        [recipe(name="exact")]
        + [recipe(kvloom.Packed(b, "token", 16), name=f"{b}") for b in (2, 4, 8)]
        + [recipe(None, kvloom.Packed(1.5, "channel", 16, residual=32), name="values")],
    )
    assert error.mean(found["exact"]) == error.LayerError(0, 0, 0, 0, 0)
    outputs = [error.mean(found[name]).output for name in ("2", "4", "8")]
    assert outputs == sorted(outputs, reverse=True)
    assert outputs[2] < 0.02 < outputs[0]
    values = error.mean(found["values"])
    assert (values.keys, values.weights) == (0, 0)
    assert values.output == pytest.approx(values.output_values, rel=1e-6)
    assert getattr(model, "_kvloom", None) is None


def test_layers_have_their_own_formats():
    (found,) = error.measure(
        build("llama-gqa"), IDS, [resolve("kivi:group=16@first 1=full")]
    ).values()
    assert found[0].keys == found[0].values == 0 < found[1].keys


def test_a_recipe_that_does_not_fit_is_refused():
    with pytest.raises(IncompatibleRecipe, match="group=32 does not divide head_dim=16"):
        error.measure(build("llama-gqa"), IDS, [resolve("rtn:group=32")])


def test_on_the_reference_model_keys_want_channels_and_each_step_of_skvq_helps():
    """Table 2's finding for keys; then SKVQ's ladder: keys before RoPE, reorder, clipping."""
    model, tokenizer = load()
    ids = cut_rows(tokenize(tokenizer, library_text()), leading_ids(tokenizer), 2, 512, 0)
    by_axis = [
        recipe(kvloom.Packed(2, axis, 32, residual=32), name=axis) for axis in ("channel", "token")
    ]
    plain = "skvq:group=32,meta=fp16,clip=1.0,reorder=false"
    ladder = [plain, "skvq:group=32,meta=fp16,clip=1.0", "skvq:group=32,meta=fp16"]
    found = error.measure(model, ids, [*by_axis, *map(resolve, ladder)])
    means = {name: error.mean(errors) for name, errors in found.items()}
    assert means["channel"].keys < 0.7 * means["token"].keys
    assert means["channel"].output < means["token"].output
    steps = [means[name].output for name in ladder]
    assert steps == sorted(steps, reverse=True)
    assert steps[-1] < 0.8 * steps[0]


def test_table_and_json():
    found = error.measure(build("llama-gqa"), IDS, [recipe(kvloom.Packed(2, "token", 16))])
    data = error.to_data(found, {"model": "tiny"})
    assert data["environment"] == {"model": "tiny"}
    (row,) = data["rows"]
    assert row["recipe"] == "mine"
    assert [layer["layer"] for layer in row["layers"]] == [0, 1, 2]
    assert row["output"] == pytest.approx(np.mean([x["output"] for x in row["layers"]]))
    from rich.console import Console

    console = Console(width=100, record=True, file=io.StringIO())
    console.print(error_table(found, {"model": "tiny"}))
    text = console.export_text()
    assert "mine" in text
    assert f"{row['output']:.2%}" in text


@pytest.mark.parametrize("bias", [0.0, 20.0])
def test_attach_warns_of_key_biases_that_dominate_groups_of_a_token(bias):
    """As in Qwen2.5: a few channels of keys have a bias that is much larger than all else."""
    model, names = build("qwen2"), ["kivi-4:group=16", "rtn:bits=4,group=16", "turbo"]
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.k_proj.bias.zero_()[[7, 15, 23, 31]] = bias  # that RoPE turns slowly
            ratio = bias / layer.self_attn.k_proj.weight.norm(dim=1).median()
    assert bias == 0 or ratio > 15
    found = error.measure(model, IDS, list(map(resolve, names)))
    assert max(x.weights for x in found[names[0]].values()) < 0.2
    for name in names:
        warned = any("biases of this model's keys" in x for x in kvloom.attach(model, name).notes)
        assert warned == (bias > 0 and name != names[0])
        if warned:
            without = error.measure(build("qwen2"), IDS, [resolve(name)])[name]
            assert found[name][0].weights > 2 * without[0].weights
