"""Packed pages in transformers' continuous batching give the tokens of kvloom's own cache."""

from __future__ import annotations

import copy
import threading

import pytest
import torch
import transformers
import zoo
from transformers import GenerationConfig

import kvloom
import kvloom_lab
from backends import by_reference
from kvloom.errors import CacheMisuse, IncompatibleRecipe, InputError, NotFinite, UnsupportedModel
from kvloom.hf.batching.continuous import TESTED
from kvloom.paged import packed_by_page

pytestmark = [
    by_reference,
    pytest.mark.skipif(transformers.__version__ not in TESTED, reason="refused by name"),
]
PAGE, NEW = 32, 12
KIVI = "kivi-4:group=16"
RECIPES = [
    "kivi:group=16", KIVI, "near-lossless:group=16,sinks=0", f"{KIVI}@0=full",
    "kivi-4:group=16@1=kivi:group=16", "skvq:group=16,reorder=false,clip=1.0",
]  # fmt: skip
LENGTHS = (1, 31, 32, 33, 63, 64, 65, 5, 100, 150)


def prompts(lengths=LENGTHS, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, 199, (n,), generator=generator).tolist() for n in lengths]


def settings(**changes):
    plain = {"page_size": PAGE, "num_blocks": 200, "max_batch_tokens": 2048}
    return transformers.ContinuousBatchingConfig(**plain | changes)


def generation(new=NEW, count=1):
    config = GenerationConfig(max_new_tokens=new, do_sample=False, eos_token_id=-1)
    config.num_return_sequences = count  # its constructor refuses several greedy ones
    return config


def batch(model, inputs, new=NEW, count=1, **changes):
    """Return the new tokens of each request."""
    out = model.generate_batch(
        inputs, generation_config=generation(new, count),
        continuous_batching_config=settings(**changes),
    )  # fmt: skip
    assert [one.error for one in out.values() if one.error] == []
    return [one.generated_tokens for one in out.values()]


@torch.no_grad()
def alone(model, recipe, prompt, new=NEW, cuts=()):
    """Return the new tokens of a prompt with kvloom's cache, which reads it in parts.

    Pages of a cache begin after the sinks, so there is padding (see `packed_by_page`).
    """
    rule = packed_by_page(recipe, PAGE, "", "", evicts=True)
    pad = 0 if rule.keep else rule.protect.sinks
    cache, found, begin = kvloom.Cache(model, rule), [], 0
    ids = torch.tensor([[0] * pad + prompt])
    for end in [*(pad + cut for cut in cuts), ids.shape[1]]:
        logits = step(model, cache, ids[:, begin:end], begin, pad)
        begin = end
    for at in range(begin, begin + new):
        found.append(int(logits[0, -1].argmax()))
        logits = step(model, cache, torch.tensor([found[-1:]]), at, pad)
    return found


def step(model, cache, ids, begin, pad):
    mask = torch.ones(1, begin + ids.shape[1], dtype=torch.long)
    mask[:, :pad] = 0
    positions = (torch.arange(begin, mask.shape[1]) - pad).clamp(min=0)[None]
    return model(ids, attention_mask=mask, position_ids=positions, past_key_values=cache).logits


