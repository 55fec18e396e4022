"""`kvloom tune`: scores of layers, the knapsack, whole recipes, and what is refused."""

import copy
import json
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from small_search import few
from typer.testing import CliRunner

import kvloom
import kvloom_lab
import probe
import tiny
from kvloom.calibrate import ReadPrompt, read_prompt
from kvloom.errors import IncompatibleRecipe, InputError
from kvloom.hf import compat
from kvloom.recipe import LayerOverride, Recipe
from kvloom_lab.cli.app import app
from kvloom_lab.models import load
from kvloom_lab.tuner import Settings
from kvloom_lab.tuner.candidates import Choice, RecipeShape, by_layer, evicting, uniform
from kvloom_lab.tuner.problem import Bound
from kvloom_lab.tuner.run import in_float32
from kvloom_lab.tuner.scores import Scores

SMALL = Settings(texts=2, tokens=16, passages=1, passage=8, window=4)
CONTEXT = 96
NEITHER = "give either --share (share=), such as 0.2, or --quality (kl=), such as kl=0.01"


@pytest.fixture
def tune(monkeypatch, tmp_path, model, tokenizer):
    """A function that tunes the tiny model; scores are in a folder of the test."""
    few(monkeypatch)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def run(**options):
        options = {"context": CONTEXT, "settings": SMALL, "folder": tmp_path / "scores"} | options
        return kvloom_lab.tune(model, tokenizer, tiny.TEXT, **options)

    return run


def ids(model, tokens, seed=0):
    torch.manual_seed(seed)
    return torch.randint(3, model.config.vocab_size, (1, tokens))


# passes


@torch.inference_mode()
@pytest.mark.parametrize("share", [0.4, 0.56])
def test_shares_of_layers_are_those_of_a_cache_whose_heads_compete(model, read, share):
    shape = RecipeShape(4, layers="joint")
    recipe = uniform(Choice(kept=f"joint-{share}"), shape)
    cache = kvloom.Cache(model, recipe)
    model(input_ids=ids(model, CONTEXT), past_key_values=cache)
    held = [1 - probe.dropped(layer) / CONTEXT for layer in probe.layers(cache)]
    kept = read.kept(recipe)
    assert kept == held
    assert len(set(kept)) > 1
    assert np.mean(kept) == pytest.approx(int(share * CONTEXT) / CONTEXT)


@pytest.fixture
def read(model):
    return ReadPrompt(model, ids(model, CONTEXT), ids(model, 12, seed=1), step=4)


@torch.inference_mode()
def decoded(model, recipe, step):
    """Log-probabilities of the continuation of `read`, from a cache that reads it in steps."""
    cache = kvloom.Cache(model, recipe)
    model(input_ids=ids(model, CONTEXT), past_key_values=cache)
    pieces = ids(model, 12, seed=1).split(step, dim=1)
    logits = [model(input_ids=new, past_key_values=cache).logits[0] for new in pieces]
    return torch.cat(logits).log_softmax(-1)


@torch.inference_mode()
@pytest.mark.parametrize(
    ("first", "kept"),
    [(Choice("rotated-2", "turbo-2"), "snapkv-0.3"), (Choice(), "kvzip-0.3")],
    ids=["snapkv", "kvzip"],  # the prompt of `read` is repeated with every layer exact
)
def test_a_whole_recipe_is_measured_as_a_cache_decodes_it(model, read, first, kept):
    choices = [first, Choice(), Choice("rotated-4", "exact", kept)]
    recipe = by_layer(choices, range(3), RecipeShape(4))
    kl = read.whole([Recipe(), recipe])
    exact, other = decoded(model, Recipe(), 4), decoded(model, recipe, 4)
    assert kl[0].max() < 1e-5
    torch.testing.assert_close(kl[1], (exact.exp() * (exact - other)).sum(-1), rtol=1e-3, atol=1e-5)
    assert kl[1].min() > 1e-4  # every token attends to packed ones


