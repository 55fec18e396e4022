"""Continuous batching with recipes that evict from a prompt, once."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import zoo
from test_continuous import (
    PAGE,
    alone,
    batch,
    generation,
    in_its_prompt,
    llama,
    prompts,
    pytestmark,
    settings,
    watch,
)  # fmt: skip

import kvloom
from kvloom.cache import LayerCache
from kvloom.cache.step import Queries, StepInputs
from kvloom.calibrate import Settings, calibrate
from kvloom.errors import CacheMisuse, IncompatibleRecipe, InputError, NotFinite
from kvloom.hf.batching.prompt_eviction import PromptEviction
from kvloom.keep import Budget, Keep, KeyNorm
from kvloom.kernels import use_backend
from kvloom.paged import packed_by_page
from kvloom.positions.rope import Rope
from kvloom.recipe import resolve
from kvloom.store import LayerFacts, Packed, Store

__all__ = ["llama", "pytestmark", "watch"]
KNORM = "knorm:tokens=40,recent=8"
JOINT = "rotated:tokens=60,recent=8,head_share=0.2,layers=joint"
SHARED = replace(
    resolve("knorm"), keep=Keep(Budget(40, recent=8), KeyNorm(), "prompt", shared=True)
)
EXACT = [
    KNORM, "snapkv:tokens=40,window=8", "expected:tokens=50,recent=8", "random:fraction=0.5",
    "rotated:tokens=40,recent=8", "triattention:tokens=64,recent=8", "pyramidkv:tokens=50,window=8",
    "snapkv:tokens=50,window=8,layers=variance", "snapkv:tokens=40,window=8,head_share=0.2", JOINT,
    pytest.param(SHARED, id="shared"), "full@0=snapkv:tokens=40,window=8",
    f"{KNORM}@0=rotated:tokens=80,recent=8,head_share=0.3", f"{JOINT},fit=true",
    "rotated:tokens=40,recent=8,fit=true,sinks=2", f"{JOINT},fit=true,examples=16",
    "rotated:tokens=40,recent=8,examples=20,neighbors=0.1@1=knorm:tokens=40",
]  # fmt: skip
PACKED = [
    "minikv:fraction=0.3", "minikv-snap:fraction=0.3,group=16@1=minikv-snap:fraction=0.3,bits=4",
    "rotated:tokens=64,recent=8,store=near-lossless", "knorm:tokens=33,recent=8,store=turbo",
    f"near-lossless:group=16,sinks=2@0={KNORM}",
    "rotated:tokens=70,recent=8,fit=true,store=near-lossless",
    "rotated:tokens=70,recent=8,fit=true,examples=16,store=near-lossless",
]  # fmt: skip
SKVQ = "skvq:span=head,group=16,pre_rope=false"
STATIC = Packed(4, "token", 16, reorder=True, static=True)  # as RPTQ's paper
LENGTHS = (1, 40, 41, 65, 300)


def generated(model, recipe, prompt, new=12):
    """Return the new tokens of a prompt with `model.generate`."""
    with kvloom.attach(model, recipe):
        ids = torch.tensor([prompt])
        out = model.generate(ids, max_new_tokens=new, do_sample=False, eos_token_id=-1)
    return out[0, len(prompt) :].tolist()


@pytest.mark.parametrize("recipe", EXACT)
def test_tokens_are_those_of_generate(llama, recipe, watch):
    inputs = prompts(LENGTHS)
    with kvloom.continuous(llama, recipe):
        found = batch(llama, inputs, 16)
    assert found == [generated(llama, recipe, prompt, 16) for prompt in inputs]
    watch.assert_nothing_left()


@pytest.mark.parametrize("recipe", PACKED)
def test_packed_tokens_are_those_of_kvlooms_cache(llama, recipe, watch):
    inputs = prompts(LENGTHS)
    with kvloom.continuous(llama, recipe):
        found = batch(llama, inputs, 34)
    assert found == [alone(llama, recipe, prompt, 34) for prompt in inputs]
    watch.assert_nothing_left()


@pytest.mark.parametrize(
    ("recipe", "keep"),
    [
        (f"{SKVQ},bits=4,value_bits=4", KNORM), (f"{SKVQ},reorder=false,clip=0.9", KNORM),
        (f"{SKVQ},meta=fp16,clip=layer", "rotated:tokens=70,recent=8"),
        ("smoothquant:pre_rope=false,group=16", "rotated:tokens=70,recent=8,fit=true"),
        (STATIC, KNORM),
    ],
)  # fmt: skip
def test_heads_with_calibrations_of_their_own(recipe, keep, watch, tmp_path):
    model, inputs = zoo.build("llama-gqa", head_dim=32), prompts(LENGTHS)
    path = tmp_path / "c.kvcal"
    store = Store(recipe, recipe) if recipe is STATIC else resolve(recipe).store
    named = replace(resolve(keep), store=store)
    if store.calibrated:
        named = replace(named, store=replace(store, calibration=str(path)))
        quick = Settings(contexts=4, settled=0.0, sample_contexts=2, recent=8)
        calibrate(model, torch.tensor(prompts([64] * 4)), [named], path, quick)
    with kvloom.continuous(model, named):
        found = batch(model, inputs, 34)
    assert found == [alone(model, named, prompt, 34) for prompt in inputs]
    watch.assert_nothing_left()


@pytest.mark.parametrize("name", ["qwen3", "gpt-neox", "phi3", "opt"])
def test_other_models(name):
    model, inputs = zoo.build(name), prompts((20, 70, 100))
    for recipe in ("snapkv:tokens=40,window=8", "expected:tokens=40,recent=8"):
        with kvloom.continuous(model, recipe):
            found = batch(model, inputs)
        assert found == [generated(model, recipe, prompt) for prompt in inputs]


def test_an_eviction_changes_tokens(llama):
    inputs = prompts((100, 150, 200))
    with kvloom.continuous(llama, KNORM):
        found = batch(llama, inputs, 40)
    assert found != batch(llama, inputs, 40)


@pytest.mark.parametrize("step", [8, 96])
@pytest.mark.parametrize(
    "recipe",
    [
        KNORM, f"{JOINT},fit=true", "full@0=snapkv:tokens=40,window=8",
        "rotated:tokens=70,recent=8,fit=true,store=near-lossless", f"{JOINT},fit=true,examples=20",
    ],
)  # fmt: skip
def test_prompts_in_chunks_keep_the_tokens_of_whole_ones(llama, recipe, step, watch):
    inputs = prompts((100, 1, 150, 90, 20, 321))
    with kvloom.continuous(llama, recipe):
        found = batch(llama, inputs, max_batch_tokens=step)
    assert found == [alone(llama, recipe, prompt) for prompt in inputs]
    watch.assert_nothing_left()


def test_the_chunks_of_one_prompt_wait_and_its_blocks_are_reserved(llama, monkeypatch, watch):
    from kvloom.hf.batching.head_pages import EvictingAllocator

    waiting, attend = [], EvictingAllocator.attend

    def noted(blocks, layer_index, *args):
        out = attend(blocks, layer_index, *args)
        if layer_index == blocks.layer_indices[-1]:
            waiting.append(list(blocks.choices.values()))
            for request, choice in blocks.choices.items():
                assert len(blocks.block_table[request]) == blocks.blocks_for(choice.tokens)
                assert len(choice.earlier) == len(blocks.layouts)
        return out

    monkeypatch.setattr(EvictingAllocator, "attend", noted)
    with kvloom.continuous(llama, JOINT):
        batch(llama, prompts((150, 90, 200)), max_batch_tokens=50)
    assert {len(choices) for choices in waiting} == {0, 1}
    assert {choice.tokens for choices in waiting for choice in choices} == {90, 150, 200}


def test_equal_prompts_share_nothing(llama, watch):
    (prompt,) = prompts((150,))
    longer = [prompt + tail for tail in prompts((3, 40))]
    with kvloom.continuous(llama, KNORM):
        found = batch(llama, [prompt, *longer, prompt], max_batch_tokens=210)
    want = [generated(llama, KNORM, one) for one in (prompt, *longer, prompt)]
    assert found == want
    assert not any(watch.hits)
    watch.assert_nothing_left()


def test_a_prompt_is_scored_by_the_norms_of_its_own_inputs():
    """Layers that compete weigh their tokens by the mean norm."""
    model, inputs = zoo.build("llama-gqa"), []
    with torch.no_grad():
        model.model.embed_tokens.weight[100:] *= 8
    for first, prompt in zip((3, 102, 3, 102), prompts((65, 150, 110, 90)), strict=True):
        inputs.append([first + x % 97 for x in prompt])
    with kvloom.continuous(model, JOINT):
        found = batch(model, inputs, 24)
    assert found == [generated(model, JOINT, prompt, 24) for prompt in inputs]


def test_heads_with_different_numbers_of_packed_tokens(llama, watch):
    """No cache packs the same tokens of a head, so many bits give nearly the exact tokens."""
    inputs, found = prompts((70, 100, 150, 200, 300)), []
    packed = replace(resolve(JOINT), store=resolve("kivi:bits=8,group=16").store)
    for recipe in (JOINT, packed):
        with kvloom.continuous(llama, recipe):
            found.append(torch.tensor(batch(llama, inputs, 40)))
    assert (found[0] == found[1]).float().mean() > 0.9
    watch.assert_nothing_left()


def test_fitted_values_are_those_of_the_cache():
    keys = resolve("kivi:bits=2,group=16").store.keys
    named = replace(resolve("rotated:tokens=70,recent=8,fit=true"), store=Store(keys))
    recipe = packed_by_page(named, PAGE, "", "", evicts=True)
    facts = LayerFacts(rope=Rope(torch.tensor([1.0, 0.5, 0.1, 0.01])))
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, heads, 600, 16) for heads in (4, 2, 2))
    layer = LayerCache(recipe.for_layer(0, (0,)), facts=facts)
    layer.prefill(StepInputs(Queries(q, 0.25), k, v))
    choice = PromptEviction(recipe, (0,), [facts]).begin(600)
    ((place, heads),) = choice.read(0, Queries(q, 0.25), k, v)
    values = torch.stack([own_v for _, own_v in heads])[None]
    assert place == 0
    assert torch.equal(values, layer.exact_tokens()[1])
    assert not torch.isin(values[..., 0], v[..., 0]).all()


def test_two_managers_do_not_learn_at_the_same_time(llama):
    learns = f"{JOINT},examples=16"
    for recipe in (learns, JOINT):
        with kvloom.continuous(llama, recipe):
            first, second = (
                llama.init_continuous_batching(generation(), settings()) for _ in range(2)
            )
            first.start()
            if recipe == learns:
                with pytest.raises(CacheMisuse, match="another manager runs on this model; call"):
                    second.start()
                first.stop()
            second.start()
            second.stop()


@pytest.mark.parametrize("cuts", [(1,), (599,), (64, 128, 500), range(50, 600, 50)])
def test_chunks_give_the_choice_of_a_whole_prompt(cuts):
    recipe = packed_by_page(
        f"{JOINT},fit=true,store=near-lossless@0={KNORM}", PAGE, "", "", evicts=True
    )
    facts = [LayerFacts(rope=Rope(torch.tensor([1.0, 0.5, 0.1, 0.01])))] * 3
    torch.manual_seed(0)
    prompt = [[torch.randn(1, heads, 600, 16) for heads in (4, 2, 2)] for _ in facts]
    norms, kept = torch.rand(1, 600) + 0.5, []
    for ends in ([600], [*cuts, 600]):
        choice, begin = PromptEviction(recipe, (0, 1, 2), facts).begin(600), 0
        for end in ends:
            found = {}
            for place, layer in enumerate(prompt):
                q, k, v = (x[:, :, begin:end] for x in layer)
                queries = Queries(q, 0.25, norms=norms[:, begin:end])
                queries, k, v = choice.joined(place, queries, k, v)
                assert torch.equal(k, layer[1][:, :, :end])
                found |= choice.read(place, queries, k, v)
            assert not found or end == 600
            begin = end
        assert not choice.earlier
        kept.append([x for place in range(3) for head in found[place] for x in head])
    assert all(map(torch.equal, *kept))
    assert {len(x) for x in kept[0][:4]} == {40}


def test_pages_of_a_fork_are_in_its_own_blocks():
    from kvloom.hf.batching.head_pages import StoredHeads

    heads = StoredHeads(torch.tensor([[3, 5]]))
    pages, layer, head = torch.tensor([14, 9, 10]), torch.zeros(3).long(), torch.tensor([0, 0, 1])
    heads.add(pages, layer, head, torch.tensor([0, 1, 0]))
    copy = heads.moved([7, 4, 5], [1, 9, 2], 2)
    assert copy.pages.tolist() == [[[2, 19], [4, 0]]]
    assert (copy.evicted.tolist(), copy.used) == ([[3, 5]], 3)


@pytest.mark.slow
@pytest.mark.parametrize(
    "recipe",
    [
        "knorm:tokens=200,recent=8,store=near-lossless", f"{JOINT},store=near-lossless",
        "kivi-4:group=16,sinks=3@0=snapkv:tokens=200,window=8,head_share=0.2",
    ],
)  # fmt: skip
def test_kernels_read_pages_of_heads(llama, recipe):
    """Their tails overlap in memory views, and a head may have no page."""
    inputs, found = prompts((1, 127, 128, 129, 200, 201, 300, 400, 640)), []
    for backend in ("auto", "ref"):
        with use_backend(backend), kvloom.continuous(llama, recipe):
            found.append(batch(llama, inputs, 140, page_size=128))
    assert found[0] == found[1]


@pytest.mark.parametrize(("tokens", "step"), [(97, 96), (97, 2048), (150, 50), (150, 2048)])
@pytest.mark.parametrize("recipe", [KNORM, JOINT])
def test_forks(llama, watch, recipe, tokens, step):
    """All tokens of the prompt but the last are read, and evicted from, before the fork."""
    (prompt,) = prompts((tokens,))
    with kvloom.continuous(llama, recipe):
        found = batch(llama, [prompt], new=60, count=3, max_batch_tokens=step)
    assert found == [alone(llama, recipe, prompt, 60, cuts=[tokens - 1])] * 3
    watch.assert_nothing_left()


def test_forks_of_one_token(llama, watch):
    inputs = prompts((1, 20))  # transformers cannot run a step of the first alone
    with kvloom.continuous(llama, KNORM):
        found = batch(llama, inputs, count=2)
    assert found == [x for prompt in inputs for x in [alone(llama, KNORM, prompt)] * 2]
    watch.assert_nothing_left()


@pytest.mark.parametrize(
    ("recipe", "step"),
    [
        (KNORM, 2048), (JOINT, 90), ("minikv:fraction=0.3", 2048),
        pytest.param(JOINT, 2048, marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_a_preempted_request_evicts_from_prompt_and_answer(llama, watch, recipe, step):
    inputs = prompts([60 + 9 * i for i in range(10)])
    with kvloom.continuous(llama, recipe):
        found = batch(llama, inputs, 60, num_blocks=9, safety_margin=0.0, max_batch_tokens=step)
    assert watch.preempted
    for prompt, tokens in zip(inputs, found, strict=True):
        read = [prompt, *(ids for ids in watch.preempted if ids[: len(prompt)] == prompt)]
        ends = [len(ids) - len(prompt) for ids in read[1:]] + [60]
        begin, want = 0, []
        for ids, end in zip(read, ends, strict=True):
            want += alone(llama, recipe, ids, end - begin)
            begin = end
        assert tokens == want
    watch.assert_nothing_left()


def test_more_requests_run_in_the_same_blocks(llama, monkeypatch, watch):
    """Their tokens are more than exact blocks hold, and transformers counts those."""
    from transformers.generation.continuous_batching.input_outputs import ContinuousBatchingIOs

    sizes, prepare = [], ContinuousBatchingIOs.prepare_batch_tensors

    def noted(one, **options):
        sizes.append(len(options["requests_in_batch"]))
        return prepare(one, **options)

    monkeypatch.setattr(ContinuousBatchingIOs, "prepare_batch_tensors", noted)
    inputs, most = prompts([220] * 12), []
    for recipe in ("full", KNORM):
        sizes.clear()
        with kvloom.continuous(llama, recipe):
            batch(llama, inputs, 20, num_blocks=24, safety_margin=0.0, max_batch_tokens=4096)
        most.append(max(sizes))
    assert most == [3, 12]
    watch.assert_nothing_left()


def test_cancelled_while_it_decodes(llama, watch):
    long, short = prompts((200, 90))
    with kvloom.continuous(llama, KNORM):
        manager = llama.init_continuous_batching(generation(500), settings())
        manager.start()
        cancelled = manager.add_request(long, streaming=True)
        manager.get_result(request_id=cancelled, timeout=20)  # it decodes
        manager.cancel_request(cancelled)
        kept = manager.add_request(short, max_new_tokens=12)
        while (result := manager.get_result(timeout=20)).request_id != kept:
            pass
        manager.stop()
    assert result.generated_tokens == generated(llama, KNORM, short)
    watch.assert_nothing_left()


def test_interrupted_while_chunks_wait(llama, watch):
    def interrupted():
        with kvloom.continuous(llama, JOINT):
            manager, _, go_on = in_its_prompt(llama, *prompts((300,)))
            (blocks,) = manager.batch_processor.cache.cache_allocators.values()
            assert len(blocks.choices) == 1
            go_on.set()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    watch.assert_nothing_left()


def test_an_error_in_the_thread_is_raised(watch):
    model, (prompt,) = zoo.build("llama-gqa"), prompts((100,))
    weight = model.model.layers[1].self_attn.k_proj.weight
    with torch.no_grad():
        weight[0, 0] = torch.nan
    with kvloom.continuous(model, KNORM), pytest.raises(NotFinite, match="layer 1: NaN"):
        batch(model, [prompt], max_batch_tokens=40)
    watch.assert_nothing_left()


# --- what does not run


@pytest.mark.parametrize(
    ("recipe", "why"),
    [
        ("h2o", "every token after the prompt"),
        ("small:block=64", "in continuous batching, .*every token after the prompt"),
        ("kvzip", "the model reads a prompt once"),
    ],
)
def test_recipes_that_do_not_start(llama, recipe, why):
    with pytest.raises(IncompatibleRecipe, match=why), kvloom.continuous(llama, recipe):
        pass


@pytest.mark.parametrize("recipe", [KNORM, f"full@0={KNORM}"])
def test_a_prompt_store_holds_every_token(llama, tmp_path, recipe):
    store = kvloom.PromptStore(tmp_path)
    with pytest.raises(IncompatibleRecipe, match="leave out the store"):  # noqa: SIM117
        with kvloom.continuous(llama, recipe, store=store):
            pass


def test_the_bound_that_an_error_names_is_enough(llama):
    with kvloom.continuous(llama, KNORM):
        with pytest.raises(InputError, match=r"takes \d+ blocks") as error:
            batch(llama, prompts((300,)), num_blocks=1)
        enough = int(str(error.value).rpartition("num_blocks=")[2].split()[0])
        assert enough < -(-300 // PAGE)
        assert len(batch(llama, prompts((300,)), num_blocks=enough)[0]) == 12
