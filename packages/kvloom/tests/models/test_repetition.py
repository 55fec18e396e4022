"""KVzip: the model repeats its prompt once, the best tokens stay, and nothing else changes."""

from __future__ import annotations

import inspect
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import zoo
from transformers import AttentionInterface, DynamicCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

import kvloom
import naive_recipes as rules
import probe
from backends import by_reference
from kvloom.cache import fill
from kvloom.errors import CacheMisuse, RecipeError
from kvloom.hf import compat
from kvloom.hf.observe import observe_steps
from kvloom.hf.repetition import Repetition
from kvloom.keep import Fit
from kvloom.recipe import Protect
from kvloom.recipe.geometry import Geometry
from kvloom.recipe.resolve import resolve
from kvloom_lab.workload.layers import LayerShape, empty_layers, random_qkv
from sampling import slow_except

PROMPT = 61
IDS = zoo.batch(3, PROMPT)
KVZIP = "kvzip:tokens=24,recent=6,chunk=20,instruction=5 6 7"


def prefilled(model, recipe, rows=slice(None), **inputs):
    """A new cache that has read the prompt, or other inputs."""
    cache = kvloom.Cache(model, recipe)
    probe.observe(cache)
    with torch.no_grad():
        model(**(inputs or {x: y[rows] for x, y in IDS.items()}), past_key_values=cache)
    return cache


def logical(cache):
    """Logical indices of the tokens of each layer, sorted."""
    return [probe.kept(layer) for layer in probe.layers(cache)]


def recorded(model):
    """A list that gets (query, key) of every layer of transformers' own attention."""
    calls = []

    def record(module, query, key, value, mask, **kwargs):
        calls.append((query.double().numpy(), key.double().numpy()))
        return sdpa_attention_forward(module, query, key, value, mask, **kwargs)

    AttentionInterface.register("recorded", record)
    AttentionMaskInterface.register("recorded", sdpa_mask)
    model.set_attn_implementation("recorded")
    return calls


@pytest.mark.sample
@pytest.mark.parametrize("name", ["llama-gqa", "llama-mha", "qwen3"])
@pytest.mark.parametrize("instruction", [(), (5, 6, 7)])
@pytest.mark.parametrize("chunk", [20, 100])
def test_the_tokens_that_repeating_needs_most_stay(name, instruction, chunk):
    ids, model = IDS["input_ids"][:1], zoo.build(name)
    calls = recorded(model)
    scores = [[[] for _ in range(model.config.num_key_value_heads)] for _ in range(3)]
    with torch.no_grad():
        for lo in range(0, PROMPT, chunk):
            hi, past = min(PROMPT, lo + chunk), DynamicCache(config=model.config)
            model(ids, past_key_values=past)
            del calls[:]
            new = [*instruction, *ids[0, max(0, lo - 8) : hi].tolist()]
            model(torch.tensor([new]), past_key_values=past)
            for layer, (q, k) in zip(scores, calls, strict=True):
                r = q.shape[1] // k.shape[1]
                for h, head in enumerate(layer):
                    mine = q[0, h * r : (h + 1) * r]
                    head.extend(rules.kvzip(mine, k[0, h], 16**-0.5, 4, (lo, hi)))
    spelled = " ".join(map(str, instruction)) or "none"
    recipe = f"kvzip:tokens=24,recent=6,chunk={chunk},instruction={spelled}"
    cache = prefilled(zoo.build(name), recipe, input_ids=ids)
    for layer, found in zip(scores, logical(cache), strict=True):
        for h, head in enumerate(layer):
            assert found[0, h].tolist() == rules.kept(head, 24, 4, 6)


