"""Scores that learn from examples of the prompt how a repetition changes queries."""

from __future__ import annotations

import copy
import math
from functools import partial

import numpy as np
import pytest
import torch
import zoo
from test_repetition import logical, prefilled, recorded
from transformers import DynamicCache

import kvloom
import naive_recipes as rules
import probe
from backends import by_reference
from kvloom.errors import CacheMisuse, RecipeError
from kvloom.hf.shared_pass import Follower, prefill_many
from kvloom.keep import Fit
from kvloom.keep.rotated import SHARE
from kvloom.recipe.resolve import resolve

PLAIN = "rotated:tokens=24,recent=6,contribution=false"
EXAMPLES = "examples=16"
LEARNED = f"{PLAIN},{EXAMPLES},neighbors=0.1"
COUNT = 16  # of the examples
PROMPT = 100
IDS = zoo.batch(3, PROMPT)  # of the three rows, the first alone is long enough for examples


def read_lengths(model):
    """A list that gets the number of tokens of each call of the embeddings."""
    lengths = []
    embed = model.get_input_embeddings()
    embed.register_forward_hook(lambda *x: lengths.append(x[2].shape[1]))
    return lengths


def distances(chunk=PROMPT):
    """The positions from an example to its two repetitions."""
    longest = math.ceil(PROMPT / math.ceil(PROMPT / chunk))
    return COUNT, max(longest, 2 * COUNT)


