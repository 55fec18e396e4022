"""Scores that learn from examples of the prompt how a repetition changes queries."""

from __future__ import annotations

import pytest
import torch
import zoo
from test_repetition import IDS, logical, prefilled, recorded
from transformers import DynamicCache

import kvloom
import naive_recipes as rules
from backends import by_reference
from kvloom.errors import RecipeError
from kvloom.hf.shared_pass import Follower, prefill_many
from kvloom.recipe.resolve import resolve

PLAIN = "rotated:tokens=24,recent=6,contribution=false"
LEARNED = f"{PLAIN},examples=30,neighbors=0.1"
PROMPT = IDS["input_ids"].shape[1]


def read_lengths(model):
    """A list that gets the number of tokens of each call of the embeddings."""
    lengths = []
    embed = model.get_input_embeddings()
    embed.register_forward_hook(lambda *x: lengths.append(x[2].shape[1]))
    return lengths


@pytest.mark.parametrize("chunk", [20, 100])
@pytest.mark.parametrize("name", ["llama-gqa", "qwen3", "opt", "smollm3"])
def test_the_tokens_that_predicted_queries_need_most_stay(name, chunk):
    ids, model = IDS["input_ids"][:1], zoo.build(name)
    calls, count, distance = recorded(model), 30, min(chunk, PROMPT)
    twice, place = ids[:, :count].repeat(1, 2), torch.arange(count)
    with torch.no_grad():
        model(ids, past_key_values=DynamicCache(config=model.config))
        model(twice, position_ids=torch.cat([place, place + distance])[None])
    own, examples = calls[: len(calls) // 2], calls[len(calls) // 2 :]
    inv_freq, scale = None, 1.0  # OPT scales its queries before attention
    if name != "opt":
        inv_freq, scale = model.model.rotary_emb.inv_freq.double().numpy(), 16**-0.5
    model = zoo.build(name)
    lengths = read_lengths(model)
    cache = prefilled(model, f"{LEARNED},chunk={chunk}", input_ids=ids)
    assert lengths[-2:] == [2 * count, PROMPT]
    for number, ((q, k), (q2, k2), found) in enumerate(
        zip(own, examples, logical(cache), strict=True)
    ):
        rotation = None if name == "smollm3" and number == 1 else inv_freq
        r = q.shape[1] // k.shape[1]
        for h in range(k.shape[1]):
            heads = slice(h * r, (h + 1) * r)
            first, again = q2[0, heads, :count], q2[0, heads, count:]
            keys = k2[0, h, :count]
            queries = rules.as_repeated(
                q[0, heads], k[0, h], first, keys, again, distance, rotation
            )
            scores = rules.rotated(queries, k[0, h], scale, rotation, 4, chunk)
            scores = rules.with_neighbors(scores, 0.1)
            assert found[0, h].tolist() == rules.kept(scores, 24, 4, 6)


def test_values_are_fitted_to_the_predicted_queries(monkeypatch):
    """The rows of a fit are queries of the prompt after the prediction."""
    from kvloom.keep import Fit

    rows = []
    monkeypatch.setattr(Fit, "rows", lambda self, q, visible: rows.append(q) or q.clone())
    for recipe in (PLAIN, LEARNED):
        prefilled(zoo.build("llama-gqa"), f"{recipe},fit=true", rows=slice(1))
    plain, learned = rows[:3], rows[3:]
    assert all(not torch.equal(*pair) for pair in zip(plain, learned, strict=True))


@pytest.mark.parametrize("name", ["llama-gqa", "qwen3", "gemma2", "gpt2", "smollm3", "gemma3"])
def test_a_padded_row_keeps_what_it_keeps_alone(name):
    """Of the three rows, the last has fewer tokens than examples."""
    model = zoo.build(name)
    positions = (IDS["attention_mask"].cumsum(dim=1) - 1).clamp(min=0)  # as `generate` gives them
    recipe = LEARNED.replace("tokens=24", "tokens=14")
    together = prefilled(model, recipe, **IDS, position_ids=positions)
    for row, pad in enumerate((0, 17, 40)):
        alone = prefilled(model, recipe, input_ids=IDS["input_ids"][row : row + 1, pad:])
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
def test_a_prompt_with_an_image_is_scored_by_its_own_queries():
    model = zoo.build_with_images("qwen2-vl")
    inputs = zoo.image_prompt(model, 20, 17)
    neighbors = LEARNED.replace("examples=30", "examples=0")
    one, two = (prefilled(model, recipe, **inputs) for recipe in (LEARNED, neighbors))
    for own, its in zip(logical(one), logical(two), strict=True):
        assert torch.equal(own, its)


@by_reference
@pytest.mark.parametrize("budget", [PROMPT, 24])
def test_examples_are_read_once_and_only_before_an_eviction(budget):
    model = zoo.build("llama-gqa")
    kvloom.attach(model, LEARNED.replace("tokens=24", f"tokens={budget}"))
    lengths = read_lengths(model)
    model.generate(**zoo.batch(1, PROMPT), max_new_tokens=3)
    assert lengths == [60] * (budget < PROMPT) + [PROMPT, 1, 1]


@by_reference
def test_no_example_has_a_position_that_the_model_lacks():
    model = zoo.build("llama-gqa", max_position_embeddings=PROMPT)
    cache, read = kvloom.Cache(model, LEARNED), []
    note = lambda module, args, kwargs: read.append(kwargs["position_ids"])  # noqa: E731
    model.model.layers[0].register_forward_pre_hook(note, with_kwargs=True)
    with torch.no_grad():
        model(IDS["input_ids"], past_key_values=cache)
    examples, prompt = read
    assert examples[0].tolist() == [*range(30), *range(PROMPT - 30, PROMPT)]
    assert prompt[0].tolist() == [*range(PROMPT)]


@by_reference
def test_a_failure_in_the_examples_leaves_an_empty_cache(monkeypatch):
    model, cache = zoo.build("llama-gqa"), None
    cache = kvloom.Cache(model, LEARNED)
    mlp = model.model.layers[1].mlp
    hook = mlp.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError), torch.no_grad():
        model(IDS["input_ids"], past_key_values=cache)
    assert cache.get_seq_length() == 0
    assert cache.nbytes == 0
    assert all(layer.predictor is None for layer in cache.full_layers)
    hook.remove()
    with torch.no_grad():
        model(IDS["input_ids"], past_key_values=cache)
    fresh = kvloom.Cache(model, LEARNED)
    with torch.no_grad():
        model(IDS["input_ids"], past_key_values=fresh)
    assert cache.nbytes == fresh.nbytes


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


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        ("rotated:examples=-1", "examples=-1 must be a whole number"),
        ("rotated:neighbors=2", "neighbors=2.0 must be a number from 0 to 1"),
        ("rotated:fraction=0.5,block=32,examples=8", 'use examples=0, or when="prompt"'),
        ("rotated:examples=8,compress_after=99", "leave out one of the two"),
    ],
)
def test_what_examples_do_not_combine_with_is_refused(recipe, message):
    with pytest.raises(RecipeError, match=message):
        resolve(recipe)