@torch.inference_mode()
@pytest.mark.parametrize("others", ["all", "kvzip-0.5", "snapkv-0.5"])
@pytest.mark.parametrize("number", range(3))
def test_one_layer_equals_a_recipe_whose_other_layers_evict_alike(
    model, read, number, others, monkeypatch
):
    packed = Choice("rotated-2", "turbo-2", "snapkv-0.3")
    tried = [uniform(x, RecipeShape(4)) for x in (Choice(), packed)]
    other = Choice(kept=others)
    rest = uniform(other, RecipeShape(4)) if others == "all" else evicting(other, RecipeShape(4))
    own = LayerOverride(str(number), keep=tried[1].keep, store=tried[1].store)
    recipe = replace(rest, layers=(own,))

    def scored(prompt):
        base = prompt.exact if others == "all" else prompt.evicted(rest)
        return prompt.one_layer(number, tried, base)

    read.step = 12  # one step, as a layer is scored
    kl = scored(read)
    if others == "all":
        assert kl[0].max() < 1e-5
    assert kl[1].min() > 0
    torch.testing.assert_close(kl[1], read.whole([recipe])[0], rtol=1e-3, atol=1e-5)
    monkeypatch.setattr(compat, "decoder_layers", lambda model: [])  # nothing is skipped
    whole = ReadPrompt(model, ids(model, CONTEXT), ids(model, 12, seed=1), step=12)
    torch.testing.assert_close(kl, scored(whole), rtol=1e-3, atol=1e-5)


@torch.inference_mode()
def test_a_model_in_half_precision_is_scored_in_float32_and_has_its_weights_again(model):
    half = copy.deepcopy(model).to(torch.bfloat16)
    before = {name: x.data_ptr() for name, x in half.named_parameters()}
    buffers = {name: x.clone() for name, x in half.named_buffers()}
    with in_float32(half):
        assert half.dtype == torch.float32
        assert ReadPrompt(half, ids(half, CONTEXT), ids(half, 4), step=4).logp.isfinite().all()
    assert {name: x.data_ptr() for name, x in half.named_parameters()} == before
    assert all(torch.equal(x, buffers[name]) for name, x in half.named_buffers())


def test_a_pass_leaves_the_forwards_of_the_model(model, read):
    read.one_layer(2, [uniform(Choice("rotated-2"), RecipeShape(4))], read.exact)
    assert all("forward" not in vars(layer) for layer in model.model.layers)


# tuning


def test_a_recipe_has_the_bytes_of_its_bound_and_says_where_it_comes_from(tune, model):
    found = tune(share=0.3, context=None, settings=replace(SMALL, context=CONTEXT))
    geometry = compat.geometry(model)
    exact = Recipe().nbytes(CONTEXT, geometry)
    assert found.recipe.nbytes(CONTEXT, geometry) <= 0.3 * exact
    tuned = found.tuned
    assert tuned.nbytes == tuned.predicted_nbytes == found.recipe.nbytes(CONTEXT, geometry)
    assert tuned.bound == "share=0.3"
    assert 0 < tuned.kl < tuned.kl_p99
    assert sum(found.predicted.values()) == pytest.approx(tuned.predicted_kl, rel=1e-3)
    assert Recipe.from_toml(found.recipe.to_toml()) == found.recipe
    shares, costs = zip(*found.front, strict=True)
    assert sorted(shares) == list(shares)
    assert sorted(costs, reverse=True) == list(costs)


def test_tuning_detaches_a_model_that_was_not_attached(tune, model):
    kvloom.Cache(model, "full")
    kvloom.detach(model)
    tune(share=0.3)
    assert getattr(model, "_kvloom", None) is None


def test_a_bound_on_the_divergence_is_met_with_fewer_bytes_where_it_is_looser(tune):
    tight, loose = tune(kl=0.02), tune(kl=0.2)
    assert tight.tuned.kl <= 0.02
    assert loose.tuned.kl <= 0.2
    assert loose.tuned.nbytes < tight.tuned.nbytes


def test_scores_far_above_the_divergences_of_whole_recipes_take_no_more_bytes(tune, monkeypatch):
    usual, costs = tune(kl=0.2), Scores.costs
    monkeypatch.setattr(
        Scores, "costs", lambda *args: {choice: 1e4 * x for choice, x in costs(*args).items()}
    )
    assert tune(kl=0.2).tuned.nbytes < 1.15 * usual.tuned.nbytes


