"""Expected Attention and rotated queries on whole models: the model's RoPE rotates queries."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
import zoo
from test_repetition import IDS, logical, prefilled, recorded
from transformers import DynamicCache

import kvloom
import naive_recipes as rules
from backends import by_reference
from kvloom.errors import IncompatibleRecipe
from kvloom.hf import compat
from kvloom.keep import Budget, Keep, Mass, Reconstruction, Rotated, Scorer, Step
from kvloom.recipe import Recipe
from kvloom.recipe.resolve import resolve
from sampling import slow_except

EXPECTED = "expected:tokens=24,recent=6,future=50"
ROTATED = "rotated:tokens=24,recent=6"
KVZIP = "kvzip:tokens=24,recent=6"
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}


@pytest.mark.parametrize(
    ("recipe", "sinks"),
    [
        (EXPECTED, 4),
        ("evict:score=expected,tokens=24,recent=6,future=50,when=prompt,sinks=9", 9),
    ],
)
@pytest.mark.parametrize("name", ["llama-gqa", "qwen3", "opt", "smollm3"])
def test_the_tokens_that_later_queries_expect_stay(name, recipe, sinks):
    ids, model = IDS["input_ids"][:1], zoo.build(name)
    calls, past = recorded(model), DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids, past_key_values=past)
    inv_freq, scale = None, 1.0  # OPT scales its queries before attention
    if name != "opt":
        inv_freq, scale = model.model.rotary_emb.inv_freq.double().numpy(), 16**-0.5
    cache = prefilled(zoo.build(name), recipe, input_ids=ids)
    layers = zip(calls, past.layers, logical(cache), strict=True)
    for number, ((q, k), layer, found) in enumerate(layers):
        rotation = None if name == "smollm3" and number == 1 else inv_freq
        r = q.shape[1] // k.shape[1]
        for h in range(k.shape[1]):
            v, mine = layer.values[0, h].double().numpy(), q[0, h * r : (h + 1) * r]
            scores = rules.expected(mine, k[0, h], v, scale, rotation, 50, sinks)
            assert found[0, h].tolist() == rules.kept(scores, 24, sinks, 6)


@pytest.mark.parametrize(("chunk", "contribution"), [(20, True), (100, True), (100, False)])
@pytest.mark.parametrize("name", ["llama-gqa", "qwen3", "opt", "smollm3"])
def test_the_tokens_that_rotated_queries_need_most_stay(name, chunk, contribution):
    ids, model = IDS["input_ids"][:1], zoo.build(name)
    calls, past = recorded(model), DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids, past_key_values=past)
    inv_freq, scale = None, 1.0  # OPT scales its queries before attention
    if name != "opt":
        inv_freq, scale = model.model.rotary_emb.inv_freq.double().numpy(), 16**-0.5
    recipe = f"{ROTATED},chunk={chunk},contribution={str(contribution).lower()}"
    cache = prefilled(zoo.build(name), recipe, input_ids=ids)
    layers = zip(calls, past.layers, logical(cache), strict=True)
    for number, ((q, k), layer, found) in enumerate(layers):
        rotation = None if name == "smollm3" and number == 1 else inv_freq
        r = q.shape[1] // k.shape[1]
        for h in range(k.shape[1]):
            scores = rules.rotated(q[0, h * r : (h + 1) * r], k[0, h], scale, rotation, 4, chunk)
            if contribution:  # the norm of the layer's input is one factor for all
                scores *= layer.values[0, h].double().norm(dim=-1).numpy()
            assert found[0, h].tolist() == rules.kept(scores, 24, 4, 6)


@by_reference
@pytest.mark.parametrize("name", ["llama-gqa", "gemma3", "gpt2", "falcon-gqa", "qwen3-next"])
def test_a_score_reads_the_norms_of_the_layers_inputs(name, monkeypatch):
    model, found = zoo.build(name), []
    score = Rotated.__call__

    def noted(scorer, step):
        found.append(step.norms)
        return score(scorer, step)

    monkeypatch.setattr(Rotated, "__call__", noted)
    cache = prefilled(model, ROTATED)
    numbers = cache.geometry.layer_indices
    kvloom.detach(model)
    with torch.no_grad():
        states = model(**IDS, output_hidden_states=True).hidden_states
    real = IDS["attention_mask"].bool()
    for number, norms in zip(numbers, found, strict=True):
        expected = states[number].norm(dim=-1)
        torch.testing.assert_close(norms[real], expected[real], rtol=1e-4, atol=1e-4)
    assert not any(layer._forward_pre_hooks for layer in compat.decoder_layers(model))


@by_reference
@pytest.mark.parametrize("name", ["mpt", "falcon-alibi", "deepseek-v3", "dynamic"])
def test_a_model_whose_queries_cannot_be_rotated_repeats_the_prompt(name):
    if name == "dynamic":
        model = zoo.build("llama-gqa", rope_parameters=DYNAMIC)
    elif name in zoo.CONFIGS:
        model = zoo.build(name)
    else:
        pytest.skip("this transformers caches no latents")
    rotated, repeated = (prefilled(model, x) for x in (f"{ROTATED},fit=true", KVZIP))
    for one, other in zip(logical(rotated), logical(repeated), strict=True):
        assert torch.equal(one, other)
    assert "reads each prompt twice" in str(kvloom.attach(model, ROTATED))
    assert "reads each prompt twice" not in str(kvloom.attach(model, KVZIP))
    kvloom.detach(model)
    if name in ("deepseek-v3", "dynamic"):
        with pytest.raises(IncompatibleRecipe, match="use another score"):
            kvloom.Cache(model, EXPECTED)


@dataclass(frozen=True)
class Turned(Scorer):
    """A score of another distribution that rotates queries as `Rotated` does."""

    without: ClassVar[Scorer] = Reconstruction()
    kind: ClassVar[str] = "turned"
    needs_rope: ClassVar[bool] = True
    rotates_queries: ClassVar[bool] = True
    of_prompt: ClassVar[bool] = True
    supports_alibi: ClassVar[bool] = False

    def __call__(self, step: Step) -> torch.Tensor:
        return Rotated()(step)

    @property
    def without_rotation(self) -> Scorer:
        return self.without


def turned() -> Recipe:
    return Recipe(
        Keep(Budget(24, recent=6), Turned(), when="prompt", query_heads="max"), name="turned"
    )


@by_reference
def test_any_score_that_rotates_queries_reads_positions_on_several_axes():
    model = zoo.build_with_images("qwen2-vl")
    cache = kvloom.Cache(model, turned())
    with torch.no_grad():
        model(**zoo.image_prompt(model, 250, 150), past_key_values=cache)
    assert all(layer.cache.dropped > 200 for layer in cache.full_layers)


@by_reference
@pytest.mark.parametrize("name", ["mpt", "llama-gqa"])
def test_any_score_may_name_the_one_that_takes_its_place(name, monkeypatch):
    dynamic = {"rope_parameters": DYNAMIC} if name == "llama-gqa" else {}
    model = zoo.build(name, **dynamic)
    found, repeated = (prefilled(model, x) for x in (turned(), f"{KVZIP},sinks=0"))
    for one, other in zip(logical(found), logical(repeated), strict=True):
        assert torch.equal(one, other)
    assert "reads each prompt twice" in str(kvloom.attach(model, turned()))
    monkeypatch.setattr(Turned, "without", Mass())
    assert "another score takes the place" in str(kvloom.attach(model, turned()))
    kvloom.detach(model)
    monkeypatch.setattr(Turned, "without", Turned())
    with pytest.raises(IncompatibleRecipe, match="use another score"):
        kvloom.Cache(model, turned())


@pytest.mark.parametrize("store", ["full", "turbo"])
@pytest.mark.parametrize("layers", ["uniform", "joint,head_share=0.2"])
def test_a_fit_does_not_depend_on_what_scored(layers, store):
    """Where sinks and recent tokens are the budget, a repetition keeps the same tokens."""
    model, budget = zoo.build("llama-gqa"), f"tokens=24,recent=20,layers={layers},store={store}"
    caches = [
        prefilled(model, f"{score}:{budget},fit={fit}")
        for score, fit in (("rotated", "true"), ("kvzip", "true"), ("kvzip", "false"))
    ]
    for kept in zip(*map(logical, caches), strict=True):
        assert all(torch.equal(x, kept[0]) for x in kept)
    with torch.no_grad():
        mask = torch.nn.functional.pad(IDS["attention_mask"], (0, 1), value=1)
        ids = IDS["input_ids"][:, :1]
        logits = [model(ids, attention_mask=mask, past_key_values=x).logits for x in caches]
    torch.testing.assert_close(logits[1], logits[0], rtol=1e-4, atol=1e-5)
    assert not torch.allclose(logits[2], logits[0], rtol=1e-4, atol=1e-5)
    assert caches[1].nbytes == caches[2].nbytes


@pytest.mark.parametrize("recipe", [EXPECTED, ROTATED, f"{ROTATED},chunk=30"])
@pytest.mark.parametrize(
    "name",
    slow_except(
        sorted(set(zoo.CONFIGS) - {"mistral-sliding", "deepseek-v3"}),
        *sorted({*zoo.OF_EACH_KIND, "glm4"} - {"deepseek-v3"}),
    ),
)
def test_a_padded_row_keeps_what_it_keeps_alone(name, recipe):
    model = zoo.build(name)
    together = prefilled(model, recipe)
    if "chunk" in recipe and together.full_layers[0].cache.recipe.repeats_prompt:
        pytest.skip("the chunks of a repetition count padding")
    for row, pad in enumerate((0, 17, 40)):
        ids = IDS["input_ids"][row : row + 1, pad:]
        alone = prefilled(model, recipe, input_ids=ids)
        if name in zoo.LEARNED and pad:
            continue  # positions that are learned differ
        for one, two in zip(logical(together), logical(alone), strict=True):
            kept = one[row][one[row] >= pad].view(two.shape[1], -1) - pad
            assert torch.equal(kept, two[0])


@by_reference
@pytest.mark.parametrize(
    "spelled",
    [
        "expected:tokens=40,recent=8,store=kivi-4",
        "expected:fraction=0.5,positions=renumbered",
        "expected:tokens=40,layers=pyramid",
        "rotated:tokens=40,recent=8,store=kivi-4",
        "rotated:fraction=0.5,head_share=0.2,layers=joint",
        "rotated:tokens=40,recent=8,compress_after=400",
        "knorm:tokens=40,recent=8",
        "knorm:tokens=160,store=kivi",
        "vatp:tokens=40",
    ],
)
def test_predicted_bytes_are_exact(spelled):
    model, ids = zoo.build("llama-gqa", head_dim=32), torch.cat([IDS["input_ids"][:1]] * 5, dim=1)
    recipe, cache = resolve(spelled), kvloom.Cache(model, spelled)
    with torch.no_grad():
        model(ids, past_key_values=cache)
    assert cache.nbytes == recipe.nbytes(ids.shape[1], compat.geometry(model))
    assert kvloom.Recipe.from_toml(recipe.to_toml()) == recipe