@pytest.mark.parametrize(
    "name", slow_except(sorted(set(zoo.CONFIGS) - {"mistral-sliding"}), *zoo.OF_EACH_KIND, "glm4")
)
def test_a_padded_row_keeps_what_it_keeps_alone(name):
    model = zoo.build(name)
    recipe = KVZIP.replace("chunk=20", "chunk=70")  # in chunks of its own a row would differ
    placed = {}
    if "position_ids" in inspect.signature(model.forward).parameters:  # as `generate` gives them
        placed["position_ids"] = (IDS["attention_mask"].cumsum(dim=1) - 1).clamp(min=0)
    together = prefilled(model, recipe, **IDS, **placed)
    for row, pad in enumerate((0, 17, 40)):
        ids = IDS["input_ids"][row : row + 1, pad:]
        alone = prefilled(model, recipe, input_ids=ids, attention_mask=torch.ones_like(ids))
        for one, two in zip(logical(together), logical(alone), strict=True):
            kept = one[row][one[row] >= pad].view(two.shape[1], -1) - pad
            assert torch.equal(kept, two[0])


@pytest.mark.parametrize(
    "name", ["llama-gqa", "gemma2", "gpt-oss", "gemma4-shared", "bloom", "opt"]
)
def test_the_repetition_leaves_the_cache_as_it_was(monkeypatch, name):
    """With a budget above the prompt nothing is evicted, so the cache must equal an exact one."""
    model = zoo.build(name)
    monkeypatch.setattr(Repetition, "needed", True)
    repeated, exact = (prefilled(model, x) for x in (KVZIP.replace("24", "90"), "full"))
    assert repeated.nbytes == exact.nbytes
    assert repeated.get_seq_length() == PROMPT
    for one, two in zip(probe.layers(repeated), probe.layers(exact), strict=True):
        own, its = probe.tokens(one), probe.tokens(two)
        assert torch.equal(own.exact_keys(), its.exact_keys())
        assert torch.equal(own.exact_values(), its.exact_values())
    mask = torch.cat([IDS["attention_mask"], torch.ones(3, 1, dtype=torch.long)], dim=1)
    with torch.no_grad():
        logits = [
            model(torch.full((3, 1), 9), attention_mask=mask, past_key_values=x).logits
            for x in (repeated, exact)
        ]
    assert torch.equal(*logits)


CHUNKS, JOINT = "kvzip:tokens=200,recent=6,chunk=100", ",head_share=0,layers=joint"
GROUPS = f"{JOINT},store=kivi-4@1={CHUNKS}{JOINT},store=turbo"


@by_reference
@pytest.mark.parametrize(
    "options",
    [
        "", ",store=kivi-4", ",store=turbo", ",positions=renumbered", ",layers=variance",
        ",fraction=0.5", ",head_share=0.2,store=turbo", f"{JOINT},store=kivi-4", GROUPS,
    ],
)  # fmt: skip
def test_predicted_bytes_are_exact(options):
    model, ids = zoo.build("llama-gqa", head_dim=32), torch.cat([IDS["input_ids"][:1]] * 5, dim=1)
    chunks = CHUNKS.replace("tokens=200,", "") if "fraction" in options else CHUNKS
    recipe = resolve(f"{chunks}{options}")
    cache = kvloom.Cache(model, recipe)
    with torch.no_grad():
        model(ids, past_key_values=cache)
    if "variance" not in options:
        assert cache.nbytes == recipe.nbytes(ids.shape[1], compat.geometry(model))
    assert kvloom.Recipe.from_toml(recipe.to_toml()) == recipe
    dropped = sum(probe.dropped(layer) for layer in probe.layers(cache))
    assert dropped == 3 * (ids.shape[1] - (152 if "fraction" in options else 200))


@pytest.mark.parametrize("recording", [False, True])
def test_a_prompt_within_the_budget_is_not_repeated(monkeypatch, recording):
    model, calls = zoo.build("llama-gqa", max_position_embeddings=64), []
    model.model.layers[0].mlp.register_forward_hook(lambda *args: calls.append(1))
    cache = kvloom.Cache(model, KVZIP.replace("tokens=24", "tokens=70"))
    for layer in cache.full_layers:
        layer.cache.recording = recording
    with torch.no_grad():
        model(**IDS, past_key_values=cache)
    cache.crop(0)
    assert len(calls) == 1
    for layer in cache.full_layers:
        layer.cache.recording = False
    mask = torch.cat([IDS["attention_mask"], torch.ones(3, 1, dtype=torch.long)], dim=1)
    with torch.no_grad():
        model(torch.full((3, 1), 9), attention_mask=mask, past_key_values=cache)
    assert [probe.count(layer) for layer in probe.layers(cache)] == [PROMPT + 1] * 3