def test_a_divergence_that_no_measured_recipe_has_is_refused_with_the_nearest(tune, monkeypatch):
    whole = ReadPrompt.whole
    monkeypatch.setattr(ReadPrompt, "whole", lambda *x: torch.ones_like(whole(*x)))
    with pytest.raises(InputError, match=r"is within kl=0.5; the nearest has kl=1: allow"):
        tune(kl=0.5)


def test_another_bound_is_solved_without_scoring_again(tune, monkeypatch):
    tune(share=0.3)
    monkeypatch.setattr(ReadPrompt, "one_layer", None)
    assert tune(share=0.5).tuned.kl < tune(share=0.25).tuned.kl


def test_an_interrupted_pass_is_continued(tune, monkeypatch, tmp_path):
    scored, one_layer = [], ReadPrompt.one_layer

    def interrupted(self, number, recipes, base):
        if base is self.exact:
            if len(scored) == 4:
                raise KeyboardInterrupt
            scored.append(number)
        return one_layer(self, number, recipes, base)

    monkeypatch.setattr(ReadPrompt, "one_layer", interrupted)
    with pytest.raises(KeyboardInterrupt):
        tune(share=0.3)
    lines = tmp_path / "scores" / "scores.jsonl"
    with lines.open("a") as file:
        file.write('{"text": 1, "lay')  # a line that was written in part
    scored.clear()
    resumed = tune(share=0.3)
    assert scored == [1, 2]
    assert len(lines.read_text().splitlines()) == 6
    monkeypatch.setattr(ReadPrompt, "one_layer", one_layer)
    assert resumed.recipe == tune(share=0.3, folder=tmp_path / "fresh").recipe


def test_scores_of_other_settings_and_damaged_ones_are_refused(tune, tmp_path):
    tune(share=0.3)
    with pytest.raises(InputError, match="scores of another model, text or settings"):
        tune(share=0.3, settings=replace(SMALL, seed=1))
    lines = tmp_path / "scores" / "scores.jsonl"
    lines.write_text("{}\n" + lines.read_text())
    with pytest.raises(InputError, match=r"line 1 of .* is not a line of scores; remove the line"):
        tune(share=0.3)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, re.escape(NEITHER)),
        ({"share": 0.2, "kl": 0.1}, re.escape(NEITHER)),
        ({"share": 1.5}, "share=1.5 must be above 0 and at most 1"),
        ({"kl": 0.0}, "kl=0 must be above 0"),
        ({"share": 0.001}, "no recipe takes 0.001 of the exact cache's bytes .* the nearest bound"),
        ({"share": 0.3, "context": 600}, "the model has 512"),
        ({"share": 0.3, "settings": Settings(tokens=480)}, "the model has 512"),
    ],
)
def test_bounds_and_sizes_out_of_reach_are_refused_before_any_pass(
    tune, options, said, monkeypatch
):
    monkeypatch.setattr(read_prompt, "read_tokens", None)
    with pytest.raises(InputError, match=said):
        tune(**options)


def test_the_nearest_bound_can_be_reached(tune):
    with pytest.raises(InputError) as refused:
        tune(share=0.001)
    nearest = float(str(refused.value).rpartition("=")[2])
    assert tune(share=nearest).tuned.share <= nearest


def test_a_text_that_is_too_short_is_refused(model, tokenizer):
    with pytest.raises(InputError, match=r"the text has .* tokens"):
        kvloom_lab.tune(model, tokenizer, "a few words", share=0.3, context=CONTEXT)


def test_a_recipe_of_another_model_is_refused_with_both_fingerprints(tune, tmp_path):
    found = tune(share=0.3)
    path = tmp_path / "tuned.toml"
    path.write_text(found.recipe.to_toml())
    other = tiny.llama(num_hidden_layers=3, rope_theta=1e4)
    with torch.no_grad():
        other.model.norm.weight += 1
    for make in (kvloom.attach, kvloom.Cache):
        with pytest.raises(IncompatibleRecipe, match=found.tuned.model) as refused:
            make(other, path)
        assert "this model has weights" in str(refused.value)
        assert getattr(other, "_kvloom", None) is None


