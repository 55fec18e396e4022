"""`full` is plain transformers, token for token, on every supported architecture."""

import pytest
import torch
import zoo
from transformers import DynamicCache
from transformers.models.bloom import modeling_bloom
from transformers.models.falcon import modeling_falcon

import kvloom
import probe
from backends import by_reference
from sampling import slow_except

of_each_kind = pytest.mark.parametrize(
    "model", slow_except(list(zoo.CONFIGS), *zoo.OF_EACH_KIND), indirect=True
)


@pytest.fixture(params=list(zoo.CONFIGS))
def model(request):
    return zoo.build(request.param)


@pytest.mark.sample
@pytest.mark.parametrize("beams", [1, 4])
def test_full_gives_the_tokens_of_plain_transformers(model, beams):
    options = {"max_new_tokens": 12, "do_sample": False, "num_beams": beams}
    expected = model.generate(**zoo.batch(), **options)
    kvloom.attach(model, "full")
    assert torch.equal(model.generate(**zoo.batch(), **options), expected)
    kvloom.detach(model)
    assert torch.equal(model.generate(**zoo.batch(), **options), expected)


@of_each_kind
def test_direct_call_gives_the_logits_of_plain_transformers(model):
    prompt = zoo.batch()
    real = prompt["attention_mask"].bool()
    with torch.no_grad():
        expected = model(**prompt).logits
        kvloom.attach(model, "full")
        out = model(**prompt)
    assert isinstance(out.past_key_values, kvloom.Cache)
    torch.testing.assert_close(out.logits[real], expected[real], rtol=1e-4, atol=1e-5)


@of_each_kind
def test_right_padding_gives_the_logits_of_plain_transformers(model):
    """The first new token comes from the query of a padding token."""
    prompt = {name: x.flip(1) for name, x in zoo.batch().items()}
    options = {"max_new_tokens": 4, "output_logits": True, "return_dict_in_generate": True}

    def logits():
        return torch.stack(model.generate(**prompt, **options, do_sample=False).logits)

    expected = logits()
    kvloom.attach(model, "full")
    torch.testing.assert_close(logits(), expected, rtol=1e-4, atol=1e-5)


def decode(model, cache, ids, **step):
    """Logits of tokens 110 to 134, one a step after a prompt: fp32 [1, 25, vocabulary]."""
    with torch.no_grad():
        model(input_ids=ids[:, :110], past_key_values=cache)
        steps = [
            model(
                input_ids=ids[:, i : i + 1],
                past_key_values=cache,
                **{name: value(i) for name, value in step.items()},
            ).logits
            for i in range(110, 135)
        ]
    return torch.cat(steps, dim=1).log_softmax(-1)


@pytest.mark.sample
@of_each_kind
@pytest.mark.parametrize(("recipe", "sinks"), [("window", 0), ("streaming", 4)])
def test_dropping_equals_hiding_in_a_full_cache(model, recipe, sinks, monkeypatch):
    """The oracle: plain transformers, the dropped tokens masked, positions as they were."""
    for bloom_like in (modeling_bloom, modeling_falcon):  # there, masked tokens take up no distance
        count = bloom_like.build_alibi_tensor
        monkeypatch.setattr(
            bloom_like,
            "build_alibi_tensor",
            lambda mask, *rest, count=count, **named: count(torch.ones_like(mask), *rest, **named),
        )
    ids = zoo.batch(rows=1, tokens=150, padding=(0,))["input_ids"]
    dropped = decode(model, kvloom.Cache(model, f"{recipe}:tokens=40"), ids)
    kvloom.detach(model)
    if len(kvloom.attach(model, recipe).skipped) > 0:
        pytest.skip("a 2-D mask hides tokens from the sliding layers too")
    kvloom.detach(model)

    def mask(i):
        seen = torch.zeros(1, i + 1, dtype=torch.long)
        seen[:, :sinks] = seen[:, -(40 - sinks) - 1 :] = 1
        return seen

    oracle = decode(
        model,
        DynamicCache(config=model.config),
        ids,
        attention_mask=mask,
        position_ids=lambda i: torch.tensor([[i]]),
    )
    torch.testing.assert_close(dropped, oracle, rtol=1e-4, atol=2e-5)


def gemma4(model):
    return model.config.model_type == "gemma4_text"


@by_reference
@of_each_kind
def test_fewer_bits_stray_further_from_the_full_cache(model):
    ids = zoo.batch(rows=1, tokens=150, padding=(0,))["input_ids"]
    full = decode(model, kvloom.Cache(model, "full"), ids)
    divergence = {}
    for bits in (2, 4, 8):
        cache = kvloom.Cache(model, f"kivi:bits={bits},group=16,residual=32")
        kivi = decode(model, cache, ids)
        divergence[bits] = (full.exp() * (full - kivi)).sum(-1).mean().item()
    if not any(layer.nbytes for layer in probe.layers(cache)):
        assert divergence == {2: 0, 4: 0, 8: 0}
    else:
        # divergence grows with the square of the logits, which Gemma 4 does not divide by sqrt(D)
        sharpness = probe.layers(cache)[0]._state.like.shape[3] if gemma4(model) else 1
        assert divergence[8] < 1e-4 * sharpness
        assert divergence[8] < divergence[4] < divergence[2] < 0.15 * sharpness