def test_generate_evicts_once_and_continues():
    model = zoo.build("llama-gqa")
    kvloom.attach(model, KVZIP)
    out = model.generate(**IDS, max_new_tokens=5, do_sample=False, return_dict_in_generate=True)
    for layer in probe.layers(out.past_key_values):
        assert probe.count(layer) == 24 + 4  # the newest token is not in the cache


def test_a_prompt_under_assisted_decoding_waits_for_the_crop():
    model = zoo.build("llama-gqa")
    drafted, plain = kvloom.Cache(model, KVZIP), prefilled(model, KVZIP)
    probe.observe(drafted)
    for layer in drafted.full_layers:
        layer.activate_past_recording()
    with torch.no_grad():
        model(**IDS, past_key_values=drafted)
    assert [probe.count(layer) for layer in probe.layers(drafted)] == [PROMPT] * 3
    drafted.crop(0)
    for one, two in zip(logical(drafted), logical(plain), strict=True):
        assert torch.equal(one, two)


@pytest.mark.parametrize("part", [{"protect": Protect(spans=((9, 12),))}, {"fit": Fit()}])
def test_a_draft_right_after_a_prompt(part):
    model, recipe = zoo.build("llama-gqa"), resolve(KVZIP)
    if "fit" in part:
        part = {"keep": replace(recipe.keep, **part)}
    cache = kvloom.Cache(model, replace(recipe, **part))
    for layer in cache.full_layers:
        layer.activate_past_recording()
    ids = zoo.batch(1, PROMPT + 3, (0,))["input_ids"]
    with torch.no_grad():
        model(ids[:, :PROMPT], past_key_values=cache)
        model(ids[:, PROMPT:], past_key_values=cache)
    cache.crop(-1)
    assert cache.get_seq_length() == PROMPT + 2
    assert [probe.count(layer) for layer in probe.layers(cache)] == [24 + 2] * 3


@pytest.mark.parametrize("name", ["llama-gqa", "gemma2"])
def test_a_failure_of_the_repetition_undoes_the_prompt(monkeypatch, name):
    model, recipe = zoo.build(name), KVZIP
    cache, layer, calls = kvloom.Cache(model, recipe), model.model.layers[2], []
    own = layer.mlp.forward

    def fail(*args):
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return own(*args)

    monkeypatch.setattr(layer.mlp, "forward", fail)
    with pytest.raises(KeyboardInterrupt), torch.no_grad():
        model(**IDS, past_key_values=cache)
    assert cache.get_seq_length() == cache.nbytes == 0
    monkeypatch.undo()
    with torch.no_grad():
        model(**IDS, past_key_values=cache)
    for one, two in zip(logical_of(cache), logical_of(prefilled(model, recipe)), strict=True):
        assert torch.equal(one, two)


def logical_of(cache):
    return [probe.tokens(layer).exact_keys() for layer in probe.layers(cache)]


@by_reference
@pytest.mark.parametrize("chunk", [32, 50])
def test_a_chunk_is_as_long_as_the_positions_of_the_model_allow(chunk):
    limit, lengths = PROMPT + 3 + 8 + chunk, []  # beside the instruction and the lead
    model, roomy = (zoo.build("llama-gqa", max_position_embeddings=n) for n in (limit, 500))
    model.model.embed_tokens.register_forward_hook(lambda *call: lengths.append(call[2].shape[1]))
    one = prefilled(model, KVZIP.replace("chunk=20", "chunk=100"))
    assert PROMPT + max(lengths[1:]) <= limit
    two = prefilled(roomy, KVZIP.replace("chunk=20", f"chunk={chunk}"))
    for own, its in zip(logical(one), logical(two), strict=True):
        assert torch.equal(own, its)


