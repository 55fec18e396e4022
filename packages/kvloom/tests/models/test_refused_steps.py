"""A step that kvloom does not compute is refused by name, and its cache is as before."""

from functools import partial

import pytest
import torch
import zoo
from transformers.masking_utils import create_causal_mask
from transformers.models.llama import modeling_llama

import kvloom
from backends import by_reference
from kvloom.errors import CacheMisuse

pytestmark = by_reference

IDS = zoo.batch(1, 61, (0,))["input_ids"]


@pytest.fixture
def turn():
    """Gives a cache a first turn, and a second one that is refused; returns model and cache."""
    model = zoo.build("llama-gqa")
    cache = kvloom.Cache(model, "kivi:group=16,residual=16")

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
