"""Parts from another distribution in caches of real models: they run, save, load and compare."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
import transformers as tf
from examples import installed
from typer.testing import CliRunner

import kvloom
import probe
import tiny
from beams import assert_rows_follow_beams
from floor import short_prompts_evict
from kvloom.errors import RecipeError
from kvloom.hf import geometry, layer_ropes
from kvloom.keep import SCORERS, Budget, Keep, Scorer
from kvloom.kernels import dispatch, operations_run, ops
from kvloom.kernels.plan import OpPlan
from kvloom.kernels.select import reference
from kvloom.positions.rope import Rope
from kvloom.recipe import Protect, Recipe, resolve
from kvloom_lab.cli.app import app
from kvloom_lab.inspect import trace_recipe
from near import assert_near
from sampling import slow_except

__all__ = ["short_prompts_evict"]

RECIPES = {
    "score": "evict:score=value-norm,tokens=40,when=prompt,recent=8",
    "score, every step": "evict:score=value-norm,tokens=40",
    "format": "store:format=int8,unit=8,recent=16",
    "format, layers": "full@1=store:format=int8@2=kivi:group=16,residual=32",
    "index": "recall:index=means,unit=4,tokens=40,sinks=4,recent=8,full_layers=1",
    "index, format": "recall:index=means,unit=4,tokens=40,sinks=4,recent=8@1=store:format=int8",
    "recipe": "kivi-between:residual=32",
    "recipe, start": "kivi-between:residual=32,compress_after=90",
    "score, start": "evict:score=value-norm,tokens=40,when=prompt,recent=8,compress_after=90",
    "filter": "store:bits=2,group=16,sinks=2,recent=8,outliers=12,outlier_score=token-ids",
    "filter, start": "store:bits=2,group=16,sinks=2,recent=8,outliers=12,outlier_score=token-ids,"
    "compress_after=90",
}
every = pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
of_each_kind = pytest.mark.parametrize("recipe", slow_except(
    RECIPES, "score, every step", "format, layers", "index, format", "recipe, start",
    "score, start", "filter",
))  # fmt: skip
PROMPT, STEPS = 80, 20


@pytest.fixture(autouse=True)
def _installed():
    with installed("my_score", "my_filter", "my_format", "my_index", "my_recipe"):
        yield


@pytest.fixture(scope="module")
def model():
    return tiny.llama(head_dim=32)


def batch(tokens: int = PROMPT, rows: int = 2) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randint(3, 200, (rows, tokens), generator=generator)


def logits(model, cache, ids) -> list[torch.Tensor]:
    """Logits of a prompt and of single steps after it."""
    with torch.inference_mode():
        found = [model(ids[:, :PROMPT], past_key_values=cache).logits[:, -1]]
        for at in range(PROMPT, ids.shape[1]):
            found.append(model(ids[:, at : at + 1], past_key_values=cache).logits[:, -1])
    return found


@every
def test_predicted_bytes_are_those_of_a_cache_after_a_prompt(model, recipe):
    for tokens in (7, 41, PROMPT, 91, 130):
        cache = kvloom.Cache(model, recipe)
        with torch.inference_mode():
            model(batch(tokens), past_key_values=cache)
        assert cache.nbytes == cache.recipe.nbytes(tokens, cache.geometry, batch=2)


@of_each_kind
def test_a_loaded_cache_continues_as_the_saved_one(model, recipe, tmp_path):
    ids = batch(PROMPT + STEPS)
    cache = kvloom.Cache(model, recipe)
    logits(model, cache, ids[:, : PROMPT + 5])
    cache.save(tmp_path / "prefix.kv")
    loaded = kvloom.Cache.load(model, tmp_path / "prefix.kv")
    assert (loaded.recipe, loaded.nbytes) == (cache.recipe, cache.nbytes)
    with torch.inference_mode():
        for at in range(PROMPT + 5, PROMPT + STEPS):
            token = ids[:, at : at + 1]
            a, b = (model(token, past_key_values=one).logits for one in (cache, loaded))
            assert torch.equal(a, b)


@of_each_kind
def test_generation_follows_beams(model, recipe):
    ids = batch()
    assert_rows_follow_beams(
        model, recipe, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    )


def test_a_format_costs_the_accuracy_of_its_codes(model):
    ids = batch(PROMPT + STEPS)
    exact = logits(model, kvloom.Cache(model, "full"), ids)
    means = []
    for recipe in ("store:format=int8", "rtn:bits=8", "rtn:bits=4"):
        packed = logits(model, kvloom.Cache(model, recipe), ids)
        assert torch.equal(exact[0], packed[0])  # a prompt attends exactly
        errors = [(a - b).norm() / a.norm() for a, b in zip(exact[1:], packed[1:], strict=True)]
        means.append(sum(errors) / len(errors))
    assert 0 < means[0] < 2 * means[1] < means[2]


def test_a_score_keeps_the_tokens_that_it_rates_highest(model):
    """The first layer's kept tokens, from its keys, values and attention in plain transformers."""
    recipe = "evict:score=value-norm,tokens=20,when=prompt,recent=0"
    ids, cache = batch(), kvloom.Cache(model, recipe)
    layer = probe.layers(cache)[0]
    layer.observe()
    logits(model, cache, ids)
    plain = tiny.llama(head_dim=32)
    plain.set_attn_implementation("eager")  # which returns its weights
    stock = tf.DynamicCache(config=plain.config)
    with torch.inference_mode():
        out = plain(ids, use_cache=True, past_key_values=stock, output_attentions=True)
    weights = out.attentions[0].unflatten(1, (2, 2)).sum(dim=(2, 3))  # of a head's 2 queries
    scores = weights * stock.layers[0].values.norm(dim=-1)
    kept = scores.topk(20, dim=-1).indices.sort(dim=-1).values
    assert torch.equal(layer.logical().sort(dim=-1).values, kept)
    oldest = torch.arange(20).expand_as(kept)
    assert not torch.equal(kept, oldest)
    assert not torch.equal(kept, oldest + PROMPT - 20)