@by_reference
@pytest.mark.parametrize(
    ("limit", "chunk", "remedy"),
    [(PROMPT + 42, 100, "of at most 60 tokens, or another"), (PROMPT + 30, 20, "of at most 60"),
     (20, 100, "; use another recipe, such as snapkv")],
)  # fmt: skip
def test_a_model_without_room_for_the_repetition_is_refused(limit, chunk, remedy):
    model = zoo.build("llama-gqa", max_position_embeddings=limit)
    cache = kvloom.Cache(model, KVZIP.replace("chunk=20", f"chunk={chunk}"))
    with pytest.raises(CacheMisuse, match=remedy):
        model(**IDS, past_key_values=cache)
    assert cache.get_seq_length() == cache.nbytes == 0


@by_reference
def test_what_cannot_be_repeated_is_refused():
    model = zoo.build("llama-gqa")
    cache = kvloom.Cache(model, KVZIP)
    with pytest.raises(CacheMisuse, match="a token that the model lacks; use ids below 199"):
        prefilled(model, "kvzip:instruction=5 199")
    mixed = f"{KVZIP}@0=kvzip:chunk=30"
    with pytest.raises(CacheMisuse, match="repeat the prompt in different chunks"):
        prefilled(model, mixed)
    assert cache.get_seq_length() == cache.nbytes == 0


@by_reference
@pytest.mark.parametrize(
    ("spelled", "message"),
    [
        ("kvzip:compress_after=100", "leave out compress_after"),
        ("kvzip@0=h2o", "does not allow other layers that evict by score at every step"),
        ("kvzip:instruction=a b", "must be token ids separated by spaces"),
        ("kvzip:chunk=0", "must be a whole number of tokens, 1 or more"),
        ("kvzip:store=h2o", "also selects tokens"),
        ("kvzip:store=lzma", "names no recipe; use one that packs"),
        ("evict:score=reconstruction", 'use when="prompt"'),
    ],
)
def test_recipes_that_cannot_work_are_refused(spelled, message):
    with pytest.raises(RecipeError, match=message):
        resolve(spelled)


@pytest.mark.parametrize("padded", [False, True])
def test_embeddings_are_repeated_as_their_ids_are(padded):
    model = zoo.build("llama-gqa")
    by_ids = IDS if padded else {"input_ids": IDS["input_ids"]}
    embeds = model.get_input_embeddings()(IDS["input_ids"]).detach()
    by_embeds = {**by_ids, "inputs_embeds": embeds}
    del by_embeds["input_ids"]
    one, two = (logical(prefilled(model, KVZIP, **inputs)) for inputs in (by_ids, by_embeds))
    assert all(torch.equal(*pair) for pair in zip(one, two, strict=True))


@by_reference
@pytest.mark.parametrize("name", zoo.WITH_IMAGES)
def test_an_image_is_repeated_as_the_decoder_has_read_it(name):
    """Not as the tokens that stand for it in the prompt."""
    model, read = zoo.build_with_images(name), []
    note = lambda *call: read.append(call[2]["inputs_embeds"])  # noqa: E731
    compat.decoder(model).register_forward_pre_hook(note, with_kwargs=True)
    prefilled(model, "kvzip:tokens=24,recent=4,chunk=30", **zoo.image_prompt(model, 20, 17))
    first, *chunks = read
    assert torch.equal(chunks[0], first[:, :30])
    assert torch.equal(chunks[1], first[:, 22:])