def read_by_plain_model(model, ids, chunk=PROMPT):
    """(q, k) of each layer of transformers' own attention: of the prompt, and of the examples."""
    calls, place = recorded(model), torch.arange(COUNT)
    positions = torch.cat([place, *(place + distance for distance in distances(chunk))])
    with torch.no_grad():
        model(ids, past_key_values=DynamicCache(config=model.config))
        model(ids[:, :COUNT].repeat(1, 3), position_ids=positions[None])
    return zip(calls[: len(calls) // 2], calls[len(calls) // 2 :], strict=True)


def predicted(prompt, examples, head, rotation, chunk=PROMPT):
    """The queries [R, N, D] of a key/value head in a repetition, and its keys [N, D]."""
    (q, k), (q2, k2) = prompt, examples
    r = q.shape[1] // k.shape[1]
    heads = slice(head * r, (head + 1) * r)
    first, *again = np.split(q2[0, heads], 3, axis=1)
    keys = k2[0, head, :COUNT]
    repeated = list(zip(again, distances(chunk), strict=True))
    return rules.as_repeated(q[0, heads], k[0, head], first, keys, repeated, rotation), k[0, head]


@pytest.mark.parametrize("chunk", [30, 100])
@pytest.mark.parametrize("name", ["llama-gqa", "qwen3", "opt", "smollm3"])
def test_the_tokens_that_predicted_queries_need_most_stay(name, chunk):
    ids, model = IDS["input_ids"][:1], zoo.build(name)
    plain = read_by_plain_model(model, ids, chunk)
    inv_freq, scale = None, 1.0  # OPT scales its queries before attention
    if name != "opt":
        inv_freq, scale = model.model.rotary_emb.inv_freq.double().numpy(), 16**-0.5
    model = zoo.build(name)
    lengths = read_lengths(model)
    cache = prefilled(model, f"{LEARNED},chunk={chunk}", input_ids=ids)
    assert lengths[-2:] == [3 * COUNT, PROMPT]
    for number, ((own, examples), found) in enumerate(zip(plain, logical(cache), strict=True)):
        rotation = None if name == "smollm3" and number == 1 else inv_freq
        for h in range(found.shape[1]):
            queries, keys = predicted(own, examples, h, rotation, chunk)
            r = len(queries)
            heads = own[0][0, h * r : (h + 1) * r]
            scores = rules.rotated(heads, keys, scale, rotation, 4, chunk, queries)
            scores = rules.with_neighbors(scores, 0.1)
            assert found[0, h].tolist() == rules.kept(scores, 24, 4, 6)


def test_blocks_learn_from_the_first_prompt_alone():
    ids, model = IDS["input_ids"][:1], zoo.build("llama-gqa")
    spec = LEARNED.replace("tokens=24", "fraction=0.4")
    expected = logical(prefilled(model, spec, input_ids=ids))
    lengths = read_lengths(model)
    cache = prefilled(model, f"{spec},block=16", input_ids=ids)
    assert lengths[-2:] == [3 * COUNT, PROMPT]
    for found, want in zip(logical(cache), expected, strict=True):
        assert torch.equal(found.sort().values, want.sort().values)
    layer = cache.full_layers[0].cache
    dropped = layer.dropped
    with torch.no_grad():
        model(ids, past_key_values=cache)
    assert lengths[-1] == PROMPT
    assert layer.dropped > dropped


def test_values_are_fitted_to_the_predicted_queries(monkeypatch):
    rows, model, ids = [], zoo.build("llama-gqa"), IDS["input_ids"][:1]
    monkeypatch.setattr(Fit, "sampled", lambda self, q, visible: rows.append(q) or q.clone())
    prefilled(model, f"{LEARNED},fit=true", input_ids=ids)
    model = zoo.build("llama-gqa")
    inv_freq = model.model.rotary_emb.inv_freq.double().numpy()
    for (own, examples), found in zip(read_by_plain_model(model, ids), rows, strict=True):
        heads = range(own[1].shape[1])
        want = np.concatenate([predicted(own, examples, h, inv_freq)[0] for h in heads])
        np.testing.assert_allclose(found[0].numpy(), want, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    "name", ["llama-gqa", "qwen3", "gemma2", "gpt2", "smollm3", "gemma3", "gemma4-shared"]
)
@pytest.mark.parametrize("given", [True, False])
def test_a_padded_row_keeps_what_it_keeps_alone(name, given):
    model, inputs = zoo.build(name), dict(IDS)
    if given:  # as `generate` does; else most models count padding
        inputs["position_ids"] = (IDS["attention_mask"].cumsum(dim=1) - 1).clamp(min=0)
    recipe = LEARNED.replace("tokens=24", "tokens=14")
    together = prefilled(model, recipe, **inputs)
    for row, pad in enumerate((0, 17, 40)):
        ids = IDS["input_ids"][row : row + 1, pad:]
        positions = torch.arange(pad, PROMPT)[None] if not given else None
        alone = prefilled(model, recipe, input_ids=ids, position_ids=positions)
        for one, two in zip(logical(together), logical(alone), strict=True):
            kept = one[row][one[row] >= pad].view(two.shape[1], -1) - pad
            assert torch.equal(kept, two[0])


@by_reference
def test_embeddings_give_the_same_as_ids():
    model, ids = zoo.build("llama-gqa"), IDS["input_ids"][:1]
    one = prefilled(model, LEARNED, input_ids=ids)
    two = prefilled(model, LEARNED, inputs_embeds=model.get_input_embeddings()(ids))
    for own, its in zip(logical(one), logical(two), strict=True):
        assert torch.equal(own, its)


@by_reference
@pytest.mark.parametrize("generates", [False, True])
@pytest.mark.parametrize("name", ["qwen2-vl", "gemma3"])
def test_a_prompt_with_an_image_is_scored_by_its_own_queries(name, generates):
    model = zoo.build_with_images(name)
    inputs, found = zoo.image_prompt(model, 20, 17), []
    for recipe in (LEARNED, LEARNED.replace(EXAMPLES, "examples=0")):
        cache = kvloom.Cache(model, recipe)
        probe.observe(cache)
        lengths = read_lengths(model)
        run = partial(model.generate, max_new_tokens=1) if generates else model
        with torch.no_grad():
            run(**inputs, past_key_values=cache)
        assert max(lengths) == min(lengths) == inputs["input_ids"].shape[1]
        found.append(logical(cache))
    for own, its in zip(*found, strict=True):
        assert torch.equal(own, its)


@by_reference
@pytest.mark.parametrize("name", ["qwen2-vl", "gemma3"])
def test_a_prompt_of_text_has_examples_in_a_model_that_reads_images(name):
    model, inputs = (
        zoo.build_with_images(name),
        zoo.image_prompt(zoo.build_with_images(name), 70, 31),
    )
    types = [x for x in inputs if x.endswith("token_type_ids")]
    ids = inputs["input_ids"][inputs["input_ids"] != zoo.IMAGE_TOKEN][None]
    text = {"input_ids": ids, **{x: torch.zeros_like(ids) for x in types}}
    lengths = read_lengths(model)
    kvloom.attach(model, LEARNED)
    del lengths[:]
    model.generate(**text, max_new_tokens=1)
    assert lengths == [3 * COUNT, ids.shape[1]]


@by_reference
@pytest.mark.parametrize(("prompt", "budget"), [(PROMPT, PROMPT), (PROMPT, 24), (96, 24), (95, 24)])
def test_examples_are_read_once_and_only_before_an_eviction_from_a_long_prompt(prompt, budget):
    model = zoo.build("llama-gqa")
    kvloom.attach(model, LEARNED.replace("tokens=24", f"tokens={budget}"))
    lengths = read_lengths(model)
    model.generate(**zoo.batch(1, prompt), max_new_tokens=3)
    learns = budget < prompt and prompt >= SHARE * COUNT
    assert lengths == [3 * COUNT] * learns + [prompt, 1, 1]


@by_reference
def test_no_example_has_a_position_that_the_model_lacks():
    model = zoo.build("llama-gqa", max_position_embeddings=PROMPT)
    cache, read = kvloom.Cache(model, LEARNED), []
    note = lambda module, args, kwargs: read.append(kwargs["position_ids"])  # noqa: E731
    model.model.layers[0].register_forward_pre_hook(note, with_kwargs=True)
    with torch.no_grad():
        model(IDS["input_ids"], past_key_values=cache)
    examples, prompt = read
    third = PROMPT // 2  # the longest chunk
    assert examples[0].tolist() == [*range(2 * COUNT), *range(third, third + COUNT)]
    assert prompt[0].tolist() == [*range(PROMPT)]


@by_reference
def test_a_failure_in_the_examples_leaves_an_empty_cache(monkeypatch):
    model = zoo.build("llama-gqa")
    cache = kvloom.Cache(model, LEARNED)
    mlp = model.model.layers[1].mlp
    hook = mlp.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError), torch.no_grad():
        model(IDS["input_ids"], past_key_values=cache)
    assert cache.get_seq_length() == 0
    assert cache.nbytes == 0
    assert all(layer.predictor is None for layer in cache.full_layers)
    hook.remove()
    probe.observe(cache)
    with torch.no_grad():
        model(IDS["input_ids"], past_key_values=cache)
    fresh = prefilled(model, LEARNED, input_ids=IDS["input_ids"])
    for own, its in zip(logical(cache), logical(fresh), strict=True):
        assert torch.equal(own, its)


@by_reference
def test_caches_that_share_a_pass_learn_as_alone():
    model, ids = zoo.build("llama-gqa"), IDS["input_ids"]
    recipes = LEARNED, f"{LEARNED},fit=true", PLAIN
    followers = [Follower(kvloom.Cache(model, recipe)) for recipe in recipes]
    prefill_many(model, kvloom.Cache(model, "full"), followers, input_ids=ids)
    for follower, recipe in zip(followers, recipes, strict=True):
        assert follower.error is None
        alone = kvloom.Cache(model, recipe)
        with torch.no_grad():
            model(ids, past_key_values=alone)
            step = torch.full((3, 1), 9)
            logits = [model(step, past_key_values=x).logits for x in (follower.cache, alone)]
        assert torch.equal(*logits)


@by_reference
def test_a_leader_that_learns_is_refused():
    model = zoo.build("llama-gqa")
    with pytest.raises(CacheMisuse, match="use a cache of `full`"):
        prefill_many(model, kvloom.Cache(model, LEARNED), [], **IDS)


@by_reference
def test_token_types_reach_a_decoder_that_takes_them():
    model, ids = zoo.build("gpt2"), IDS["input_ids"][:1]
    types = torch.arange(PROMPT)[None] % 2
    one, two = (
        prefilled(model, LEARNED, input_ids=ids, token_type_ids=x) for x in (types, 1 - types)
    )
    own, its = (torch.stack([x.float() for x in logical(cache)]) for cache in (one, two))
    assert not torch.equal(own, its)


@by_reference
def test_no_example_is_of_a_draft():
    model, ids = zoo.build("llama-gqa"), IDS["input_ids"][:1]
    alone, drafted = (
        model.generate(
            ids, max_new_tokens=12, do_sample=False, past_key_values=kvloom.Cache(model, LEARNED),
            prompt_lookup_num_tokens=tokens, eos_token_id=-1,
        )
        for tokens in (None, 4)
    )  # fmt: skip
    assert torch.equal(alone, drafted[:, : alone.shape[1]])  # transformers 5.10: one too many


@by_reference
def test_predictions_wait_with_a_prompt_that_may_be_cropped():
    model, ids = zoo.build("llama-gqa"), IDS["input_ids"][:1]
    waiting = kvloom.Cache(model, LEARNED)
    probe.observe(waiting)
    for layer in waiting.compressed:
        layer.cache.recording = True
    with torch.no_grad():
        model(ids, past_key_values=waiting)
    cropped = copy.deepcopy(waiting)
    waiting.crop(0)
    alone = prefilled(model, LEARNED, input_ids=ids)
    for own, its in zip(logical(waiting), logical(alone), strict=True):
        assert torch.equal(own, its)
    cropped.crop(PROMPT - 3)  # its examples are those of the whole prompt
    for own in logical(cropped):
        assert own.shape[2] == 24
        assert own[..., -6:].unique().tolist() == [*range(PROMPT - 9, PROMPT - 3)]


@by_reference
def test_a_prompt_that_waits_is_scored_by_its_own_queries():
    model, ids = zoo.build("llama-gqa"), IDS["input_ids"][:1]
    lengths = read_lengths(model)
    waits = f"{LEARNED},compress_after={PROMPT + 2}"
    caches = [kvloom.Cache(model, x) for x in (waits, waits.replace(EXAMPLES, "examples=0"))]
    for cache in caches:
        probe.observe(cache)
        with torch.no_grad():
            for x in (ids, *ids[:, :4].split(1, dim=1)):
                model(x, past_key_values=cache)
    assert PROMPT in lengths
    assert max(lengths) == PROMPT
    for own, its in zip(*map(logical, caches), strict=True):
        assert own.shape[2] < PROMPT
        assert torch.equal(own, its)


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        ("rotated:examples=15", "examples=15 must be a whole number, or 0, 16 or more"),
        ("rotated:neighbors=2", "neighbors=2.0 must be a number from 0 to 1"),
    ],
)
def test_what_examples_do_not_combine_with_is_refused(recipe, message):
    with pytest.raises(RecipeError, match=message):
        resolve(recipe)
