"""Models with adapters: what is dropped is as if hidden, and the model's own code stays."""

import copy
import functools
import types

import pytest
import torch
import transformers as tf
import zoo
from transformers import DynamicCache
from transformers.models.gptj import modeling_gptj

import kvloom
import probe
from backends import by_reference
from kvloom.errors import CacheMisuse, UnsupportedModel
from kvloom.hf import adapters, compat
from kvloom.hf.models import ADAPTERS, adapter_of

GREEDY = {"max_new_tokens": 24, "do_sample": False}
PROMPT, TOKENS = 60, 90
every = pytest.mark.parametrize("name", zoo.ADAPTED)
# GPT-Neo has windows besides; XGLM takes no mask by head.
HIDEABLE = [name for name in zoo.ADAPTED if name not in ("gpt-neo", "xglm")]


def attentions(model):
    """The attention modules, in order."""
    kind = adapter_of(model.config).attention
    return [module for module in model.modules() if isinstance(module, kind)]


def stored_heads(name, heads, kv_heads):
    """The head of the cache that each query head attends to: int64 [heads]."""
    head = torch.arange(heads)
    if name in ("jetmoe", "diffllama"):  # query heads of one head of the cache are not in a row
        own = head if name == "jetmoe" else head // (heads // kv_heads // 2)
        return own % kv_heads
    return head // (heads // kv_heads)


def decode(model, cache, ids, before=lambda i: None):
    """Logits of the tokens after the prompt, fed one by one."""
    out = []
    with torch.no_grad():
        model(input_ids=ids[:, :PROMPT], past_key_values=cache, use_cache=True)
        for i in range(PROMPT, TOKENS):
            before(i)
            step = model(input_ids=ids[:, i : i + 1], past_key_values=cache, use_cache=True)
            out.append(step.logits)
    return torch.cat(out, dim=1).log_softmax(-1)


def held(layer, tokens):
    """Which of `tokens` tokens a layer holds: bool [B, Hk, tokens]."""
    index = probe.kept(layer)
    return torch.zeros(*index.shape[:2], tokens, dtype=torch.bool).scatter_(2, index, True)


@pytest.mark.sample
@pytest.mark.parametrize("name", HIDEABLE)
@pytest.mark.parametrize(
    "recipe", ["h2o:tokens=24", "keyformer:tokens=24", "snapkv:tokens=24,window=8"]
)
def test_dropping_by_score_equals_hiding_in_a_full_cache(name, recipe):
    """The oracle: the model's own attention over a stock cache, each layer's mask by head."""
    model = zoo.build(name)
    ids = zoo.batch(rows=2, tokens=TOKENS, padding=(0, 0))["input_ids"]
    cache, kept = kvloom.Cache(model, recipe), {}
    probe.observe(cache)  # `held` needs to know which tokens stay
    dropped = decode(
        model, cache, ids, lambda i: kept.update({i: [held(c, i) for c in probe.layers(cache)]})
    )
    kvloom.detach(model)
    assert all(0 < layer.float().mean() < 0.5 for layer in kept[PROMPT + 5])

    def hide(module, args, kwargs):
        mask = kwargs["attention_mask"]
        n = stock.layers[module.layer_idx].keys.shape[2]
        if n < PROMPT:  # the prompt sees all of itself
            return None
        here = torch.cat([kept[n][module.layer_idx], torch.ones(2, hk, 1, dtype=torch.bool)], -1)
        hidden = ~here[:, stored][:, :, None]
        if mask is None:  # nothing is hidden so far
            mask = torch.zeros(1, 1, 1, n + 1)
        if mask.dtype == torch.bool:  # MPT hides what is True, the others what is False
            mask = (mask | hidden) if name == "mpt" else (mask & ~hidden)
        else:
            mask = mask.masked_fill(hidden, torch.finfo(mask.dtype).min)
        return args, {**kwargs, "attention_mask": mask}

    hk = compat.geometry(model).kv_heads
    stored = stored_heads(name, compat.geometry(model).q_heads, hk)
    stock = DynamicCache(config=model.config)
    for module in attentions(model):
        module.register_forward_pre_hook(hide, with_kwargs=True)
    for layer in stock.layers:
        layer.keys = torch.empty(0, 0, 0, 0)
    oracle = decode(model, stock, ids)
    torch.testing.assert_close(dropped, oracle, rtol=1e-4, atol=2e-5)


@every
def test_geometry_is_what_the_cache_holds(name):
    model = zoo.build(name)
    cache = kvloom.Cache(model, "full")
    model(**zoo.batch(), past_key_values=cache)
    geometry = compat.geometry(model)
    for layer in probe.layers(cache):
        b, h, _, d = probe.shape(layer)
        assert (b, h, d) == (3, geometry.kv_heads, geometry.head_dim)
    assert len(probe.layers(cache)) == geometry.layers


