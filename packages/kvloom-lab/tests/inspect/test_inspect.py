"""inspect: the data equals what the caches held, read and scored."""

from __future__ import annotations

import copy
import dataclasses

import numpy as np
import pytest
import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, LlamaForCausalLM

import probe
from kvloom.cache.slot_storage import SlotStorage
from kvloom.errors import IncompatibleRecipe, InputError, UnsupportedModel
from kvloom.hf.cache import Cache
from kvloom.hf.observe import observe_steps
from kvloom.keep import Budget, Keep, Mass
from kvloom.recipe import Protect, Recipe
from kvloom.recipe.resolve import resolve
from kvloom.store import Packed, Store
from kvloom_lab.analyse.attention import measure
from kvloom_lab.inspect import trace_recipe
from tiny import TEXT

LAYERS, HEADS, PROMPT, NEW = 3, 2, 60, 5
RECIPES = [
    "full",
    "window:tokens=24",
    "streaming:tokens=24,sinks=4",
    "h2o",
    "h2o:tokens=62",
    "h2o:tokens=30,limit=63",
    "h2o:positions=renumbered",
    "streaming:tokens=24,positions=renumbered",
    "dilated:tokens=24",
    "snapkv:tokens=24,window=8",
    "snapkv:tokens=24,window=8,head_share=0.2,layers=joint",
    "small:fraction=0.8,recent=4,group=16,residual=16,head_share=0.1",
    "pyramidkv:tokens=24,window=8",
    "minikv:group=16,residual=32,layers=variance",
    "kivi:group=16,residual=32",
    "random",
    "quest:tokens=24,page=4,sinks=2,recent=4,full_layers=1",
]
RECALL = {
    "clusters": "clusterkv:tokens=22,size=5,sinks=3,full_layers=1",
    "pages": "quest:tokens=24,page=4,sinks=2,recent=4,full_layers=1",
    "topk": "topk:tokens=24,sinks=2,recent=4,full_layers=1",
}


def seen_by(model, tokenizer, recipe):
    return trace_recipe(model, tokenizer, recipe, TEXT, context=PROMPT, new_tokens=NEW)


def held_at(head, step):
    """Logical indices of the tokens that a head holds after a step, read from the data."""
    gone = head["gone"][: PROMPT + step]
    return [i for i, at in enumerate(gone) if at == -1 or at > step]


@pytest.mark.parametrize("name", RECIPES)
def test_data_equals_what_the_cache_held(model, tokenizer, name):
    data = seen_by(model, tokenizer, name)
    assert (data["prompt_tokens"], data["steps"], len(data["layers"])) == (PROMPT, NEW, LAYERS)
    ids = tokenizer(TEXT, return_tensors="pt")["input_ids"][:, :PROMPT]
    cache = Cache(model, name)
    probe.observe(cache)
    with torch.inference_mode():
        for step in range(NEW + 1):
            logits = model(ids, past_key_values=cache).logits[:, -1]
            for layer, routed in zip(data["layers"], probe.layers(cache), strict=True):
                index = probe.kept(routed)[0].tolist()
                at = [[i for i in head if i >= 0] for head in index]
                assert [held_at(head, step) for head in layer["heads"]] == at
                assert layer["held"][step] == round(sum(map(len, at)) / HEADS)
                body, evictor = probe.tokens(routed), probe.evictor(routed)
                ragged = None if evictor is None else evictor.ragged
                slots = isinstance(body, SlotStorage)  # nothing is packed
                packed = {
                    s: 0 if slots else getattr(body, s).packed_count for s in ("keys", "values")
                }
                more = [0] * HEADS
                if ragged is not None and not cache.recipe.store.exact:
                    more = ragged.spans.bounds[0, :, 1].tolist()
                for head, its in zip(layer["heads"], more, strict=True):
                    for side, marks in (head["packed"] or {}).items():
                        assert sum(-1 != m <= step for m in marks) == packed.get(side, 0) + its
            ids = logits.argmax(-1, keepdim=True)