class Wrong(Scorer):
    """A score that returns what a test sets."""

    kind = "wrong"
    returns = staticmethod(lambda step: None)

    def __call__(self, step):
        return self.returns(step)


@pytest.mark.parametrize(
    ("returns", "says"),
    [
        (lambda step: step.mass()[..., 1:], "score 'wrong' returned float32"),
        (lambda step: step.mass().double(), "score 'wrong' returned float64"),
        (lambda step: step.mass() * torch.nan, "score 'wrong' returned NaN"),
    ],
)
@pytest.mark.parametrize("when", ["prompt", "step"])
def test_a_wrong_score_is_refused_and_the_cache_is_as_before(
    model, monkeypatch, returns, says, when
):
    if Wrong.kind not in SCORERS:
        kvloom.register_score(Wrong)
    recipe = Recipe(keep=Keep(Budget(20), Wrong(), when=when))
    good = lambda step: step.mass()  # noqa: E731
    cache = kvloom.Cache(model, recipe)
    monkeypatch.setattr(Wrong, "returns", staticmethod(returns))
    with pytest.raises(RecipeError, match=says):
        model(batch(), past_key_values=cache)
    assert (cache.get_seq_length(), cache.nbytes) == (0, 0)
    monkeypatch.setattr(Wrong, "returns", staticmethod(good))
    with torch.inference_mode():
        model(batch(), past_key_values=cache)
    if when == "step":
        before = cache.nbytes
        monkeypatch.setattr(Wrong, "returns", staticmethod(returns))
        with pytest.raises(RecipeError, match=says):
            model(batch(1), past_key_values=cache)
        assert (cache.get_seq_length(), cache.nbytes) == (PROMPT, before)


def test_a_wrong_rule_of_outliers_is_refused_by_name(model):
    def rule(step):
        return step.k.norm(dim=-1).double()

    protect = Protect(outliers=kvloom.Outliers(4, rule))
    recipe = Recipe(store=resolve("rtn:group=16").store, protect=protect)
    cache = kvloom.Cache(model, recipe)
    with pytest.raises(RecipeError, match="score 'rule' returned float64"):
        model(batch(), past_key_values=cache)
    assert cache.nbytes == 0


# --- layers and start ----------------------------------------------------------------------------


