"""What cannot work is refused in one sentence, and nothing has changed."""

import copy
import gc
import pickle
import weakref
from dataclasses import replace

import numpy as np
import pytest
import torch
import transformers as tf
import zoo
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention

import kvloom
import probe
from backends import by_reference
from kvloom.errors import CacheMisuse, IncompatibleRecipe, NotFinite, RecipeError, UnsupportedModel
from kvloom.hf.attach import report
from kvloom.keep import Budget, Keep, Mass
from kvloom.recipe.parts import LayerOverride
from kvloom.recipe.resolve import resolve
from kvloom.recipe.spec import Recipe
from kvloom.store.formats import Store

pytestmark = by_reference  # none of this depends on kernels

KIVI = "kivi:group=16,residual=32"


def untouched(model) -> bool:
    return (
        getattr(model, "_kvloom", None) is None
        and model.config._attn_implementation != "kvloom"
        and "forward" not in vars(model)
        and "forward" not in vars(model.get_decoder() or model)
        and "_prepare_cache_for_generation" not in vars(model)
    )


@pytest.fixture
def model():
    return zoo.build("llama-gqa")


def attached(model) -> str | None:
    """The recipe of the cache that a call gets; None: transformers' own cache."""
    with torch.no_grad():
        cache = model(zoo.batch(rows=1)["input_ids"]).past_key_values
    return cache.recipe.name if isinstance(cache, kvloom.Cache) else None


def test_attach_replaces_what_is_attached_if_it_fits(model):
    kvloom.attach(model, KIVI)
    kvloom.attach(model, "full")
    with pytest.raises(RecipeError):
        kvloom.attach(model, "kivvi")
    with pytest.raises(IncompatibleRecipe):
        kvloom.attach(model, "kivi:group=128")
    assert attached(model) == "full"
    kvloom.detach(model)
    assert untouched(model)


def test_attach_for_a_block_restores_what_was_attached_before(model):
    def fail():
        with kvloom.attach(model, KIVI):
            assert attached(model) == KIVI
            raise ZeroDivisionError

    with kvloom.attach(model, "full") as report:
        assert "full on LlamaForCausalLM" in str(report)
        with pytest.raises(ZeroDivisionError):
            fail()
        assert attached(model) == "full"
        with kvloom.attach(model, KIVI):
            kvloom.detach(model)
        assert attached(model) == "full"
        kvloom.attach(model, KIVI)
    assert untouched(model)
    cache = kvloom.Cache(model, "full")
    with kvloom.attach(model, KIVI):
        assert attached(model) == KIVI
    assert attached(model) is None
    with torch.no_grad():
        model(zoo.batch(rows=1)["input_ids"], past_key_values=cache)  # still routed
    assert cache.get_seq_length() == 61


def test_a_report_keeps_no_model_alive_and_can_be_copied():
    model = zoo.build("llama-gqa")
    report = kvloom.attach(model, "full")
    for duplicate in (copy.deepcopy(report), pickle.loads(pickle.dumps(report))):
        assert duplicate == report
    owner = weakref.ref(model)
    del model
    gc.collect()
    assert owner() is None
    with report:
        pass


def test_detach_without_attach(model):
    with pytest.raises(CacheMisuse, match="nothing is attached"):
        kvloom.detach(model)