def test_the_bound_ranks_what_was_measured():
    bytes_first, quality = Bound(0.5, None, 100), Bound(None, 0.1, 100)

    class One:
        def __init__(self, nbytes, mean):
            self.nbytes, self.mean = nbytes, mean

    small, good, large, far = One(20, 0.3), One(50, 0.05), One(90, 0.01), One(10, 0.4)
    assert sorted([large, small, good], key=bytes_first.rank) == [good, small, large]
    assert sorted([far, large, small, good], key=quality.rank) == [good, large, small, far]


def test_a_share_counts_layers_with_windows(monkeypatch, tmp_path, tokenizer):
    few(monkeypatch)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    model = tiny.gemma(window=64)
    options = {"context": CONTEXT, "settings": SMALL, "folder": tmp_path / "scores"}
    tuning = kvloom_lab.tune(model, tokenizer, tiny.TEXT, share=0.7, **options)
    cache = kvloom.Cache(model, tuning.recipe)
    with torch.no_grad():
        model(ids(model, CONTEXT), past_key_values=cache)
    assert tuning.tuned.nbytes == tuning.tuned.predicted_nbytes == cache.nbytes
    assert tuning.tuned.share == pytest.approx(cache.nbytes / cache.full_nbytes, abs=1e-4)
    assert 0.6 < tuning.tuned.share <= 0.7
    with pytest.raises(InputError, match=r"the nearest bound is share=0\.[56]"):
        kvloom_lab.tune(model, tokenizer, tiny.TEXT, share=0.3, **options)


# the command


def test_the_command_writes_recipe_json_and_plot(here, tmp_path, monkeypatch):
    few(monkeypatch)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("kvloom_lab.tuner.run.Settings", lambda: SMALL)
    out = tmp_path / "tuned.toml"
    command = ["tune", here / "model", "--text", here / "text.txt", "--share", "0.3",
               "--context", "256"]  # fmt: skip
    found = CliRunner().invoke(app, [str(x) for x in command])
    assert found.exit_code == 0, found.output
    assert "run the same command with --out recipe.toml" in found.stderr
    outputs = ["--out", out, "--json", tmp_path / "a.json", "--plot", tmp_path / "a.png"]
    found = CliRunner().invoke(app, [str(x) for x in (*command, *outputs)])
    assert found.exit_code == 0, found.output
    assert "predicted" in found.stdout
    assert "--out" not in found.stderr
    recipe = Recipe.from_toml(out)
    figures = json.loads((tmp_path / "a.json").read_text())
    assert Recipe.from_dict(figures["recipe"]) == recipe
    assert [one["layer"] for one in figures["layers"]] == [0, 1]
    assert figures["environment"]["text"] == "text.txt"
    assert (tmp_path / "a.png").stat().st_size > 1000
    model, _ = load(str(here / "model"))
    assert kvloom.Cache(model, out).recipe.layers == recipe.layers


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--share 0.2 --quality 0.01", "--quality '0.01' must be a divergence in nats"),
        ("--quality kl=x", "--quality 'kl=x' must be a divergence in nats"),
        ("--quality kl=0", "kl=0 must be above 0"),
        ("--quality kl=inf", "kl=inf must be above 0"),
        ("--share 2", "share=2 must be above 0 and at most 1"),
        ("", NEITHER),
        ("--share 0.2 --out nowhere/a.toml", "give a file in a folder that exists"),
        ("--share 0.2 --out a.json", "--out 'a.json' must end in .toml"),
        ("--share 0.2 --plot a.txt", "must end in one of"),
    ],
)
def test_mistakes_are_one_sentence(here, words, said):
    arguments = ["tune", str(here / "model"), "--text", str(here / "text.txt"), *words.split()]
    found = CliRunner().invoke(app, arguments)
    assert found.exit_code == 2
    assert said in found.stderr
    assert found.stderr.count("\n") == 1


def test_ctrl_c_says_how_to_resume(here, monkeypatch):
    def interrupted(*args, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr("kvloom_lab.tuner.tune", interrupted)
    arguments = ["tune", here / "model", "--text", here / "text.txt", "--share", "0.2"]
    found = CliRunner().invoke(app, [str(x) for x in arguments])
    assert found.exit_code == 130
    assert "Run the same command again to resume." in found.stderr