class Watch:
    """Notes the caches that transformers makes, prefix hits, and what preempted requests read."""

    def __init__(self, monkeypatch):
        from transformers.generation.continuous_batching import cache, continuous_api, requests

        self.caches, self.hits, self.preempted = [], [], []
        kind, state = cache.PagedAttentionCache, requests.RequestState
        init, search = kind.__init__, kind.search_prefix_match
        again = state.create_equivalent_initial_request

        def noted(one, *args, **options):
            init(one, *args, **options)
            self.caches.append(one)

        def found(*args):
            self.hits.append(search(*args))
            return self.hits[-1]

        def preempted(one):
            new = again(one)
            self.preempted.append(new.initial_tokens)
            return new

        assert continuous_api.PagedAttentionCache is kind
        monkeypatch.setattr(kind, "__init__", noted)
        monkeypatch.setattr(kind, "search_prefix_match", found)
        monkeypatch.setattr(state, "create_equivalent_initial_request", preempted)

    def assert_nothing_left(self):
        for cache in self.caches:
            (blocks,) = cache.cache_allocators.values()
            cache.evict_cached_blocks()
            assert (blocks.block_table, blocks.untailed, blocks.rows) == ({}, set(), [])
            assert not getattr(blocks, "requests", {})
            assert not getattr(blocks, "choices", {})
            assert not getattr(blocks, "chunks", [])
            assert cache.compute_free_capacity() == 1
            assert not blocks.ledger.shared_ref_counts


@pytest.fixture
def watch(monkeypatch):
    return Watch(monkeypatch)


@pytest.fixture(scope="module")
def llama():
    return zoo.build("llama-gqa")


# --- tokens


@pytest.mark.parametrize("recipe", RECIPES)
def test_tokens_are_those_of_kvlooms_cache(llama, recipe, watch):
    inputs = prompts()
    with kvloom.continuous(llama, recipe):
        found = batch(llama, inputs)
    assert found == [alone(llama, recipe, prompt) for prompt in inputs]
    watch.assert_nothing_left()


@pytest.mark.parametrize("name", ["qwen3", "gpt-neox", "phi3", "opt"])
def test_other_models(name):
    model, inputs = zoo.build(name), prompts(LENGTHS[:8])
    with kvloom.continuous(model, KIVI):
        found = batch(model, inputs)
    assert found == [alone(model, KIVI, prompt) for prompt in inputs]


@pytest.mark.parametrize("name", ["llama-gqa", "gpt-neox"])
def test_exact_pages_give_the_tokens_of_transformers(name):
    model, inputs = zoo.build(name), prompts()
    plain = batch(model, inputs)
    with kvloom.continuous(model, "full"):
        assert batch(model, inputs) == plain


@pytest.mark.slow
@pytest.mark.parametrize(
    "recipe", ["kivi", "kivi-4", "near-lossless", "near-lossless:sinks=0", "skvq"]
)
def test_tokens_of_the_reference_model(recipe, monkeypatch):
    monkeypatch.setattr("test_continuous.PAGE", 128)
    model = kvloom_lab.reference_model(torch.float32)
    inputs = prompts([1, 127, 128, 129, 255, 256, 257, *range(300, 570, 30)])
    with kvloom.continuous(model, recipe):
        found = batch(model, inputs, max_batch_tokens=8192)
    assert found == [alone(model, recipe, prompt) for prompt in inputs]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_other_dtypes(dtype):
    model, inputs = zoo.build("llama-gqa").to(dtype), prompts()
    with kvloom.continuous(model, "kivi:bits=8,group=16"):
        found = batch(model, inputs)
    same = torch.tensor(found) == torch.tensor(batch(model, inputs))
    assert same.float().mean() > 0.5


def test_most_tokens_of_two_bit_pages_differ_from_exact_ones(llama):
    inputs = prompts()
    with kvloom.continuous(llama, "kivi:group=16"):
        found = batch(llama, inputs)
    assert found != batch(llama, inputs)


def test_prefix_hits(llama, watch):
    (base,) = prompts([110])
    inputs = [base + tail for tail in prompts(range(1, 17), seed=1)]
    with kvloom.continuous(llama, KIVI):
        found = batch(llama, inputs, max_batch_tokens=len(max(inputs)))
    assert sum(hit == 96 for hit in watch.hits) == 15
    longest = max(inputs)  # transformers begins with the last prompt in the order of tokens, alone
    for prompt, tokens in zip(inputs, found, strict=True):
        cuts = () if prompt == longest else (96,)
        assert tokens == alone(llama, KIVI, prompt, cuts=cuts)
    watch.assert_nothing_left()