@pytest.mark.parametrize(
    ("recipe", "error", "says"),
    [
        ("kivvi", RecipeError, r"did you mean 'kivi'\?.*there are full, .*kivi"),
        ("kivi:grop=32", RecipeError, r"did you mean 'group'\?.*bits, group, residual"),
        ("kivi:group=48", RecipeError, r"group=48 is not one of 16, 32, 64, 128"),
        ("kivi:group=32,residual=100", RecipeError, r"residual=100 is not a multiple of group=32"),
        ("kivi:bits=two", RecipeError, r"must be a number, not 'two'"),
        ("kivi:group=32", IncompatibleRecipe, r"group=32 does not divide head_dim=16; use 16"),
    ],
)  # fmt: skip
def test_bad_recipes_change_nothing(model, recipe, error, says):
    for use in (kvloom.attach, kvloom.Cache):
        with pytest.raises(error, match=says):
            use(model, recipe)
        assert untouched(model)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (tf.T5Config(d_model=32, d_ff=32, num_layers=1, num_heads=2, d_kv=16, vocab_size=99),
         "T5ForConditionalGeneration .* encoder-decoder"),
        (tf.OpenAIGPTConfig(n_embd=32, n_layer=1, n_head=4, vocab_size=99),
         "OpenAIGPTLMHeadModel .* no KV cache"),
        (tf.GPT2Config(n_embd=32, n_layer=1, n_head=4, vocab_size=99, add_cross_attention=True),
         r"GPT2LMHeadModel .* attends to an encoder \(add_cross_attention\)"),
        (tf.XLNetConfig(d_model=32, d_inner=32, n_layer=1, n_head=4, vocab_size=99),
         "XLNetLMHeadModel .* caches hidden states"),
        (tf.CpmAntConfig(hidden_size=32, dim_ff=32, num_hidden_layers=1, num_attention_heads=2,
                         dim_head=16, vocab_size=99),
         "CpmAntForCausalLM .* learned bias"),
        (tf.DogeConfig(hidden_size=32, intermediate_size=32, num_hidden_layers=1,
                       num_attention_heads=2, vocab_size=99),
         "DogeForCausalLM .* bias from a token's value"),
        (tf.BigBirdConfig(hidden_size=32, intermediate_size=32, num_hidden_layers=1,
                          num_attention_heads=2, vocab_size=99, is_decoder=True),
         "BigBirdForCausalLM .*(original_full|install transformers 5.23)"),
        (tf.MvpConfig(d_model=32, decoder_layers=1, encoder_layers=1, decoder_attention_heads=2,
                      vocab_size=99, use_prompt=True, is_encoder_decoder=False),
         "MvpForCausalLM .* use_prompt=False"),
    ],
)  # fmt: skip
def test_unsupported_models_are_refused_by_name(config, says):
    build = tf.AutoModelForSeq2SeqLM if config.is_encoder_decoder else tf.AutoModelForCausalLM
    model = build.from_config(config)
    for use in (kvloom.attach, kvloom.Cache):
        with pytest.raises(UnsupportedModel, match=says):
            use(model, "full")
        assert untouched(model)


@pytest.mark.skipif(not hasattr(DeepseekV3Attention, "expand_kv"), reason="caches no latents")
def test_layers_with_an_index_stay_with_transformers():
    config = tf.DeepseekV32Config(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2,
        intermediate_size=32, vocab_size=99, moe_intermediate_size=16, n_routed_experts=8,
    )  # fmt: skip
    model = tf.AutoModelForCausalLM.from_config(config)
    with pytest.raises(IncompatibleRecipe, match="would compress nothing"):
        kvloom.attach(model, "kivi")
    assert untouched(model)
    assert "an index of its own" in str(kvloom.attach(model, "full"))


def test_a_headless_model_is_refused():
    model = tf.AutoModel.from_config(zoo.CONFIGS["llama-gqa"]())
    with pytest.raises(UnsupportedModel, match="cannot generate"):
        kvloom.attach(model, "full")


def test_another_attention_implementation_while_attached(model):
    """A step with a kvloom cache does not depend on it, and calls without one use it."""
    prompt = zoo.batch()
    kvloom.attach(model, KIVI)
    expected = model.generate(**prompt, max_new_tokens=3)
    model.set_attn_implementation("eager")
    assert torch.equal(model.generate(**prompt, max_new_tokens=3), expected)
    seen = []
    model.model.layers[0].self_attn.register_forward_hook(lambda *call: seen.append(call[2][1]))
    model(**prompt, use_cache=False)
    assert seen[0].shape == (3, 4, 61, 61)  # eager's weights
    kvloom.detach(model)
    assert model.config._attn_implementation == "eager"