def test_layers_with_the_same_recipe_as_the_others_change_nothing(model):
    ids = batch(PROMPT + STEPS)
    plain = logits(model, kvloom.Cache(model, "kivi:group=16,residual=32"), ids)
    spelled = "full@0-2=kivi:group=16,residual=32"
    for a, b in zip(plain, logits(model, kvloom.Cache(model, spelled), ids), strict=True):
        assert torch.equal(a, b)


def test_overriding_every_layer_by_full_is_full(model):
    ids = batch(PROMPT + STEPS)
    exact = logits(model, kvloom.Cache(model, "full"), ids)
    found = logits(model, kvloom.Cache(model, "h2o:tokens=20@0-2=full"), ids)
    for a, b in zip(exact, found, strict=True):
        assert torch.equal(a, b)


LATE = {
    "kivi": resolve("kivi:group=16,residual=32"),
    "snapkv": resolve("snapkv:tokens=40,window=8"),
    "h2o": resolve("h2o"),
    "window": resolve("window:tokens=40"),
    "quest": resolve("quest:tokens=40,page=4,sinks=4,recent=8,full_layers=1"),
    "infinigen": resolve("infinigen:tokens=40,sinks=4,recent=8,full_layers=1"),
    "outliers": Recipe(
        store=resolve("rtn:group=16").store, protect=Protect(2, 8, kvloom.Outliers(4))
    ),
}
late_recipes = pytest.mark.parametrize("recipe", LATE.values(), ids=LATE)


@late_recipes
def test_up_to_the_start_a_cache_is_full(model, recipe):
    ids, end = batch(PROMPT + STEPS), PROMPT + STEPS
    exact, full = kvloom.Cache(model, "full"), resolve("full")
    late = kvloom.Cache(model, replace(recipe, compress_after=end))
    for a, b in zip(logits(model, exact, ids), logits(model, late, ids), strict=True):
        assert_near(a, b, 1e-5)  # sinks are a part of their own
    assert late.nbytes >= late.recipe.nbytes(end, late.geometry, 2)
    with torch.inference_mode():
        model(ids[:, :1], past_key_values=late)
    assert late.nbytes == late.recipe.nbytes(end + 1, late.geometry, 2)
    assert late.nbytes < full.nbytes(end + 1, late.geometry, 2) or recipe.recall is not None