@pytest.mark.parametrize("sharing", [True, False])
@pytest.mark.parametrize("tokens", [75, 96])  # 96: the first token after the fork fills a page
def test_forks(llama, watch, sharing, tokens):
    (prompt,) = prompts([tokens])
    with kvloom.continuous(llama, KIVI):
        found = batch(llama, [prompt], new=30, count=3, allow_block_sharing=sharing)
    # all tokens of the prompt but the last are read before the fork
    assert found == [alone(llama, KIVI, prompt, 30, cuts=[tokens - 1])] * 3
    watch.assert_nothing_left()


def test_a_prompt_in_chunks(llama):
    (prompt,) = prompts([150])
    with kvloom.continuous(llama, KIVI):
        found = batch(llama, [prompt], max_batch_tokens=48)
    assert found == [alone(llama, KIVI, prompt, cuts=[48, 96, 144])]


@pytest.mark.parametrize("recipe", ["full", KIVI])
def test_preempted_requests_are_complete(llama, watch, recipe):
    inputs = prompts([28 + i for i in range(10)])
    small = {"num_blocks": 8, "safety_margin": 0.0}
    with kvloom.continuous(llama, recipe):
        found = batch(llama, inputs, 40, **small)
    assert watch.preempted
    assert [len(tokens) for tokens in found] == [40] * 10
    if recipe == "full":
        assert found == batch(llama, inputs, 40)
    watch.caches = watch.caches[:1]
    watch.assert_nothing_left()


def test_more_requests_fit_into_the_blocks_of_exact_pages(llama):
    def most(recipe):
        with kvloom.continuous(llama, recipe):
            manager = llama.init_continuous_batching(generation(), settings(num_blocks=40))
            manager.start()
            (blocks,) = manager.batch_processor.cache.cache_allocators.values()
            manager.stop()
        return blocks.num_blocks // blocks.blocks_for(8 * PAGE)

    assert most("kivi:group=16") > 2 * most("full")


# --- the life of a manager


def in_its_prompt(model, prompt):
    """Return a manager that has read the first chunk of a prompt, its request, and how to go on."""
    manager = model.init_continuous_batching(generation(), settings(max_batch_tokens=40))
    first_chunk, go_on = threading.Event(), threading.Event()
    run = manager._generation_step

    def stepped():
        run()
        first_chunk.set()
        go_on.wait(10)

    manager._generation_step = stepped
    manager.start()
    request = manager.add_request(prompt)
    assert first_chunk.wait(10)
    return manager, request, go_on


@pytest.mark.parametrize("recipe", [KIVI, "rotated:tokens=60,recent=8,head_share=0.2,layers=joint"])
def test_cancelled_in_its_prompt(llama, recipe, watch):
    long, short = prompts([600, 20])
    with kvloom.continuous(llama, recipe):
        manager, cancelled, go_on = in_its_prompt(llama, long)
        manager.cancel_request(cancelled)
        kept = manager.add_request(short)
        go_on.set()
        result = manager.get_result(timeout=20)
        assert (result.request_id, len(result.generated_tokens)) == (kept, NEW)
        manager.stop()
    assert result.generated_tokens == alone(llama, recipe, short)
    watch.assert_nothing_left()


def test_two_managers_of_one_model(llama):
    one, two = prompts([40, 50])
    with kvloom.continuous(llama, KIVI):
        managers = [
            llama.init_continuous_batching(generation(new), settings()) for new in (NEW, 150)
        ]
        for manager, prompt in zip(managers, (one, two), strict=True):
            manager.start()
            manager.add_request(prompt)
        found = []
        for manager in managers:
            found.append(manager.get_result(timeout=20).generated_tokens)
            manager.stop()
        assert llama.config._attn_implementation == "sdpa"
    assert found == [alone(llama, KIVI, one), alone(llama, KIVI, two, 150)]