def test_a_step_whose_attention_did_not_reach_kvloom(model, monkeypatch):
    batch = zoo.batch(rows=1, padding=(5,))
    cache = kvloom.Cache(model, KIVI)
    attention = model.model.layers[1].self_attn
    plain = attention.config
    attention.config = tf.LlamaConfig(**{**plain.to_dict(), "attn_implementation": "sdpa"})
    with pytest.raises(CacheMisuse, match="attention of layers 1 did not reach kvloom"):
        model(**batch, past_key_values=cache)
    assert (cache.get_seq_length(), cache.hidden) == (0, None)


def test_a_cache_of_another_model(model):
    other = zoo.build("qwen3")
    ids = zoo.batch(rows=1, padding=(0,))["input_ids"]
    cache = kvloom.Cache(model, KIVI)
    kvloom.Cache(other, KIVI)
    model(input_ids=ids, past_key_values=cache)
    held = cache.nbytes
    with pytest.raises(CacheMisuse, match=r"made for another model, whose .* differ; make a new"):
        other(input_ids=ids[:, :1], past_key_values=cache)
    assert cache.nbytes == held
    assert cache.get_seq_length() == 61


@pytest.mark.parametrize(
    "change",
    [{"rms_norm_eps": 1e-3}, {"rope_parameters": {"rope_type": "default", "rope_theta": 9.0}}],
)
def test_a_cache_of_a_model_of_the_same_shape(model, change):
    other, same = zoo.build("llama-gqa", **change), zoo.build("llama-gqa")
    ids = zoo.batch(rows=1, padding=(0,))["input_ids"]
    cache = kvloom.Cache(same, KIVI)
    same(input_ids=ids, past_key_values=cache)
    kvloom.attach(other, KIVI)
    with pytest.raises(CacheMisuse, match=f"whose {next(iter(change))} differs; make a new cache"):
        other(input_ids=ids[:, :1], past_key_values=cache)
    copy.deepcopy(same)(input_ids=ids[:, :1], past_key_values=cache)


def test_another_batch_size_or_dtype(model):
    ids = zoo.batch()["input_ids"]
    cache = kvloom.Cache(model, KIVI)
    model(input_ids=ids, past_key_values=cache)
    with pytest.raises(CacheMisuse, match="holds batch size 3 and was given 2"):
        model(input_ids=ids[:2, :1], past_key_values=cache)
    with pytest.raises(CacheMisuse, match=r"holds dtype torch.float32 and was given torch.bf"):
        model.bfloat16()(input_ids=ids[:, :1], past_key_values=cache)
    assert cache.get_seq_length() == 61
    model.float()(input_ids=ids[:, :1], past_key_values=cache)
    assert cache.get_seq_length() == 62


def test_another_batch_touches_no_layer_of_transformers_either():
    model = zoo.build("gemma2")
    ids = zoo.batch()["input_ids"]
    cache = kvloom.Cache(model, "full")
    model(input_ids=ids, past_key_values=cache)
    with pytest.raises(CacheMisuse, match="holds batch size 3 and was given 2; make a new cache"):
        model(input_ids=ids[:2, :1], past_key_values=cache)
    assert {layer.get_seq_length() for layer in cache.layers} == {61}


@pytest.mark.parametrize("recipe", ["full", "kivi:group=16,residual=32"])
def test_crop_takes_any_whole_number_and_nothing_else(model, recipe):
    ids = zoo.batch(rows=1, padding=(0,))["input_ids"]
    cache = kvloom.Cache(model, recipe)
    model(ids, past_key_values=cache)
    for wrong in (-3.0, True, torch.tensor(-3.0), "-3", None):
        with pytest.raises(CacheMisuse, match="crop takes a whole number"):
            cache.crop(wrong)
    with pytest.raises(CacheMisuse, match="takes a tensor, got a list"):
        cache.batch_select_indices([0])
    for begin, number in ((61, torch.tensor(-3)), (61, np.int64(-3))):
        cache.crop(number)
        assert cache.get_seq_length() == begin - 3
        model(ids[:, begin - 3 :], past_key_values=cache)
        assert cache.get_seq_length() == 61


