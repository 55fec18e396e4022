"""transformers' own caches on an attached model give what they give on the plain model."""

import pytest
import torch
import transformers as tf
import zoo
from transformers.generation.configuration_utils import ALL_CACHE_IMPLEMENTATIONS

import kvloom
from backends import by_reference

pytestmark = by_reference  # no kvloom cache runs

# With and without sliding layers, a soft cap, RoPE, and adapters.
MODELS = (
    "llama-gqa",
    "gemma2",
    "gemma3",
    "gpt-oss",
    "gemma4-shared",
    "mistral-sliding",
    "gpt2",
    "gptj",
    "falcon-alibi",
)
RECIPE = dict.fromkeys(MODELS, "window:tokens=24") | {"mistral-sliding": "full"}
CACHES = {
    "dynamic": lambda config: tf.DynamicCache(config=config),
    "dynamic without config": lambda config: tf.DynamicCache(),
    "static": lambda config: tf.StaticCache(config=config, max_cache_len=96),
    "quantized fp8": lambda config: tf.QuantizedCache(backend="fp8", config=config),
}


def generate(model, new_cache=None, **options) -> object:
    """The tokens and the logits of 12 steps of three prompts, or the error of transformers."""
    vars(model).pop("_cache", None)  # transformers keeps a static cache, damaged by an error too
    try:
        if new_cache is not None:
            options["past_key_values"] = new_cache(model.config)
        out = model.generate(
            **zoo.batch(), max_new_tokens=12, do_sample=False, return_dict_in_generate=True,
            output_logits=True, **options,
        )  # fmt: skip
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return torch.cat([out.sequences.float(), *out.logits], dim=1)


def assert_same(left: object, right: object) -> None:
    if isinstance(left, str) or isinstance(right, str):
        assert left == right
    else:
        torch.testing.assert_close(left, right, rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", MODELS)
def test_every_cache_implementation(name, subtests):
    model = zoo.build(name)
    own = set(ALL_CACHE_IMPLEMENTATIONS) - {"hybrid"}  # transformers takes it for the default
    for implementation in (*sorted(own), None):
        with subtests.test(cache_implementation=implementation):
            use = {"use_cache": False} if implementation is None else {}
            expected = generate(model, cache_implementation=implementation, **use)
            kvloom.attach(model, RECIPE[name])
            found = generate(model, cache_implementation=implementation, **use)
            kvloom.detach(model)
            assert_same(found, expected)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", MODELS)
def test_every_explicit_cache(name, subtests):
    model = zoo.build(name)
    for cache, new in CACHES.items():
        with subtests.test(cache=cache):
            expected = generate(model, new)
            kvloom.attach(model, RECIPE[name])
            found = generate(model, new)
            kvloom.detach(model)
            assert_same(found, expected)


def test_static_logits_after_800_tokens():
    model, ids = zoo.build("llama-gqa"), zoo.batch(1, 800, (0,))["input_ids"]

    def logits():
        cache = tf.StaticCache(config=model.config, max_cache_len=900)
        with torch.no_grad():
            model(input_ids=ids, past_key_values=cache)
            return model(input_ids=ids[:, :3], past_key_values=cache).logits

    expected = logits()
    kvloom.attach(model, "full")
    torch.testing.assert_close(logits(), expected, rtol=0, atol=0)