def test_a_persistent_manager(llama, watch):
    inputs = prompts(LENGTHS[:4])
    with kvloom.continuous(llama, KIVI):
        for _ in range(2):
            found = [
                one.generated_tokens
                for one in llama.generate_batch(
                    inputs, generation_config=generation(), persistent_manager=True,
                    continuous_batching_config=settings(allow_block_sharing=False),
                ).values()
            ]  # fmt: skip
            assert found == [alone(llama, KIVI, prompt) for prompt in inputs]
        assert len(watch.caches) == 1
    assert not hasattr(llama, "_cached_continuous_batching_manager")
    watch.assert_nothing_left()


def test_nothing_is_left_behind(llama, watch):
    from transformers.generation.continuous_batching.cache import ATTN_TYPE_TO_ALLOCATOR

    table, attributes = dict(ATTN_TYPE_TO_ALLOCATOR), set(vars(llama))
    implementation = llama.config._attn_implementation
    ids = torch.tensor(prompts([20]))
    plain = llama.generate(ids, max_new_tokens=4, do_sample=False)
    threads = threading.active_count()

    def interrupted():
        with kvloom.continuous(llama, KIVI):
            batch(llama, prompts([40]))
            assert torch.equal(llama.generate(ids, max_new_tokens=4, do_sample=False), plain)
            manager = llama.init_continuous_batching(generation(400), settings())
            manager.start()
            manager.add_request(*prompts([20]))
            llama.init_continuous_batching(generation(), settings())  # never started
            assert table == ATTN_TYPE_TO_ALLOCATOR
            with pytest.raises(CacheMisuse, match=r"call manager\.stop\(\) first"):
                llama(ids)
            raise RuntimeError("a test")

    with pytest.raises(RuntimeError, match="a test"):
        interrupted()
    assert table == ATTN_TYPE_TO_ALLOCATOR
    assert attributes == set(vars(llama))
    assert llama.config._attn_implementation == implementation
    assert threading.active_count() == threads
    assert torch.equal(llama.generate(ids, max_new_tokens=4, do_sample=False), plain)
    watch.assert_nothing_left()


@pytest.mark.parametrize("check", [True, False])
def test_no_cache_is_made_while_a_manager_runs(llama, check):
    with kvloom.continuous(llama, KIVI):
        manager = llama.init_continuous_batching(generation(), settings())
        manager.start()
        with pytest.raises(CacheMisuse, match=r"a manager .* runs on this model.*stop\(\) first"):
            kvloom.Cache(llama, KIVI, check=check)
        manager.stop()
        assert kvloom.Cache(llama, KIVI, check=check).nbytes == 0


def test_other_models_and_attached_recipes_go_on_in_the_block(llama):
    other, inputs = zoo.build("qwen3"), prompts(LENGTHS[:4])
    plain, ids = batch(other, inputs), torch.tensor(prompts([70]))
    want = batched = None
    with kvloom.attach(llama, "h2o:tokens=20"):
        want = llama.generate(ids, max_new_tokens=4, do_sample=False)
        with kvloom.continuous(llama, KIVI):
            assert batch(other, inputs) == plain
            batched = batch(llama, inputs)
            assert torch.equal(llama.generate(ids, max_new_tokens=4, do_sample=False), want)
    assert batched == [alone(llama, KIVI, prompt) for prompt in inputs]


# --- what does not run