@by_reference
def test_what_layers_add_to_an_image_follows_its_tokens():
    """In Qwen3-VL; the rows differ in padding, and a chunk ends within an image."""
    model, calls = zoo.build_with_images("qwen3-vl"), []
    note = lambda *call: calls.append(call[2])  # noqa: E731
    compat.decoder(model).register_forward_pre_hook(note, with_kwargs=True)
    rows = [zoo.image_prompt(model, before, 17, before) for before in (20, 11)]
    batch = {}
    for name, long in rows[0].items():
        short = rows[1][name]
        batch[name] = torch.cat([long, F.pad(short, (long.shape[1] - short.shape[1], 0))])
    prefilled(model, "kvzip:tokens=24,recent=4,chunk=22,instruction=5 6 7", **batch)

    def added(call):
        """Pairs of a token of an image and what layers add to it, each by its sum."""
        mask = call["visual_pos_masks"]
        features = torch.stack(call["deepstack_visual_embeds"], dim=1)
        tokens = call["inputs_embeds"][mask]
        return {(x.sum().item(), y.sum().item()) for x, y in zip(tokens, features, strict=True)}

    first, *chunks = map(added, calls)
    assert len(first) == 2 * zoo.IMAGE_TOKENS
    assert len(chunks) == 2
    assert 0 < len(chunks[0]) < len(first)
    assert chunks[0] | chunks[1] == first


@by_reference
def test_what_a_decoder_reads_beside_embeddings_is_refused_by_name(monkeypatch):
    """As the states of images that Mllama's layers attend to."""
    model = zoo.build("llama-gqa")
    forward = type(model.model).forward
    monkeypatch.setattr(
        type(model.model), "forward", lambda self, features=None, **x: forward(self, **x)
    )
    cache = kvloom.Cache(model, KVZIP)
    with torch.no_grad(), pytest.raises(CacheMisuse, match="its decoder 'features', which kvloom"):
        model(**IDS, features=torch.ones(3), past_key_values=cache)
    assert cache.get_seq_length() == cache.nbytes == 0


def test_layers_with_other_recipes_join_in():
    model = zoo.build("llama-gqa")
    cache = prefilled(model, f"{KVZIP}@0=kivi:group=16,residual=32@2=streaming:tokens=30")
    assert [probe.count(layer) for layer in probe.layers(cache)] == [61, 24, 26]
    apart = kvloom.Cache(model, "kivi:group=16,residual=32")
    with torch.no_grad():
        model(**IDS, past_key_values=apart)
    assert probe.layers(cache)[0].nbytes == probe.layers(apart)[0].nbytes


def test_recall_finds_tokens_among_those_that_stay():
    model = zoo.build("llama-gqa")
    recipe = resolve(KVZIP.replace("24", "40"))
    recalled = resolve("quest:tokens=24,page=4,sinks=4,recent=4,full_layers=0").recall
    both = kvloom.Recipe(recipe.keep, recall=recalled, protect=recipe.protect)
    cache = prefilled(model, both)
    assert [probe.count(layer) for layer in probe.layers(cache)] == [40] * 3
    assert np.all([probe.indexed(layer) > 0 for layer in probe.layers(cache)])


def test_an_observer_does_not_see_the_repetition():
    model, seen = zoo.build("llama-gqa"), []
    cache = kvloom.Cache(model, KVZIP)
    observe_steps(cache, lambda step: seen.append((step.q.shape[2], step.keys.shape[2])))
    with torch.no_grad():
        model(**IDS, past_key_values=cache)
        mask = torch.cat([IDS["attention_mask"], torch.ones(3, 1, dtype=torch.long)], dim=1)
        model(torch.full((3, 1), 9), attention_mask=mask, past_key_values=cache)
    assert seen == [(PROMPT, PROMPT)] * 3 + [(1, PROMPT + 1)] * 3
    scored = probe.scored(probe.layers(cache)[0])
    assert scored[1].shape == (3, 2, PROMPT)


def test_a_filled_cache_of_the_benchmarks_evicts_too():
    shape = LayerShape(4, 2, 32, dtype=torch.float32)
    recipe = resolve("kvzip:tokens=40,recent=6,store=kivi")
    (layer,) = empty_layers(recipe, shape)
    fill(layer, *random_qkv(shape, 300))
    assert layer.nbytes == recipe.nbytes(300, Geometry(1, 4, 2, 32, torch.float32))