def test_crop_into_packed_tokens_touches_no_layer(model):
    ids = zoo.batch(rows=1, tokens=100, padding=(0,))["input_ids"]
    cache = kvloom.Cache(model, KIVI)
    model(input_ids=ids, past_key_values=cache)
    with pytest.raises(CacheMisuse, match=r"layer 0: crop of 30 tokens reaches into packed"):
        cache.crop(-30)
    assert [layer.seen for layer in probe.layers(cache)] == [100] * 3
    cache.crop(-4)
    assert cache.get_seq_length() == 96


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("side", ["k", "v"])
def test_nan_in_keys_or_values_names_the_layer(model, bad, side):
    ids = zoo.batch(rows=1, padding=(0,))["input_ids"]
    cache = kvloom.Cache(model, KIVI)
    projection = getattr(model.model.layers[1].self_attn, f"{side}_proj")
    with torch.no_grad():
        projection.weight[0, 0] = bad
    what = {"k": "keys", "v": "values"}[side]
    with pytest.raises(NotFinite, match=rf"layer 1: NaN or infinity in {what}"):
        model(input_ids=ids, past_key_values=cache)
    assert probe.layers(cache)[1].nbytes == 0


@pytest.mark.sample
@pytest.mark.parametrize("recipe", [KIVI, "full", "h2o"])
@pytest.mark.parametrize("name", ["llama-gqa", "gemma2", "falcon-gqa"])
def test_a_cache_on_a_model_that_is_not_routed(name, recipe):
    model, ids = zoo.build(name), zoo.batch(rows=1, padding=(0,))["input_ids"]
    plain = copy.deepcopy(model)
    cache = kvloom.Cache(model, recipe)
    model(input_ids=ids, past_key_values=cache)
    kvloom.detach(model)
    held = cache.nbytes
    more = torch.cat([ids, ids[:, :1]], dim=1)
    for other in (model, plain):
        for use in (
            lambda other=other: other(input_ids=ids[:, :1], past_key_values=cache),
            lambda other=other: (
                other.model(input_ids=ids[:, :1], past_key_values=cache)
                if name != "falcon-gqa"
                else other.transformer(input_ids=ids[:, :1], past_key_values=cache)
            ),
            lambda other=other: other.generate(more, max_new_tokens=1, past_key_values=cache),
        ):
            with pytest.raises(CacheMisuse, match=r"not routed .* kvloom\.attach\(model, recipe\)"):
                use()
            assert (cache.nbytes, cache.get_seq_length()) == (held, 61)
    kvloom.attach(model, recipe)
    model(input_ids=ids[:, :1], past_key_values=cache)
    assert cache.get_seq_length() == 62


@pytest.mark.parametrize("name", ["llama-gqa", "mpt"])  # MPT takes no positions
def test_new_ids_alone_are_refused_with_both_lengths(name):
    model = zoo.build(name)
    ids = zoo.batch(rows=1, padding=(0,))["input_ids"]
    cache = kvloom.Cache(model, KIVI)
    model(input_ids=ids, past_key_values=cache)
    with pytest.raises(CacheMisuse, match=r"holds 61 tokens .* given 5 in all; .*the whole seq"):
        model.generate(ids[:, :5], max_new_tokens=3, past_key_values=cache)
    with pytest.raises(CacheMisuse, match=r"holds 61 tokens .* given 61 in all"):
        model.generate(ids, max_new_tokens=3, past_key_values=cache)
    whole = torch.cat([ids, ids[:, :5]], dim=1)
    assert model.generate(whole, max_new_tokens=3, past_key_values=cache).shape[1] == 69


def test_an_empty_prompt(model):
    kvloom.attach(model, KIVI)
    empty = torch.zeros(1, 0, dtype=torch.long)
    with pytest.raises(CacheMisuse, match="at least one token"):
        model(input_ids=empty)


