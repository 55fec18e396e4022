"""Prompts and turns whose tokens see later ones, as the tokens of an image do."""

from __future__ import annotations

import pytest
import torch
import zoo
from transformers import DynamicCache
from transformers.masking_utils import create_causal_mask
from transformers.models.llama import modeling_llama

import kvloom
from kvloom.errors import CacheMisuse

RECIPES = [
    "full", "near-lossless:group=16,residual=16", "kivi:group=16,residual=16",
    "quest:tokens=96,page=4,sinks=2,recent=4,full_layers=0", "streaming:tokens=40,sinks=4",
]  # fmt: skip
SCORES = ["h2o:tokens=24", "snapkv:tokens=24,window=8,pool=none"]


@pytest.fixture(autouse=True)
def _inference():
    with torch.no_grad():
        yield


def in_image(row, head, q, k):
    return (q >= 44) & (q < 56) & (k >= 44) & (k < 56)


@pytest.fixture
def model(monkeypatch):
    """A Llama in whose prompts the tokens 44 to 55 are an image and see each other."""

    def mask(**arguments):
        return create_causal_mask(**arguments, or_mask_function=in_image)

    monkeypatch.setattr(modeling_llama, "create_causal_mask", mask)
    return zoo.build("llama-gqa")


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_prompt_is_that_of_transformers(model, recipe, monkeypatch):
    batch = zoo.batch()
    real = batch["attention_mask"].bool()
    want = model(**batch).logits
    got = model(**batch, past_key_values=kvloom.Cache(model, recipe)).logits
    assert torch.equal(got[real], want[real])
    monkeypatch.undo()
    assert not torch.allclose(model(**batch).logits[real], want[real], atol=1e-2)


@pytest.mark.parametrize("recipe", ["full", RECIPES[3]])
def test_tokens_are_those_of_transformers(model, recipe):
    options = {"max_new_tokens": 12, "do_sample": False}
    for batch in (zoo.batch(), zoo.batch(1, 61, (0,))):
        want = model.generate(**batch, **options)
        got = model.generate(**batch, **options, past_key_values=kvloom.Cache(model, recipe))
        assert torch.equal(got, want)


@pytest.mark.parametrize("recipe", SCORES)
def test_scores_are_those_of_the_attention_of_transformers(model, recipe):
    """The prompt attends as in transformers, and its scores know the model's mask."""
    batch = zoo.batch(1, 61, (0,))
    model.set_attn_implementation("eager")
    plain = model(**batch, output_attentions=True)
    cache = kvloom.Cache(model, recipe)
    traces = [layer.cache.observe() for layer in cache.full_layers]
    assert torch.equal(model(**batch, past_key_values=cache).logits, plain.logits)
    for trace, weights in zip(traces, plain.attentions, strict=True):
        _, scores = trace.scored
        rows = weights[:, :, -8:] if "snapkv" in recipe else weights
        wanted = rows.sum(dim=2).unflatten(1, (2, -1)).sum(dim=2)
        free = scores.isfinite()  # no sinks
        torch.testing.assert_close(scores[free], wanted[free])


@pytest.mark.parametrize("recipe", [*RECIPES, *SCORES, "small:fraction=0.5,recent=8,chunk=16"])
@pytest.mark.parametrize("cut", [40, 50])
def test_a_later_turn_attends_by_the_mask_of_the_model(model, recipe, cut):
    """All of it to the tokens that the layers hold: with `full`, as in transformers."""
    batch = zoo.batch()
    mask, ids = batch["attention_mask"], batch["input_ids"]
    cache, plain = kvloom.Cache(model, recipe), DynamicCache(config=model.config)
    for inputs in ({"attention_mask": mask[:, :cut], "input_ids": ids[:, :cut]},
                   {"attention_mask": mask, "input_ids": ids[:, cut:]}):  # fmt: skip
        got = model(**inputs, past_key_values=cache).logits
        want = model(**inputs, past_key_values=plain).logits
    if recipe == "full" or "quest" in recipe:
        real = mask[:, cut:].bool()
        torch.testing.assert_close(got[real], want[real], atol=1e-4, rtol=1e-4)
    assert got.isfinite().all()
    assert cache.get_seq_length() == 61