def test_falcon_holds_each_key_once():
    for name, heads in (("falcon-mqa", 1), ("falcon-gqa", 2), ("falcon-alibi", 9)):
        assert compat.geometry(zoo.build(name)).kv_heads == heads


@pytest.mark.parametrize("name", ["mpt", "falcon-alibi", "bloom"])
def test_a_long_padded_batch_has_the_models_own_biases(name):
    """Beyond 256 tokens Falcon's biases, rounded to bfloat16, are no straight line."""
    model = zoo.build(name)
    prompt = zoo.batch(rows=2, tokens=700, padding=(0, 90))
    real = prompt["attention_mask"].bool()
    with torch.no_grad():
        expected = model(**prompt, use_cache=False).logits
        cache = kvloom.Cache(model, "full")
        first = {key: x[:, :650] for key, x in prompt.items()}
        logits = [model(**first, past_key_values=cache).logits]
        for n in range(651, 701):
            step = {"input_ids": prompt["input_ids"][:, n - 1 : n]}
            mask = prompt["attention_mask"][:, :n]
            logits.append(model(**step, attention_mask=mask, past_key_values=cache).logits)
    torch.testing.assert_close(torch.cat(logits, 1)[real], expected[real], rtol=1e-4, atol=2e-5)


@every
def test_a_second_padded_prompt(name):
    """Padding between the turns takes up distance in MPT and none in Falcon and BLOOM."""
    model = zoo.build(name)
    prompt = zoo.batch(rows=3, tokens=100, padding=(0, 17, 40))
    prompt["attention_mask"][1, 60:75] = 0
    real = prompt["attention_mask"].bool()

    def two_turns(cache):
        with torch.no_grad():
            turns = [
                model(
                    input_ids=prompt["input_ids"][:, lo:hi],
                    attention_mask=prompt["attention_mask"][:, :hi],
                    past_key_values=cache,
                    use_cache=True,
                ).logits
                for lo, hi in ((0, 60), (60, 99), (99, 100))
            ]
        return torch.cat(turns, dim=1)[real]

    expected = two_turns(DynamicCache(config=model.config))
    got = two_turns(kvloom.Cache(model, "full"))
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=2e-5)
    stock = two_turns(DynamicCache(config=model.config))  # on the routed model
    assert torch.equal(stock, expected)


@every
def test_without_a_kvloom_cache_the_models_own_code_runs(name):
    model = zoo.build(name)
    prompt = zoo.batch()
    with torch.no_grad():
        expected = model(**prompt, use_cache=False).logits
        kvloom.attach(model, "kivi:group=16,residual=32")
        assert torch.equal(model(**prompt, use_cache=False).logits, expected)
        stock = DynamicCache(config=model.config)
        assert torch.equal(model(**prompt, past_key_values=stock).logits, expected)
        model(**prompt)  # leaves no trace
        assert torch.equal(model(**prompt, use_cache=False).logits, expected)


@every
def test_detach_leaves_nothing_behind(name):
    model = zoo.build(name)
    before = [dict(vars(module)) for module in model.modules()]
    config = copy.deepcopy(model.config.to_dict())
    kvloom.attach(model, "full")
    model.generate(**zoo.batch(), **GREEDY)
    kvloom.detach(model)
    assert [set(vars(module)) for module in model.modules()] == [set(b) for b in before]
    assert model.config.to_dict() == config
    for module in model.modules():
        assert "forward" not in vars(module)
        assert not module._forward_pre_hooks
        assert not module._forward_hooks
        assert not module._forward_hooks_always_called


