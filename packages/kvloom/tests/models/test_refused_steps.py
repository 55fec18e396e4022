"""A step that kvloom does not compute is refused by name, and its cache is as before."""

import copy
from functools import partial

import pytest
import torch
import zoo
from transformers import DynamicCache
from transformers.masking_utils import create_causal_mask
from transformers.models.llama import modeling_llama

import kvloom
from backends import by_reference
from kvloom.errors import CacheMisuse
from kvloom.hf import BatchedCaches, Follower, prefill_many

pytestmark = by_reference

KIVI = "kivi:group=16,residual=16"
IDS = zoo.batch(1, 61, (0,))["input_ids"]


@pytest.fixture
def turn():
    """Gives a cache a first turn, and a second one that is refused; returns model and cache."""
    model = zoo.build("llama-gqa")
    cache = kvloom.Cache(model, KIVI)

    def call(says, **arguments):
        with torch.no_grad():
            model(input_ids=IDS, past_key_values=cache)
            held = cache.nbytes
            with pytest.raises(CacheMisuse, match=says):
                model(input_ids=IDS[:, :5], past_key_values=cache, **arguments)
        assert (cache.nbytes, cache.get_seq_length()) == (held, 61)
        assert model.config._attn_implementation == "sdpa"
        return model, cache

    return call


def test_an_unknown_argument_of_attention(turn):
    turn("layer 0: the model's attention takes 'position_bias', which", position_bias=torch.ones(4))


def test_sinks_that_are_not_the_models_own(turn):
    turn("layer 0: the model's attention takes 's_aux' that are not its own", s_aux=torch.ones(4))


def test_an_argument_of_none_is_not_given():
    model = zoo.build("llama-gqa")
    with torch.no_grad():
        expected = model(input_ids=IDS).logits
        kvloom.attach(model, "full")
        assert torch.equal(model(input_ids=IDS, s_aux=None).logits, expected)


def test_attention_weights(turn):
    turn("kvloom computes no attention weights", output_attentions=True)


def test_weights_that_the_config_asks_for_are_refused():
    model = zoo.build("llama-gqa")
    model.set_attn_implementation("eager")
    model.config.output_attentions = True
    cache = kvloom.Cache(model, "full")
    for asked in ({}, {"output_attentions": None}):
        with pytest.raises(CacheMisuse, match="computes no attention weights"):
            model(**zoo.batch(), past_key_values=cache, **asked)
    model(**zoo.batch(), past_key_values=cache, output_attentions=False)


@pytest.mark.parametrize("name", ["gemma3", "llava"])
def test_weights_that_the_config_of_the_text_model_asks_for_are_refused(name):
    model = zoo.build_with_images(name)
    model.set_attn_implementation("eager")
    model.config.text_config.output_attentions = True
    cache, batch = kvloom.Cache(model, "full"), zoo.image_prompt(model, 5, 9)
    with pytest.raises(CacheMisuse, match="computes no attention weights"):
        model(**batch, past_key_values=cache)
    assert cache.get_seq_length() == 0
    model(**batch, past_key_values=cache, output_attentions=False)


def test_dropout(monkeypatch):
    init = modeling_llama.LlamaAttention.__init__

    def with_dropout(self, *arguments, **named):
        init(self, *arguments, **named)
        self.attention_dropout = 0.1

    monkeypatch.setattr(modeling_llama.LlamaAttention, "__init__", with_dropout)
    model = zoo.build("llama-gqa").train()
    cache = kvloom.Cache(model, "full")
    with pytest.raises(CacheMisuse, match=r"asks for 0\.1; call model\.eval"):
        model(input_ids=IDS, past_key_values=cache)
    assert cache.get_seq_length() == 0


@pytest.mark.parametrize(
    ("name", "dropout"), [("gptj", "attn_pdrop"), ("bloom", "attention_dropout")]
)
def test_an_adapted_model(name, dropout):
    model = zoo.build(name, **{dropout: 0.1})
    cache = kvloom.Cache(model, "full")
    with pytest.raises(CacheMisuse, match="layer 0: kvloom computes no attention weights"):
        model(input_ids=IDS, past_key_values=cache, output_attentions=True)
    with pytest.raises(CacheMisuse, match=r"asks for 0\.1; call model\.eval"):
        model.train()(input_ids=IDS, past_key_values=cache)
    assert cache.get_seq_length() == 0