def exact_mass(model, ids):
    """Attention of plain transformers, [layers, Hq, T, T]."""
    eager = LlamaForCausalLM(copy.deepcopy(model.config))
    eager.load_state_dict(model.state_dict())
    eager.set_attn_implementation("eager")
    with torch.no_grad():
        return torch.stack(eager.eval()(ids, output_attentions=True).attentions)[:, 0].double()


@pytest.mark.parametrize("name", ["h2o", "window:tokens=24", "snapkv:tokens=24,window=8", "full"])
def test_mass_after_the_prompt_is_plain_transformers(model, tokenizer, name):
    data = seen_by(model, tokenizer, name)
    ids = tokenizer(TEXT, return_tensors="pt")["input_ids"][:, :PROMPT]
    weights = exact_mass(model, ids)
    for i, layer in enumerate(data["layers"]):
        for h, head in enumerate(layer["heads"]):
            group = weights[i, 2 * h : 2 * h + 2].sum(dim=(0, 1))  # [T], two query heads share
            kept = (group[held_at(head, 0)].sum() / group.sum()).item()
            assert head["mass"][0] == pytest.approx(kept, abs=2e-5)
            if name == "full":
                assert head["mass"] == [1.0] * (NEW + 1)


def test_mass_of_a_later_step_is_the_whole_softmax_of_its_query(model, tokenizer):
    """What a window keeps of a step, by the naive formula over every key of the run."""
    data = seen_by(model, tokenizer, "window:tokens=24")
    seen: dict = {}
    cache = Cache(model, "window:tokens=24")
    observe_steps(cache, lambda look: seen.update({look.layer: look}))
    ids = tokenizer(TEXT, return_tensors="pt")["input_ids"][:, :PROMPT]
    with torch.inference_mode():
        for _ in range(NEW + 1):
            ids = model(ids, past_key_values=cache).logits[:, -1].argmax(-1, keepdim=True)
    for place, look in seen.items():
        q, k = look.q[0, :, 0].double().numpy(), look.keys[0].double().numpy()
        for h, head in enumerate(data["layers"][place]["heads"]):
            logits = q[2 * h : 2 * h + 2] @ k[h].T * look.scale
            weights = np.exp(logits - logits.max(axis=1, keepdims=True))
            weights /= weights.sum(axis=1, keepdims=True)
            kept = weights[:, held_at(head, NEW)].sum() / 2
            assert head["mass"][NEW] == pytest.approx(kept, abs=2e-5)