def test_a_step_that_fails_leaves_the_models_own_masks(monkeypatch):
    model = zoo.build("gptj")
    prompt, own = zoo.batch(), model.config._attn_implementation
    cache = kvloom.Cache(model, "full")
    monkeypatch.setattr(model.transformer.h[1].mlp, "forward", lambda x: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(**prompt, past_key_values=cache)
    assert model.config._attn_implementation == own


@every
def test_a_copy_of_an_attached_model_is_its_own(name):
    model = zoo.build(name)
    kvloom.attach(model, "full")
    expected = model.generate(**zoo.batch(), **GREEDY)
    copied = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert torch.equal(copied.generate(**zoo.batch(), **GREEDY), expected)
    kvloom.detach(copied)
    assert torch.equal(copied.generate(**zoo.batch(), **GREEDY), expected)


def add_hook(module):
    """Hook a module as accelerate does, to something one can see: outputs are doubled."""

    def forward(module, *args, **kwargs):
        out, *rest = module._old_forward(*args, **kwargs)
        return (2 * out, *rest)

    module._old_forward = module.forward
    module.forward = functools.partial(forward, module)


def remove_hook(module):
    """Undo `add_hook` as accelerate does."""
    module.forward = module._old_forward
    del module._old_forward


@pytest.mark.parametrize("name", ["gptj", "bloom"])
@pytest.mark.parametrize("order", ["hook, attach", "attach, hook"])
def test_hooks_of_accelerate_stay(name, order):
    model = zoo.build(name)
    prompt = zoo.batch(rows=1, padding=(0,))
    module = attentions(model)[1]
    steps = [lambda: add_hook(module), lambda: kvloom.attach(model, "full")]
    for step in steps if order == "hook, attach" else reversed(steps):
        step()
    with torch.no_grad():
        through = model(**prompt).logits
        kvloom.detach(model)
        own = model(**prompt, use_cache=False).logits
        torch.testing.assert_close(through, own, rtol=1e-4, atol=1e-5)
        remove_hook(module)
        plain = zoo.build(name)(**prompt, use_cache=False).logits
        assert torch.equal(model(**prompt, use_cache=False).logits, plain)
        assert not torch.equal(own, plain)


@by_reference
def test_a_forward_that_somebody_replaced_comes_back():
    model = zoo.build("mpt")
    module = attentions(model)[0]
    mine = types.MethodType(
        lambda self, *args, **kwargs: type(self).forward(self, *args, **kwargs), module
    )
    module.forward = mine
    kvloom.attach(model, "full")
    assert module.forward != mine
    kvloom.detach(model)
    assert module.forward == mine


@by_reference
def test_mpt_uses_the_cache_it_was_given_and_then_none_again():
    model = zoo.build("mpt")
    assert model.config.use_cache is False
    kvloom.attach(model, "h2o:tokens=20")
    out = model.generate(**zoo.batch(), **GREEDY, return_dict_in_generate=True)
    assert isinstance(out.past_key_values, kvloom.Cache)
    assert (
        model.generate(
            **zoo.batch(), **GREEDY, use_cache=False, return_dict_in_generate=True
        ).past_key_values
        is None
    )
    kvloom.detach(model)
    assert model.config.use_cache is False
    assert model.generation_config.use_cache is False


@every
def test_the_cache_of_another_model_is_refused(name):
    model = zoo.build(name)
    other = zoo.build("bloom" if name != "bloom" else "mpt")
    cache = kvloom.Cache(other, "full")
    other(**zoo.batch(), past_key_values=cache)
    kvloom.Cache(model, "full")
    with pytest.raises(CacheMisuse, match="made for another model"):
        model(**zoo.batch(), past_key_values=cache)
    assert cache.get_seq_length() == 61


@by_reference
@pytest.mark.parametrize("name", ["gptj", "mpt", "falcon-mqa", "falcon-gqa"])
def test_a_4d_mask_is_refused(name):
    model = zoo.build(name)
    ids = zoo.batch(rows=1, padding=(0,))["input_ids"]
    cache = kvloom.Cache(model, "full")
    mask = torch.ones(1, 1, 61, 61, dtype=torch.bool).tril()
    with pytest.raises(CacheMisuse, match="2-D padding mask"):
        model(input_ids=ids, attention_mask=mask, past_key_values=cache)
    model(input_ids=ids, past_key_values=cache)  # nothing has happened to it
    assert cache.get_seq_length() == 61


@by_reference
@every
def test_weights_of_attention_are_refused(name):
    model = zoo.build(name)
    cache = kvloom.Cache(model, "full")
    with pytest.raises(CacheMisuse, match="computes no attention weights"):
        model(**zoo.batch(), past_key_values=cache, output_attentions=True)
    assert cache.get_seq_length() == 0


@by_reference
def test_a_model_that_makes_no_mask_is_refused(monkeypatch):
    model = zoo.build("gptj")
    cache = kvloom.Cache(model, "full")
    monkeypatch.setattr(modeling_gptj, "create_causal_mask", lambda **_: None)
    with pytest.raises(CacheMisuse, match="layer 0: the model made no mask"):
        model(**zoo.batch(), past_key_values=cache)
    assert cache.get_seq_length() == 0


def test_modules_that_do_not_know_their_layer_are_refused_before_the_model_changes():
    model = zoo.build("gptj")
    for module in adapters._attentions(model):
        del module.layer_idx
    with pytest.raises(UnsupportedModel, match="has no layer_idx or layer_id"):
        kvloom.attach(model, "full", check=False)
    assert not hasattr(model, "_kvloom")


@by_reference
def test_every_adapter_is_known():
    assert {zoo.CONFIGS[name]().model_type for name in zoo.ADAPTED} <= set(ADAPTERS)
    for name in zoo.ADAPTED:
        config = zoo.CONFIGS[name]()
        with torch.device("meta"):
            model = tf.AutoModelForCausalLM.from_config(config)
        assert len(adapters._attentions(model)) == config.num_hidden_layers