def test_a_mask_that_hides_earlier_tokens_in_a_later_turn(turn, monkeypatch):
    """As of packed sequences: the second does not see the first."""
    packed = partial(create_causal_mask, and_mask_function=lambda row, head, q, k: k > 5)

    def second_turn(**arguments):
        seen = arguments["past_key_values"].get_seq_length()
        return (packed if seen else create_causal_mask)(**arguments)

    monkeypatch.setattr(modeling_llama, "create_causal_mask", second_turn)
    model, cache = turn("tokens of this input do not see all tokens before the last one")
    monkeypatch.undo()
    with torch.no_grad():
        model(input_ids=IDS[:, :5], past_key_values=cache)
    assert cache.get_seq_length() == 66


@torch.no_grad()
@pytest.mark.parametrize("recipe", ["full", KIVI, "h2o:tokens=40"])
@pytest.mark.parametrize("hole", [slice(0, 9), slice(20, 25)], ids=["front", "middle"])
def test_tokens_that_were_padding_stay_hidden(recipe, hole, tmp_path):
    model, plain = zoo.build("llama-gqa"), DynamicCache()
    cache, mask = kvloom.Cache(model, recipe), torch.ones(2, 66, dtype=torch.long)
    mask[1, hole] = 0
    ids, place = IDS.expand(2, -1), torch.arange(61, 66)[None]

    def turn(cache, mask):
        new = IDS[:, :5].expand(2 if mask is None else len(mask), -1)
        return model(new, attention_mask=mask, position_ids=place, past_key_values=cache).logits

    def refused(cache, mask):
        with pytest.raises(CacheMisuse, match="were padding when the cache stored them"):
            turn(cache, mask)
        return cache

    for each in (cache, plain):
        model(ids, attention_mask=mask[:, :61], past_key_values=each)
    cache.save(tmp_path / "cache.kv")
    loaded = kvloom.Cache.load(model, tmp_path / "cache.kv")
    shown = torch.ones_like(mask)
    for each in (refused(cache, shown), loaded, copy.deepcopy(cache)):
        refused(refused(each, shown), None if recipe == "h2o:tokens=40" else shown)
        more = mask.clone()
        more[0, 30] = 0  # visible tokens may be hidden, and seen again
        turn(copy.deepcopy(each), more)
    got, want = turn(copy.deepcopy(cache), mask), turn(copy.deepcopy(plain), mask)
    assert recipe != "full" or torch.allclose(got, want, atol=1e-5)
    loaded.batch_repeat_interleave(2)
    refused(loaded, shown.repeat_interleave(2, dim=0))
    loaded.reorder_cache(torch.tensor([3, 2, 1, 0]))
    refused(loaded, mask.repeat_interleave(2, dim=0))
    loaded.batch_select_indices(torch.tensor([2, 3]))
    turn(loaded, shown)
    cache.reset()
    turn(cache, shown[:, :5])


@torch.no_grad()
def test_padding_in_caches_that_share_a_pass():
    model = zoo.build("llama-gqa")
    leader, follower = kvloom.Cache(model, "full"), Follower(kvloom.Cache(model, KIVI))
    mask = torch.ones_like(IDS)
    mask[:, :7] = 0
    prefill_many(model, leader, [follower], input_ids=IDS, attention_mask=mask)
    for cache in (leader, follower.cache):
        with pytest.raises(CacheMisuse, match="were padding"):
            model(IDS[:, :1], past_key_values=cache)
    both = BatchedCaches(model, [leader, follower.cache])
    ids, ones = IDS[:, :2].expand(2, -1), torch.ones(2, 63, dtype=torch.long)
    with pytest.raises(CacheMisuse, match="were padding"):
        model(ids, attention_mask=ones, past_key_values=both)


def test_a_mask_that_the_model_changes(turn, monkeypatch):
    monkeypatch.setattr(
        modeling_llama, "create_causal_mask",
        lambda **arguments: create_causal_mask(**arguments).clone()
        if arguments["past_key_values"].get_seq_length()
        else create_causal_mask(**arguments),
    )  # fmt: skip
    turn("the model made a mask of its own")


def test_a_module_that_is_not_causal(turn, monkeypatch):
    monkeypatch.setattr(
        modeling_llama, "create_causal_mask",
        lambda **arguments: None
        if arguments["past_key_values"].get_seq_length()
        else create_causal_mask(**arguments),
    )  # fmt: skip
    turn("or see later ones without a mask", is_causal=False)