@pytest.mark.parametrize(
    ("recipe", "error", "why"),
    [
        ("h2o", IncompatibleRecipe, "in continuous batching.*evicts some; use 'near-lossless'"),
        ("quest", IncompatibleRecipe, "recalls a choice of tokens"),
        (f"{KIVI}@0=h2o", IncompatibleRecipe, "evicts some; use 'near-lossless'"),
        ("kivi:compress_after=9", IncompatibleRecipe, "leave out compress_after=9"),
        ("kivy", kvloom.RecipeError, "did you mean 'kivi'"),
        ("skvq:group=16", IncompatibleRecipe, "needs a calibration"),
    ],
)
def test_recipes_that_do_not_start(llama, recipe, error, why):
    with pytest.raises(error, match=why), kvloom.continuous(llama, recipe):
        pass


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("mistral-sliding", "a sliding window"),
        ("gpt-oss", "attention sinks"),
        ("gemma2", "a soft cap"),
        ("gemma4-shared", "layers that share keys and values"),
        ("deepseek-v3", r"latents \(MLA\)"),
        ("bloom", "ALiBi"),
        ("gptj", "does not go through transformers' interface"),
        ("falcon-h1", "layers of kind hybrid"),
    ],
)
def test_models_that_do_not_start(name, why):
    with pytest.raises(UnsupportedModel, match=why), kvloom.continuous(zoo.build(name), KIVI):
        pass


def test_a_model_whose_layers_drop_the_pages():
    model = zoo.build("stablelm")
    why = "none of the pages .* use model.generate"
    with kvloom.continuous(model, KIVI), pytest.raises(UnsupportedModel, match=why):
        batch(model, prompts([20]))


def test_a_rope_that_changes_with_other_requests_does_not_start():
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    model = zoo.build("llama-gqa", rope_parameters=rope)
    why = "a RoPE that changes with the length of a text"
    with pytest.raises(UnsupportedModel, match=why), kvloom.continuous(model, KIVI):
        pass


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"cpu_offload_space": 1.0}, "cpu_offload_space"),
        ({"use_cuda_graph": True}, "use_cuda_graph"),
        ({"use_cuda_graph": (False, True)}, "use_cuda_graph"),
        ({"use_async_batching": True}, "use_async_batching"),
        ({"default_compile_level": 1}, "default_compile_level"),
        ({"page_size": 24}, "use page_size=32"),
    ],
)
def test_settings_that_do_not_start(llama, changes, why):
    with kvloom.continuous(llama, KIVI), pytest.raises(ValueError, match=why):
        batch(llama, prompts([20]), **changes)
    assert llama.config._attn_implementation == "sdpa"


def test_settings_within_a_generation_config_are_those_of_the_manager(llama):
    config = generation()
    config.continuous_batching_config = settings(num_blocks=40, seed=7)
    with kvloom.continuous(llama, KIVI):
        used = llama.init_continuous_batching(config).continuous_batching_config
        assert (used.page_size, used.num_blocks, used.seed) == (PAGE, 40, 7)
        config.continuous_batching_config = settings(cpu_offload_space=1.0)
        with pytest.raises(ValueError, match="cpu_offload_space"):
            llama.init_continuous_batching(config)


def test_other_versions_do_not_start(llama, monkeypatch):
    monkeypatch.setattr("kvloom.hf.batching.continuous.TESTED", ("5.99.0",))
    with pytest.raises(InputError, match=r"transformers==5\.99\.0"), kvloom.continuous(llama):
        pass


def test_blocks_within_blocks_and_persistent_managers_of_exact_pages(llama):
    with kvloom.continuous(llama), pytest.raises(CacheMisuse, match="already"):  # noqa: SIM117
        with kvloom.continuous(llama):
            pass
    llama.generate_batch(
        prompts([20]), generation_config=generation(), persistent_manager=True,
        continuous_batching_config=settings(),
    )  # fmt: skip
    try:
        with pytest.raises(CacheMisuse, match="destroy_cached"), kvloom.continuous(llama):
            pass
    finally:
        llama.destroy_cached_continuous_batching_manager()


