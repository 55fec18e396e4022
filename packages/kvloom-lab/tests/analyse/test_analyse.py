"""analyse attention: every figure against the plain formula, and the command."""

from __future__ import annotations

import json
import math
import re

import numpy as np
import pytest
import torch
import zoo
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
)
from typer.testing import CliRunner

from kvloom.hf import read_tokens as forward
from kvloom.hf.cache import Cache
from kvloom.hf.observe import observe_steps
from kvloom_lab.analyse import attention as attention_module
from kvloom_lab.analyse.attention import EDGES, GRID, THRESHOLD, mass_curve, measure, weight_blocks
from kvloom_lab.cli.app import app

CONTEXT, NEW = 40, 6
SIZE = {
    "vocab_size": 97, "hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "initializer_range": 0.4,
}  # fmt: skip


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZE)).eval()


@pytest.fixture(scope="module")
def ids():
    return torch.randint(3, 97, (1, CONTEXT + NEW), generator=torch.Generator().manual_seed(1))


def weights_of(q, k, scale, softcap=None, sinks=None):
    """Attention weights by loops, float64: {(query head, row): [keys it sees]}.

    sinks: learned logits, of which each head's takes a share.
    """
    q, k = q.double().numpy(), k.double().numpy()
    share, past = len(q) // len(k), k.shape[1] - q.shape[1]
    found = {}
    for h in range(len(q)):
        for row in range(q.shape[1]):
            s = np.array([q[h, row] @ k[h // share, j] for j in range(past + row + 1)]) * scale
            if softcap is not None:
                s = softcap * np.tanh(s / softcap)
            if sinks is not None:
                s = np.array([*s, sinks[h]])
            found[h, row] = (np.exp(s - s.max()) / np.exp(s - s.max()).sum())[: past + row + 1]
    return found


def column_sums(weights, heads, tokens):
    """Attention that each token gets from all rows, [query heads, tokens]."""
    sums = np.zeros((heads, tokens))
    for (h, _), w in weights.items():
        sums[h, : len(w)] += w
    return sums


def looks(model, ids, recipe):
    """By layer: what was seen at the prompt, and at every later step with what was held then."""
    found = {}
    cache = Cache(model, recipe)

    def saw(look):
        n = look.keys.shape[2]
        past = look.cache.logical().flatten(0, 1).tolist()
        held = [{n - 1, *head} for head in past]
        found.setdefault(look.layer, []).append(
            (
                look.q[0].clone(),
                look.keys[0].clone(),
                look.scale,
                look.softcap,
                None if look.sink_logits is None else look.sink_logits.detach().numpy(),
                held,
            )
        )

    observe_steps(cache, saw)
    with torch.inference_mode():
        forward(model, ids[:, :CONTEXT], cache)
        for i in range(CONTEXT, CONTEXT + NEW):
            forward(model, ids[:, i : i + 1], cache)
    return found


@pytest.fixture(scope="module", params=["llama", "softcap", "sinks"])
def measured(request, model, ids):
    """A model's figures under h2o, and what its layers saw."""
    if request.param == "softcap":
        torch.manual_seed(0)
        extra = {"attn_logit_softcapping": 5.0, "query_pre_attn_scalar": 16, "sliding_window": 4096}
        config = Gemma2Config(**SIZE, **extra, layer_types=["full_attention"] * 2)
        model = Gemma2ForCausalLM(config).eval()
    if request.param == "sinks":
        torch.manual_seed(0)
        config = GptOssConfig(
            **SIZE, layer_types=["full_attention"] * 2, num_local_experts=2, num_experts_per_tok=1
        )
        model = GptOssForCausalLM(config).eval()
        for layer in model.model.layers:
            layer.self_attn.sinks.data = torch.tensor([4.0, -1.0, 2.0, 6.0])
    found = measure(model, ids, context=CONTEXT, recipe="h2o:tokens=16")
    return found, looks(model, ids, "h2o:tokens=16")


def test_sparsity_is_the_share_of_weights_below_a_hundredth_of_the_row_largest(measured):
    assert THRESHOLD == 0.01
    for layer in measured[0]:
        weights = weights_of(*measured[1][layer.number][0][:5]).values()
        below = sum(int((w < 0.01 * w.max()).sum()) for w in weights)
        assert layer.sparsity == pytest.approx(below / sum(map(len, weights)), abs=2e-4)
        assert 0 < layer.sparsity < 1


def test_variance_is_that_of_the_column_sums(measured):
    for layer in measured[0]:
        sums = column_sums(weights_of(*measured[1][layer.number][0][:5]), 4, CONTEXT)
        groups = [sums[0] + sums[1], sums[2] + sums[3]]
        spread = [sum((x - g.mean()) ** 2 for x in g) / (CONTEXT - 1) for g in groups]
        assert layer.variance == pytest.approx(sum(spread) / 2, rel=1e-4)


def test_cdf_is_that_of_the_column_sums(measured):
    for layer in measured[0]:
        sums = column_sums(weights_of(*measured[1][layer.number][0][:5]), 4, CONTEXT)
        for i in (5, 25, 50, 90):  # percent of 40 tokens: 2, 10, 20 and 36 of them
            best = [sorted(s, reverse=True)[: i * CONTEXT // 100] for s in sums]
            share = sum(sum(b) / sum(s) for b, s in zip(best, sums, strict=True)) / 4
            assert layer.cdf[i] == pytest.approx(share, abs=1e-5)


def test_cdf_rises_from_0_to_1_and_bends_down(measured):
    for layer in measured[0]:
        rises = np.diff(layer.cdf)
        assert (layer.cdf[0], layer.cdf[-1], len(layer.cdf)) == (0.0, 1.0, len(GRID))
        assert (rises >= 0).all()
        assert (np.diff(rises) <= 1e-12).all()
        assert np.interp(layer.most, GRID, layer.cdf) == pytest.approx(0.9)


def test_cdf_by_hand():
    curve = mass_curve(torch.tensor([[1.0, 4.0, 3.0, 2.0], [0.0, 0.0, 5.0, 0.0]]))
    assert curve[[0, 25, 50, 75, 100]] == pytest.approx([0, 0.7, 0.85, 0.95, 1])
    assert curve[10] == pytest.approx((0.16 + 0.4) / 2)  # between tokens, on a straight line


def bins(scores):
    """Counts between EDGES, by loops; what lies outside is in the outermost."""
    counts = [0] * (len(EDGES) - 1)
    for x in scores:
        at = EDGES[0] if x == 0 else min(max(math.log10(x), EDGES[0]), EDGES[-1])
        counts[min(sum(edge <= at for edge in EDGES[1:]), len(counts) - 1)] += 1
    return counts


def test_scores_before_and_after_are_softmaxes_over_all_and_over_the_held(measured):
    for layer in measured[0]:
        before, after = np.zeros((4, CONTEXT)), np.zeros((4, CONTEXT))
        kept = []
        for *inputs, held in measured[1][layer.number][1:]:
            for (h, _), w in weights_of(*inputs).items():
                inside = np.array([j in held[h // 2] for j in range(len(w))])
                share, sinks = w[inside].sum(), 1 - w.sum()
                kept.append(share / w.sum())
                before[h] += w[:CONTEXT] / NEW
                after[h] += np.where(inside, w / (share + sinks), 0)[:CONTEXT] / NEW
        last = [[j in held[h // 2] for j in range(CONTEXT)] for h in range(4)]
        total = 4 * CONTEXT
        assert layer.kept == pytest.approx(np.mean(kept), abs=1e-5)
        assert 0 < layer.kept < 1
        assert layer.before == pytest.approx(np.divide(bins(before.ravel()), total))
        assert layer.after == pytest.approx(np.divide(bins(after[np.array(last)]), total))
        assert sum(layer.before) == pytest.approx(1)
        assert layer.held_tokens == 16
        assert sum(layer.after) == pytest.approx(np.mean(last))


def test_attention_with_learned_sinks_is_what_transformers_computes(ids):
    model = zoo.build("gpt-oss", layer_types=["full_attention"] * 2, num_hidden_layers=2)
    for layer in model.model.layers:
        layer.self_attn.sinks.data = torch.tensor([5.0, -1.0, 2.0, 6.0])
    found = measure(model, ids, context=CONTEXT)
    model.set_attn_implementation("eager")
    with torch.inference_mode():
        plain = model(ids[:, :CONTEXT], output_attentions=True, use_cache=False).attentions
    for layer, weights in zip(found, plain, strict=True):
        groups = weights[0].sum(dim=1).view(2, 2, CONTEXT).sum(dim=1)
        assert layer.variance == pytest.approx(groups.var(dim=-1).mean().item(), rel=1e-4)


def test_with_nothing_dropped_nothing_changes(model, ids):
    for layer in measure(model, ids, context=CONTEXT, recipe="kivi:group=16"):
        assert layer.kept == pytest.approx(1)
        assert layer.before == layer.after
        assert layer.held_tokens == CONTEXT


def test_blocks_of_rows_change_nothing(model, ids, monkeypatch):
    whole = measure(model, ids, context=CONTEXT)
    monkeypatch.setattr(attention_module, "_BLOCK_NUMEL", 4 * CONTEXT * 7)  # seven rows a block
    for a, b in zip(whole, measure(model, ids, context=CONTEXT), strict=True):
        assert a.sparsity == b.sparsity
        assert a.cdf == pytest.approx(b.cdf)
        assert a.variance == pytest.approx(b.variance)


def test_no_block_holds_more_than_its_share(monkeypatch):
    monkeypatch.setattr(attention_module, "_BLOCK_NUMEL", 1000)
    q, k = torch.randn(4, 64, 8), torch.randn(2, 64, 8)
    shapes = [w.shape for w in weight_blocks(q, k, 1.0, None)]
    assert max(math.prod(shape) for shape in shapes) <= 1000
    assert sum(shape[1] for shape in shapes) == 64


def test_the_model_is_left_as_it_was_and_progress_adds_up(ids):
    fresh, units = LlamaForCausalLM(LlamaConfig(**SIZE)).eval(), []
    measure(fresh, ids, context=CONTEXT, progress=lambda what, n: units.append(n))
    assert getattr(fresh, "_kvloom", None) is None
    assert sum(units) == NEW + 1


# --- the command ---------------------------------------------------------------------------------


def run(*args):
    return CliRunner().invoke(app, ["analyse", "attention", *map(str, args)])


def test_the_command_shows_table_picture_and_json(tmp_path):
    out, png = tmp_path / "a.json", tmp_path / "a.png"
    found = run("--context", 96, "--max-new-tokens", 4, "--json", out, "--plot", png)
    assert found.exit_code == 0, found.output
    assert png.read_bytes().startswith(b"\x89PNG")
    data = json.loads(out.read_text())
    assert [layer["number"] for layer in data["layers"]] == list(range(6))
    assert (data["threshold"], data["grid"], data["edges"]) == (THRESHOLD, GRID, EDGES)
    facts = data["environment"]
    assert (facts["model"], facts["recipe"], facts["context"]) == ("reference", "h2o", 96)
    assert facts["text"] == "CPython's library"
    for layer in data["layers"]:
        row = rf"{layer['number']} +{layer['sparsity']:.1%} +{layer['most']:.1%} .* 48 +"
        assert re.search(row + f"{layer['kept']:.1%}", found.stdout), found.stdout


@pytest.mark.parametrize("option", [[], ["--text"]])
def test_json_to_stdout_is_nothing_else(tmp_path, option):
    text = tmp_path / "text.txt"
    text.write_text("The magic number is not here.\n" * 40)
    found = run(
        *option, text, "--context", 64, "--max-new-tokens", 2, "--recipe", "full", "--json", "-"
    )
    assert json.loads(found.stdout)["environment"]["text"] == "text.txt"