@late_recipes
def test_past_the_start_all_tokens_are_one_prompt(model, recipe):
    """A prompt that crosses the start at once is a prompt without a start."""
    ids = batch(PROMPT + STEPS)
    early = kvloom.Cache(model, recipe)
    late = kvloom.Cache(model, replace(recipe, compress_after=PROMPT // 2))
    for a, b in zip(logits(model, early, ids), logits(model, late, ids), strict=True):
        assert torch.equal(a, b)
    assert early.nbytes == late.nbytes


@late_recipes
def test_steps_that_cross_the_start_leave_what_a_prompt_would(model, recipe):
    ids = batch(PROMPT + STEPS)
    prompt, steps = (
        kvloom.Cache(model, one) for one in (recipe, replace(recipe, compress_after=90))
    )
    with torch.inference_mode():
        model(ids[:, :91], past_key_values=prompt)
    logits(model, steps, ids[:, :91])
    assert steps.nbytes == prompt.nbytes
    with torch.inference_mode():
        for at in range(91, PROMPT + STEPS):
            token = ids[:, at : at + 1]
            a, b = (model(token, past_key_values=one).logits for one in (prompt, steps))
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)


# --- commands ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    here = tmp_path_factory.mktemp("here")
    tiny.llama(head_dim=32).save_pretrained(here / "model")
    tiny.tokenizer().save_pretrained(here / "model")
    (here / "text.txt").write_text(tiny.TEXT)
    return here


def test_compare_takes_them(folder):
    recipes = [spelled for name, spelled in RECIPES.items() if "start" not in name]
    found = CliRunner().invoke(
        app,
        ["compare", str(folder / "text.txt"), "--model", str(folder / "model"), "--json", "-",
         "--context", "120", "--max-new-tokens", "32", "--batch", "2", "--questions", "2",
         "--recipes", ",".join(recipes)],
    )  # fmt: skip
    assert found.exit_code == 0, found.output
    rows = {row["recipe"]: row for row in json.loads(found.stdout)["rows"]}
    assert list(rows) == ["full", *recipes]
    assert all(row["problem"] is None for row in rows.values())
    smaller = [name for name in recipes if not name.startswith("recall")]
    assert all(rows[name]["kv_bytes"] < rows["full"]["kv_bytes"] for name in smaller)


@of_each_kind
def test_inspect_takes_them(model, recipe):
    data = trace_recipe(model, tiny.tokenizer(), recipe, tiny.TEXT, context=60, new_tokens=5)
    assert data["recipe"] == recipe
    assert Recipe.from_toml(data["toml"]) == resolve(recipe)
    assert len(data["layers"]) == 3


def test_inspect_names_the_format(model):
    data = trace_recipe(
        model, tiny.tokenizer(), "store:format=int8", tiny.TEXT, context=60, new_tokens=2
    )
    assert data["formats"] == dict.fromkeys(("keys", "values"), "int8 (8.25 bits per value)")


def test_a_format_without_a_kernel_is_counted_with_the_reason(model):
    cache, ids = kvloom.Cache(model, "store:format=int8"), batch(PROMPT + 1)
    with torch.no_grad(), dispatch.use("auto"):
        model(ids[:, :PROMPT], past_key_values=cache)
        dispatch.ran.clear()
        model(ids[:, PROMPT:], past_key_values=cache)
    layers = model.config.num_hidden_layers
    assert dispatch.ran["attend", "ref", "int8: it has no attention kernel"] == layers


@pytest.mark.parametrize(
    ("name", "where"),
    [("quest:page=4,sinks=4,recent=8", "Slots"), ("snapkv:window=8,head_share=0.2", "Spans")],
)
def test_chosen_tokens_of_a_format_are_counted_with_the_reason(model, name, where):
    recipe = replace(resolve(name + ",tokens=40"), store=resolve("store:format=int8").store)
    cache, ids = kvloom.Cache(model, recipe), batch(PROMPT + 1)
    with torch.no_grad(), dispatch.use("auto"):
        model(ids[:, :PROMPT], past_key_values=cache)
        dispatch.ran.clear()
        model(ids[:, PROMPT:], past_key_values=cache)
    assert dispatch.ran["attend", "ref", f"int8: a format's kernel reads no {where}"] > 0
    assert not any("not supported" in why for *_, why in dispatch.ran)


# --- a kernel backend ----------------------------------------------------------------------------


@pytest.fixture
def backend(monkeypatch):
    """The backend, registered for one test."""
    monkeypatch.setattr(dispatch, "_registered", {})
    monkeypatch.setattr(ops.page_bounds, "backends", dict(ops.page_bounds.backends))
    monkeypatch.setattr(ops.page_bounds, "bindings", {})
    with installed("my_backend"):
        from kvloom.registry import load_plugins

        load_plugins()
        yield


def test_the_backend_computes_what_the_reference_does(backend):
    x = torch.randn(2, 3, 32, 16)
    visible = torch.ones(2, 1, 32, dtype=torch.bool)
    visible[1, :, :20] = False
    with dispatch.use("one-pass"):
        assert ops.page_bounds.choose(x, 8, None).backend == "one-pass"
        for hidden in (None, visible):
            want = reference.page_bounds(x, 8, hidden)
            for a, b in zip(ops.page_bounds(x, 8, hidden), want, strict=True):
                assert torch.equal(a, b)
        bound = ops.page_bounds.choose(x.half(), 8, None)
        assert (bound.backend, bound.why) == ("ref", "keys are torch.float16, not torch.float32")


def test_the_reference_runs_what_a_selected_backend_lacks(backend):
    scores, index = torch.randn(1, 2, 16), torch.arange(16, dtype=torch.int32).expand(1, 2, -1)
    before = operations_run()
    with dispatch.use("one-pass"):
        ops.lowest(scores, index, 8)
    (ran,) = (operations_run() - before).keys()
    assert ran == ("lowest", "ref", "there is no one-pass kernel for it")


def test_a_plan_chooses_again_once_a_backend_is_registered(backend):
    x, plan = torch.randn(2, 3, 32, 16), OpPlan(ops.page_bounds)
    with dispatch.use("auto"):
        assert plan.choose(x, 8, None).backend == "one-pass"
        better = ops.page_bounds.backends["one-pass"]
        dispatch._registered.clear()  # then `auto` tries the new one alone
        ops.page_bounds.register("better", better)
        assert plan.choose(x, 8, None).backend == "better"


def test_the_backend_runs_in_a_cache(model, backend):
    quest, ids = "quest:tokens=40,page=4,sinks=4,recent=8,full_layers=1", batch(PROMPT + STEPS)
    want = logits(model, kvloom.Cache(model, quest), ids)
    dispatch.ran.clear()
    with dispatch.use("auto"):
        found = logits(model, kvloom.Cache(model, quest), ids)
    assert dispatch.ran["page_bounds", "one-pass", ""] > 0
    for a, b in zip(want, found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


# --- a model adapter -----------------------------------------------------------------------------


class MyConfig(tf.CodeGenConfig):
    model_type = "my-model"


def my_model():
    torch.manual_seed(0)
    config = MyConfig(
        vocab_size=199, n_embd=64, n_layer=3, n_head=4, rotary_dim=8, n_positions=512, n_ctx=512,
        bos_token_id=1, eos_token_id=None, pad_token_id=0, initializer_range=0.3,
    )  # fmt: skip
    return tf.CodeGenForCausalLM(config).eval()


def test_an_adapter_makes_a_model_work():
    model = my_model()
    with pytest.raises(kvloom.errors.UnsupportedModel, match="does not go through"):
        kvloom.attach(my_model(), "kivi")
    ids = batch(PROMPT + STEPS) % 190 + 3
    with torch.inference_mode():
        stock = tf.DynamicCache(config=model.config)
        want = logits(model, stock, ids)
    with installed("my_adapter"):
        cache = kvloom.Cache(model, "full")
        for a, b in zip(want, logits(model, cache, ids), strict=True):
            torch.testing.assert_close(a, b, rtol=2e-5, atol=2e-5)
        packed = kvloom.Cache(model, "kivi:group=16,residual=32")
        logits(model, packed, ids[:, :PROMPT])
        assert packed.nbytes == packed.recipe.nbytes(PROMPT, packed.geometry, 2) < cache.nbytes
        mask = torch.ones_like(ids)
        mask[1, :17] = 0
        options = {"attention_mask": mask, "max_new_tokens": 5, "do_sample": False}
        plain = model.generate(ids, **options)
        kvloom.attach(model, "full")
        assert torch.equal(model.generate(ids, **options), plain)
        kvloom.detach(model)


def test_an_adapter_describes_its_model():
    model, rope = my_model(), Rope(torch.ones(4), interleaved=True)
    with installed():
        kvloom.register_adapter(
            "my-model", type(model), alibi=lambda config: True, heads=lambda config: (4, 2)
        )(print)
        found = geometry(model)
        assert (found.alibi, found.q_heads, found.kv_heads) == (True, 4, 2)
        assert found.layer_token_nbytes() == 2 * 2 * 16 * 4
        assert layer_ropes(model) == (None,) * found.layers
    with installed():
        kvloom.register_adapter(
            "my-model", type(model), rope=lambda config: rope, head_dim=lambda config: 8,
            windows=lambda config: [None, 24, None],
        )(print)  # fmt: skip
        limit = model.config.max_position_embeddings
        assert set(layer_ropes(model)) == {rope._replace(positions=limit)}
        found = geometry(model)
        assert (found.alibi, found.head_dim, found.layer_indices) == (False, 8, (0, 2))
        (sliding,) = found.sliding
        assert (sliding.layer_index, sliding.window) == (1, 24)
        assert sliding.geometry.layer_token_nbytes() == 2 * 4 * 8 * 4
    with installed():
        with pytest.raises(kvloom.RecipeError, match="'window' is not an option"):
            kvloom.register_adapter("my-model", type(model), window=4)
        kvloom.register_adapter("my-model", type(model), problem=lambda model: "it rains")(print)
        with pytest.raises(kvloom.errors.UnsupportedModel, match="it rains"):
            kvloom.attach(model, "kivi")