def test_new_embeddings_alone_are_refused(model):
    ids = zoo.batch(rows=1, padding=(0,))["input_ids"]
    cache = kvloom.Cache(model, KIVI)
    model(input_ids=ids, past_key_values=cache)
    new = model.get_input_embeddings()(ids[:, :5])
    with pytest.raises(CacheMisuse, match=r"holds 61 tokens .* given 5 in all"):
        model.generate(inputs_embeds=new, max_new_tokens=3, past_key_values=cache)


def test_modules_that_see_later_tokens(model):
    ids = zoo.batch(rows=1, padding=(0,))["input_ids"]
    for layer in model.model.layers:
        layer.self_attn.is_causal = False
    cache = kvloom.Cache(model, "full")
    with pytest.raises(CacheMisuse, match="or see later ones without a mask"):
        model(input_ids=ids, past_key_values=cache)
    model.set_attn_implementation("eager")  # makes a mask in any case
    with torch.no_grad():
        want = model(ids, use_cache=False).logits
        torch.testing.assert_close(model(ids, past_key_values=cache).logits, want)


def test_gradient_checkpointing_stores_no_tokens(model):
    ids, cache = zoo.batch(rows=1, padding=(0,))["input_ids"], kvloom.Cache(model, KIVI)
    model.train()
    model.gradient_checkpointing_enable()
    with pytest.raises(CacheMisuse, match="gradient_checkpointing_disable"):
        model(input_ids=ids, past_key_values=cache)


def test_autocast_is_named(model):
    ids, cache = zoo.batch(rows=1, padding=(0,))["input_ids"], kvloom.Cache(model, KIVI)
    refused = pytest.raises(CacheMisuse, match=r"values in torch.bfloat16, as under torch.autocast")
    with refused, torch.autocast("cpu", torch.bfloat16):
        model(input_ids=ids, past_key_values=cache)


@pytest.mark.parametrize("recipe", ["full", KIVI])
def test_backward_to_stored_tokens_is_refused(model, recipe):
    ids = zoo.batch(rows=1, padding=(0,))["input_ids"]
    cache = kvloom.Cache(model, recipe)
    model(ids[:, :40], past_key_values=cache).logits.sum().backward()  # of one call
    with pytest.raises(CacheMisuse, match="stores tokens without gradients"):
        model(ids[:, 40:], past_key_values=cache).logits.sum().backward()
    cache.reset()
    with torch.no_grad():
        model(ids[:, :40], past_key_values=cache)
    model(ids[:, 40:], past_key_values=cache).logits.sum().backward()


def test_gradients_reach_the_tokens_of_a_call_after_one_that_was_undone(model):
    ids, cache = zoo.batch(rows=1, padding=(0,))["input_ids"], kvloom.Cache(model, "full")

    def interrupt(*_):
        hook.remove()
        raise KeyboardInterrupt

    hook = model.model.layers[-1].register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        model(ids, past_key_values=cache)
    model(ids, past_key_values=cache).logits.sum().backward()
    cache.crop(-ids.shape[1])
    model(ids, past_key_values=cache).logits.sum().backward()


def test_a_4d_mask(model):
    ids = zoo.batch(rows=1, padding=(0,))["input_ids"]
    kvloom.attach(model, KIVI)
    mask = torch.ones(1, 1, 61, 61, dtype=torch.bool).tril()
    with pytest.raises(CacheMisuse, match="2-D padding mask"):
        model(input_ids=ids, attention_mask=mask)


@pytest.mark.parametrize("recipe", ["full", KIVI])
@pytest.mark.parametrize("rows", [1, 3])
def test_a_mask_with_other_rows_than_the_batch(model, recipe, rows):
    inputs = zoo.batch(rows=2, padding=(9, 0))
    mask = inputs["attention_mask"][:1].expand(rows, -1)
    cache = kvloom.Cache(model, recipe)
    with pytest.raises(CacheMisuse, match=f"has {rows} rows for a batch of 2"):
        model(input_ids=inputs["input_ids"], attention_mask=mask, past_key_values=cache)
    assert cache.nbytes == 0
    model(**inputs, past_key_values=cache)