def test_a_mask_that_hides_stored_tokens_is_refused_by_name(model, monkeypatch):
    """Of a step of one token, too: later tokens must see all earlier ones but padding."""
    ids, cache = zoo.batch(1, 61, (0,))["input_ids"], kvloom.Cache(model, "full")
    model(ids, past_key_values=cache)

    def mask(**arguments):
        return create_causal_mask(**arguments, and_mask_function=lambda row, head, q, k: k > 5)

    monkeypatch.setattr(modeling_llama, "create_causal_mask", mask)
    with pytest.raises(CacheMisuse, match="tokens of this input do not see all tokens"):
        model(ids[:, :1], past_key_values=cache)
    assert cache.get_seq_length() == 61


@pytest.mark.parametrize("recipe", ["full", RECIPES[3]])
def test_layers_that_share_keys_read_a_part_of_the_mask(recipe, monkeypatch):
    """Gemma 4 lets its later layers attend by the last query of a prompt alone."""
    modeling = pytest.importorskip("transformers.models.gemma4.modeling_gemma4")

    def mask(**arguments):
        return create_causal_mask(**arguments, or_mask_function=in_image)

    monkeypatch.setattr(modeling, "create_causal_mask", mask)
    model, options = zoo.build("gemma4-shared"), {"max_new_tokens": 8, "do_sample": False}
    batch = {x: y[:, :54] for x, y in zoo.batch().items()}  # which ends in the image
    want = model.generate(**batch, **options)
    got = model.generate(**batch, **options, past_key_values=kvloom.Cache(model, recipe))
    assert torch.equal(got, want)


def turns(model, cache, count=2):
    """Generate after each of `count` prompts with an image; returns all tokens and the logits."""
    before, logits = torch.empty(1, 0, dtype=torch.long), []
    for seed in range(count):
        inputs = zoo.image_prompt(model, 20, 17, seed)
        inputs["input_ids"] = torch.cat([before, inputs["input_ids"]], dim=1)
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
        if (types := inputs.get("token_type_ids")) is not None:
            mine = before == zoo.IMAGE_TOKEN if "gemma3" in model.config.model_type else before >= 0
            inputs["token_type_ids"] = torch.cat([mine.long(), types], dim=1)
        out = model.generate(
            **inputs, max_new_tokens=6, do_sample=False, past_key_values=cache,
            return_dict_in_generate=True, output_logits=True,
        )  # fmt: skip
        before, logits = out.sequences, [*logits, *out.logits]
    return before, torch.stack(logits)


@pytest.mark.parametrize("name", zoo.WITH_IMAGES)
@pytest.mark.parametrize("recipe", ["full", RECIPES[3]])
def test_an_image_in_a_second_turn_gives_the_tokens_of_transformers(name, recipe):
    model = zoo.build_with_images(name)
    want, logits = turns(model, DynamicCache(config=model.config.get_text_config()))
    got, own = turns(model, kvloom.Cache(model, recipe))
    assert torch.equal(got, want)
    torch.testing.assert_close(own, logits, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", zoo.WITH_IMAGES)
@pytest.mark.parametrize(
    "recipe",
    ["small:recent=8,group=16,residual=16", "tiny:recent=8,group=16,residual=16", "minikv:group=16",
     "snapkv:tokens=100,window=8", "kvzip:tokens=100,recent=8", "rotated:tokens=100,recent=8",
     "expected:tokens=100,recent=8", "h2o:tokens=100", "keyformer:tokens=100", "knorm:tokens=100",
     "h2o:tokens=100,positions=renumbered"],
)  # fmt: skip
def test_every_score_reads_a_prompt_with_an_image(name, recipe):
    model = zoo.build_with_images(name)
    prompt = zoo.image_prompt(model, 250, 150)
    cache = kvloom.Cache(model, recipe)
    if name in ("qwen2-vl", "qwen3-vl") and ("expected" in recipe or "renumbered" in recipe):
        with pytest.raises(CacheMisuse, match=r"layer 0: .* positions on several axes; use"):
            model(**prompt, past_key_values=cache)
        assert cache.get_seq_length() == 0
        model(prompt["input_ids"][:, :200], past_key_values=cache)  # text has one position
        return
    assert torch.equal(model(**prompt, past_key_values=cache).logits, model(**prompt).logits)
    assert sum(layer.cache.dropped for layer in cache.full_layers) > 200 * len(cache.full_layers)
    stored = sum(layer.cache.nbytes for layer in cache.full_layers)
    assert stored == cache.recipe.nbytes(404, cache.geometry)
    out = model(torch.tensor([[5]]), past_key_values=cache)
    assert out.logits.isfinite().all()