def test_scores_are_those_the_choice_was_made_from(model, tokenizer):
    data = seen_by(model, tokenizer, "h2o")
    ids = tokenizer(TEXT, return_tensors="pt")["input_ids"][:, :PROMPT]
    weights = exact_mass(model, ids)
    for i, layer in enumerate(data["layers"]):
        assert layer["budget"] == PROMPT // 2
        for h, head in enumerate(layer["heads"]):
            want = weights[i, 2 * h : 2 * h + 2].sum(dim=(0, 1))
            first = head["scores"]["first"]
            assert first[:PROMPT] == pytest.approx(want.tolist(), rel=2e-3)
            assert first[PROMPT:] == [None] * NEW
            last, gone = head["scores"]["last"], head["gone"]
            assert None not in last
            for score, before, at in zip(last, first, gone[:PROMPT], strict=False):
                assert score == before if at == 0 else score >= before  # dropped scores stay
            # what was dropped after the prompt scored lower than any older token that stayed
            old = range(PROMPT - PROMPT // 4)
            assert max(first[j] for j in old if gone[j] == 0) <= min(
                first[j] for j in old if gone[j] != 0
            )


def stretched(pairs):
    """The tokens of [first, how many, ...]."""
    return {i for lo, n in zip(pairs[::2], pairs[1::2], strict=True) for i in range(lo, lo + n)}


@pytest.mark.parametrize("kind", RECALL)
def test_tokens_read_are_those_of_the_step(model, tokenizer, kind):
    """As many as the cache says; the finest index reads the best keys; others whole parts."""
    data = seen_by(model, tokenizer, RECALL[kind])
    assert data["views"] == ["read"]
    seen: dict = {}
    cache = Cache(model, RECALL[kind])
    observe_steps(cache, lambda look: seen.update({look.layer: look}))
    ids = tokenizer(TEXT, return_tensors="pt")["input_ids"][:, :PROMPT]
    sinks = cache.recipe.protect.sinks
    with torch.inference_mode():
        for step in range(NEW + 1):
            logits = model(ids, past_key_values=cache).logits[:, -1]
            ids = logits.argmax(-1, keepdim=True)
            for layer, routed in zip(data["layers"], probe.layers(cache), strict=True):
                if layer["number"] == 0:
                    assert layer["index"] is None
                    assert layer["heads"][0]["read"] is None
                    continue
                assert layer["index"] == kind
                for h, head in enumerate(layer["heads"]):
                    n = PROMPT + step
                    read = stretched(head["read"][step])
                    assert len(read) == probe.read(routed) == (n if step == 0 else len(read))
                    look = seen[layer["number"]]
                    q, k = look.q[0].double().numpy(), look.keys[0, h].double().numpy()
                    if step == 0:
                        assert head["read_mass"][0] == 1.0
                        continue
                    logits = q[2 * h : 2 * h + 2, 0] @ k.T
                    weights = np.exp((logits - logits.max(axis=1, keepdims=True)) * look.scale)
                    weights /= weights.sum(axis=1, keepdims=True)
                    want = weights[:, sorted(read)].sum() / 2
                    assert head["read_mass"][step] == pytest.approx(want, abs=2e-5)
                    indexed = [i for i, at in enumerate(head["indexed"]) if 0 <= at < step]
                    always = set(range(n)) - set(indexed)
                    assert always <= read
                    assert always >= {*range(sinks), n - 1}
                    found = read - always
                    if kind == "topk":
                        best = sorted(indexed, key=lambda i: -logits.mean(axis=0)[i])
                        assert found == set(best[: len(found)])
                        assert head["parts"] is None
                    else:
                        by: dict = {}
                        for i in indexed:
                            by.setdefault(head["parts"][i], set()).add(i)
                        cut = [p for p in by.values() if p & found and not p <= found]
                        assert len(cut) <= (kind == "clusters")
                        assert len(found) == (19 if kind == "clusters" else 16)


def test_what_is_read_of_what_stayed(model, tokenizer):
    """Eviction first: a token that is dropped is not read, nor in a cluster."""
    keep = Keep(Budget(tokens=40, recent=4), Mass(), when="prompt")
    recipe = resolve(RECALL["clusters"])
    recipe = dataclasses.replace(recipe, keep=keep)
    data = seen_by(model, tokenizer, recipe)
    assert data["views"] == ["read", "kept"]
    for layer in data["layers"][1:]:
        for head in layer["heads"]:
            for step in range(NEW + 1):
                assert stretched(head["read"][step]) <= set(held_at(head, step))
            assert len(stretched(head["read"][NEW])) == 22 + NEW
            for gone, part in zip(head["gone"], head["parts"], strict=True):
                assert part == -1 or gone == -1


def test_protected_tokens_and_tokens_without_scores(model, tokenizer):
    data = seen_by(model, tokenizer, "random")
    assert data["layers"][0]["heads"][0]["scores"]["first"][:5].count("inf") == 4
    assert seen_by(model, tokenizer, "window:tokens=24")["layers"][0]["heads"][0]["scores"] is None


def test_sinks_beside_packed_tokens_are_exact(model, tokenizer):
    store = Store(Packed(4, "channel", 16, residual=16), Packed(4, "token", 16))
    recipe = Recipe(store=store, protect=Protect(sinks=3, exact_recent=(0, 9)))
    packed = seen_by(model, tokenizer, recipe)["layers"][0]["heads"][0]["packed"]
    body = PROMPT - 3  # keys in groups of 16, values all but the newest 9
    never = [-1] * 3
    assert packed["keys"][:PROMPT] == never + [0] * (body // 16 * 16) + [-1] * (body % 16)
    assert packed["values"] == never + [0] * (body - 9) + [1, 2, 3, 4, 5] + [-1] * 9


@pytest.mark.parametrize(
    ("name", "views"),
    [("h2o", ["kept"]), ("full", ["kept"]), ("minikv", ["kept", "format"]), ("kivi", ["format"])],
)
def test_views_are_those_with_something_to_see(model, tokenizer, name, views):
    spec = name if name in ("h2o", "full") else f"{name}:group=16,residual=32"
    assert seen_by(model, tokenizer, spec)["views"] == views


def test_a_group_of_a_whole_head_is_told_by_its_channels(model, tokenizer):
    formats = seen_by(model, tokenizer, "turbo:window=8")["formats"]
    assert formats["keys"] == "3 bit per token, groups of 16 (4 bits per value)"


def test_generation_ends_where_the_model_ends(model, tokenizer):
    whole = seen_by(model, tokenizer, "full")
    ids = tokenizer(TEXT, return_tensors="pt")["input_ids"][:, :PROMPT]
    out = model.generate(ids, max_new_tokens=NEW, do_sample=False)[0, PROMPT:].tolist()
    steps = out.index(out[2])  # read before the token that is made the end comes
    model.generation_config.eos_token_id = [out[2]]
    try:
        data = seen_by(model, tokenizer, "full")
    finally:
        model.generation_config.eos_token_id = None
    assert data["steps"] == steps
    assert data["tokens"] == whole["tokens"][: PROMPT + steps]
    head = data["layers"][0]["heads"][0]
    assert len(head["gone"]) == len(data["tokens"])
    assert len(head["mass"]) == steps + 1


def test_the_model_is_left_as_it_was(tokenizer, model):
    fresh = LlamaForCausalLM(copy.deepcopy(model.config)).eval()
    seen_by(fresh, tokenizer, "h2o")
    assert getattr(fresh, "_kvloom", None) is None


def sliding(tokenizer, kinds):
    """A model whose layers slide or not."""
    config = Gemma3TextConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, sliding_window=24, layer_types=kinds,
        num_hidden_layers=len(kinds), eos_token_id=None,
    )  # fmt: skip
    return Gemma3ForCausalLM(config).eval()


def test_layers_keep_their_numbers_beside_layers_that_slide(tokenizer):
    kinds = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
    data = seen_by(sliding(tokenizer, kinds), tokenizer, "h2o:tokens=20")
    assert data["stock_layers"] == [0, 2]
    assert [layer["number"] for layer in data["layers"]] == [1, 3]
    assert [layer["held"] for layer in data["layers"]] == [[20] * (NEW + 1)] * 2


def test_a_model_of_which_nothing_is_held_is_refused_and_left_alone(tokenizer):
    model = sliding(tokenizer, ["sliding_attention"] * 2)
    with pytest.raises(IncompatibleRecipe, match="would compress nothing"):
        seen_by(model, tokenizer, "h2o")
    with pytest.raises(UnsupportedModel, match="holds no layer of this model"):
        seen_by(model, tokenizer, "full")
    with pytest.raises(IncompatibleRecipe, match="would compress nothing"):
        measure(model, torch.ones(1, 9, dtype=torch.long), context=8)
    assert getattr(model, "_kvloom", None) is None


def test_what_cannot_be_traced_is_refused(model, tokenizer):
    with pytest.raises(InputError, match="the text is empty"):
        trace_recipe(model, tokenizer, "h2o", "  \n")
    with pytest.raises(InputError, match=r"need 514 positions and the model has 512; give less"):
        trace_recipe(model, tokenizer, "h2o", TEXT, context=500, new_tokens=14)
    with pytest.raises(InputError, match="context=0 must be 1 or more"):
        trace_recipe(model, tokenizer, "h2o", TEXT, context=0)