def test_the_states_of_an_encoder_are_refused():
    config = tf.BartConfig(d_model=32, vocab_size=199, encoder_layers=1, decoder_layers=1)
    model = tf.BartForCausalLM(config).eval()
    inputs = {"input_ids": torch.tensor([[7]]), "encoder_hidden_states": torch.randn(1, 5, 32)}
    expected = model(**inputs).logits
    cache = kvloom.Cache(model, "full")
    with pytest.raises(CacheMisuse, match="holds no keys of an encoder"):
        model(**inputs, past_key_values=cache)
    assert cache.get_seq_length() == 0
    assert torch.equal(model(**inputs, use_cache=False).logits, expected)


def test_report_says_what_is_compressed_and_what_is_not():
    report = kvloom.attach(zoo.build("gemma3"), KIVI)
    assert report.compressed == (2,)
    assert "1 of 3 layers compressed (2)" in str(report)
    assert "not compressed: layers 0-1: its sliding window" in str(report)
    in_windows = 2 * 23 * report.geometry.token_nbytes()
    assert report.full_nbytes == 32768 * report.geometry.token_nbytes() + in_windows
    assert report.nbytes == report.recipe.nbytes(32768, report.geometry) + in_windows
    full = kvloom.attach(zoo.build("llama-gqa"), "kivi-4:group=16")
    assert full.full_nbytes == 32768 * 2 * 3 * 2 * 16 * 4
    assert "instead of 24.0" in str(full)
    assert "3 of 3 layers" in repr(full)
    assert "(no smaller)" in str(kvloom.attach(zoo.build("llama-gqa"), "quest"))


def test_report_counts_a_layer_that_the_recipe_leaves_exact_as_not_compressed(model):
    recipe = replace(resolve("kivi-4:group=16"), layers=(LayerOverride("0", store=Store()),))
    assert report(model, recipe).compressed == (1, 2)
    assert report(model, recipe).skipped == {0: "the recipe leaves it exact"}
    assert report(model, resolve("full")).compressed == ()


@pytest.mark.parametrize(
    ("recipe", "advised"),
    [("kivi-4:group=16,residual=16", True), ("kivi-4:group=16", False),
     ("kivi-4:group=16,residual=16,compress_after=100", False)],
)  # fmt: skip
def test_report_advises_packed_windows_only_where_they_fit(recipe, advised):
    model = zoo.build("gpt-oss", sliding_window=128)
    (reason,) = report(model, resolve(recipe)).skipped.values()
    assert ("sliding=packed" in reason) == advised
    if advised:
        assert report(model, resolve(f"{recipe},sliding=packed")).skipped == {}


@pytest.mark.parametrize(("name", "said"), [("gpt2", True), ("gemma3", False)])
def test_the_report_says_that_there_is_no_window_to_pack(name, said):
    notes = report(zoo.build(name), resolve("kivi:group=16,residual=16,sliding=packed")).notes
    assert any("so sliding=packed changes nothing" in note for note in notes) == said


@pytest.mark.parametrize(
    ("recipe", "prompts", "small"),
    [("full", False, False), ("kivi:group=16", True, True), ("kivi-4:group=16", True, False),
     ("h2o", True, False), ("skvq-k2v1.5:group=16,calibration=x", True, True)],
)  # fmt: skip
def test_report_says_what_to_beware_of(model, recipe, prompts, small):
    notes = report(model, resolve(recipe)).notes
    assert any("log-likelihoods from one forward pass" in note for note in notes) == prompts
    assert any("warning: " in note and "head_dim 16" in note for note in notes) == small


@pytest.mark.parametrize(
    ("options", "warned"), [("", False), (",window=0", True), (",window=0,clip=0.96", False)]
)
def test_report_warns_of_calibrated_clipping_without_a_window(model, options, warned):
    notes = report(model, resolve(f"skvq:group=16,calibration=x{options}")).notes
    assert any("add clip=0.96" in note for note in notes) == warned