def test_requests_that_no_pool_holds(llama, watch):
    with kvloom.continuous(llama, KIVI):
        for inputs, new in ((prompts([20, 300]), NEW), (prompts([20]), 300)):
            with pytest.raises(InputError, match=r"takes \d+ blocks.*set num_blocks=\d+"):
                batch(llama, inputs, new, num_blocks=3)
        manager = llama.init_continuous_batching(generation(), settings(num_blocks=3))
        manager.add_request(*prompts([500]))
        with pytest.raises(InputError, match="a request of 500 tokens"):
            manager.start()
        manager = llama.init_continuous_batching(generation(), settings(num_blocks=3))
        manager.start()
        with pytest.raises(InputError, match="a request of 500 tokens"):
            manager.add_request(*prompts([500]))
        kept = manager.add_request(*prompts([20]))
        assert manager.get_result(timeout=20).request_id == kept
        manager.stop()
    watch.assert_nothing_left()


def test_the_bound_that_an_error_names_is_enough(llama):
    with kvloom.continuous(llama, KIVI):
        with pytest.raises(InputError) as error:
            batch(llama, prompts([300]), num_blocks=3)
        enough = int(str(error.value).rpartition("num_blocks=")[2].split()[0])
        assert len(batch(llama, prompts([300]), num_blocks=enough)[0]) == NEW
        with pytest.raises(InputError):
            batch(llama, prompts([300]), num_blocks=enough - 1)


def test_a_pool_without_room_for_a_tail():
    model = zoo.build("llama-gqa").bfloat16()
    with kvloom.continuous(model, "kivi:bits=8,group=16"):
        manager = model.init_continuous_batching(generation(), settings(num_blocks=1))
        with pytest.raises(InputError, match="a request of 1 tokens and 1 new ones"):
            manager.start()
        assert not manager.is_running()


def test_a_bound_on_memory_without_room_for_a_block(llama):
    with kvloom.continuous(llama, KIVI):
        for bound in ({"num_blocks": None, "max_memory_percent": 1e-6}, {"num_blocks": 10**9}):
            with pytest.raises(InputError, match="max_batch_tokens or max_memory_percent"):
                batch(llama, prompts([20]), **bound)
            assert llama.config._attn_implementation == "sdpa"


def test_an_error_in_the_thread_is_raised(watch):
    model = zoo.build("llama-gqa")
    with torch.no_grad():
        model.model.layers[1].self_attn.k_proj.weight.mul_(1e6)
    with kvloom.continuous(model, KIVI):
        with pytest.raises(NotFinite, match="meta=bf16"):
            batch(model, prompts([20, 70]))
        batch(model, prompts([20]))  # no page is packed
    watch.assert_nothing_left()
    assert model.config._attn_implementation == "sdpa"


def test_attention_by_weights_is_refused_while_a_manager_runs():
    model, (prompt,) = zoo.build("llama-gqa"), prompts([30])
    with kvloom.continuous(model, "full"):
        manager = model.init_continuous_batching(generation(), settings())
        manager.start()
        model.set_attn_implementation("eager")
        manager.add_request(prompt)
        manager.get_result(timeout=60)
        with pytest.raises(CacheMisuse, match="was changed while"):
            manager.stop()
    assert model.config._attn_implementation == "eager"
    with torch.no_grad():
        assert torch.isfinite(model(torch.tensor([prompt])).logits).all()


def test_a_model_that_changes_between_batches(llama, watch):
    model = copy.deepcopy(llama)
    with kvloom.continuous(model, KIVI):
        batch(model, prompts([20]))
        with torch.no_grad():
            model.lm_head.weight.add_(1)
        with pytest.raises(CacheMisuse, match="the model has changed"):
            batch(model, prompts([20]))
    with kvloom.continuous(model, KIVI):
        batch(model, prompts([20]))
        manager = model.init_continuous_batching(generation(), settings())
        manager.start()
        model.set_attn_implementation("sdpa")
        manager.add_request(*prompts([20]))
        manager.get_result(timeout=20)
        with pytest.raises(CacheMisuse, match="attention implementation was changed"):
            manager.stop()
    watch.assert_nothing_left()