@pytest.mark.skipif("deepseek-v3" not in zoo.CONFIGS, reason="this transformers is older")
@pytest.mark.parametrize(("recipe", "small"), [("balanced:group=16", False), (KIVI, True)])
def test_report_warns_of_the_bits_that_latents_have(recipe, small):
    notes = report(zoo.build("deepseek-v3"), resolve(recipe)).notes
    assert any("2-bit" in note for note in notes) == small


@pytest.mark.parametrize(
    ("recipe", "few"),
    [("tiny", False), ("tiny:fraction=0.14", True), ("h2o:fraction=0.1", True), ("h2o", False),
     ("snapkv", False), ("kivi", False)],
)  # fmt: skip
def test_report_warns_of_a_small_fraction(model, recipe, few):
    notes = report(model, resolve(recipe)).notes
    assert any("cost much quality; use fraction=0.15" in note for note in notes) == few


def test_a_model_of_sliding_layers_alone_has_nothing_to_compress(subtests):
    model = zoo.build("mistral-sliding")
    expected = model.generate(**zoo.batch(), max_new_tokens=8, do_sample=False)
    assert "0 of 3 layers compressed (none)" in str(kvloom.attach(model, "full"))
    assert torch.equal(model.generate(**zoo.batch(), max_new_tokens=8, do_sample=False), expected)
    kvloom.detach(model)
    for recipe in (KIVI, "h2o", "pyramidkv", "clusterkv"):
        for use in (kvloom.attach, kvloom.Cache):
            with subtests.test(recipe), pytest.raises(IncompatibleRecipe, match="nothing"):
                use(model, recipe)
            assert untouched(model)


@pytest.mark.parametrize(
    ("name", "recipe", "says"),
    [
        ("llama-gqa", "pyramidkv:tokens=40", "leaves layer 2 of 3 without a heavy hitter; use a"),
        ("llama-gqa", "h2o:tokens=4,layers=pyramid", "leaves layer 2 of 3 without a heavy hitter"),
        ("gemma3", {"layers": (3.0, 2.0, 1.0)}, "3 layer budgets for a model with 1 layers of"),
        ("llama-gqa", {"layers": (1.0, 0.0, 1.0), "recent": 0}, "leaves layer 1 of 3 without"),
    ],
)
def test_budgets_that_do_not_fit_the_layers(name, recipe, says):
    if isinstance(recipe, dict):
        recipe = Recipe(keep=Keep(Budget(tokens=20, **{"recent": 4, **recipe}), Mass()))
    model = zoo.build(name)
    for use in (kvloom.attach, kvloom.Cache):
        with pytest.raises(IncompatibleRecipe, match=says):
            use(model, recipe)
    assert untouched(model)


def test_a_prompt_too_short_for_a_pyramid_changes_nothing(model):
    cache = kvloom.Cache(model, "snapkv:tokens=0,fraction=0.1,window=8,layers=pyramid")
    ids = zoo.batch(rows=1, padding=(0,))["input_ids"]
    with pytest.raises(RecipeError, match=r"a budget of 6 tokens, 3 of them recent.*layer 2 of 3"):
        model(input_ids=ids, past_key_values=cache)
    assert cache.nbytes == 0


def test_a_prompt_within_the_budget_stays_whole_under_a_pyramid(model):
    ids = zoo.batch(rows=1, padding=(0,))["input_ids"]
    want = model.generate(ids, max_new_tokens=8, do_sample=False)
    for tokens in (61, 90):
        cache = kvloom.Cache(model, f"pyramidkv:tokens={tokens}")
        got = model.generate(ids, max_new_tokens=8, do_sample=False, past_key_values=cache)
        assert torch.equal(got, want)


def test_a_model_without_attention_is_refused_by_name():
    config = tf.MambaConfig(hidden_size=16, num_hidden_layers=1, vocab_size=9, state_size=4)
    with pytest.raises(UnsupportedModel, match=r"MambaForCausalLM cannot be used.*no attention"):
        kvloom.attach(tf.AutoModelForCausalLM.from_config(config), "h2o")
