"""An engine that starts again loads the pages of former prompts, and no page that is another."""

import time
from types import SimpleNamespace

import pytest
import torch

import engines
import kvloom
from kvloom_vllm import refusal
from test_scheduling import BLOCK, core, free_blocks

PAGE, NEW = 128, 12
PROMPT, OTHER = engines.prompts([600, 300])
WHOLE = 512  # tokens of the full pages of PROMPT


def run(job, recipe, folder, options=None, **changes):
    """Return job(engine) of an engine with a prompt store in a folder."""
    transfer = {
        "kv_connector": "KvloomStore", "kv_role": "kv_both",
        "kv_connector_extra_config": {"folder": str(folder), **(options or {})},
    }  # fmt: skip
    return engines.run(job, recipe, kv_transfer_config=transfer, **changes)


def answers(llm, prompts, salt=None):
    """Return the new tokens of each prompt, and how many of its tokens were not computed."""
    from vllm import SamplingParams

    wanted = SamplingParams(max_tokens=NEW, temperature=0, ignore_eos=True)
    asked = [{"prompt_token_ids": x, **({"cache_salt": salt} if salt else {})} for x in prompts]
    found = llm.generate(asked, wanted, use_tqdm=False)
    return [(list(x.outputs[0].token_ids), x.num_cached_tokens) for x in found]


def expected(recipe, prompt, loaded):
    """Return what `answers` finds: loaded tokens are packed, as if they were a chunk."""
    cuts = [loaded] if loaded else []
    return engines.in_transformers(recipe, [prompt], NEW, cuts=cuts)[0], loaded


@pytest.mark.parametrize(
    ("recipe", "executor"), [("kivi-4@first 2=full", "mp"), ("skvq:sinks=0", "uni")]
)
def test_an_engine_that_starts_again_loads_the_pages_of_a_prompt(tmp_path, recipe, executor):
    first = run(lambda llm: answers(llm, [PROMPT]), recipe, tmp_path)
    assert first == [expected(recipe, PROMPT, 0)]
    store = kvloom.PromptStore(tmp_path)
    assert [entry.tokens for entry in store.entries()] == [PAGE] * 4
    assert store.verify() == {}
    ends = PROMPT[:WHOLE]  # its last token is always computed
    again = run(
        lambda llm: answers(llm, [PROMPT, ends]), recipe, tmp_path,
        distributed_executor_backend=executor,
    )  # fmt: skip
    assert again == [expected(recipe, PROMPT, WHOLE), expected(recipe, ends, WHOLE - PAGE)]
    assert len(store.entries()) == 4


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """A folder with the pages of both prompts."""
    folder = tmp_path_factory.mktemp("stored")
    run(lambda llm: answers(llm, [PROMPT, OTHER]), "kivi", folder)
    return folder


def copied(stored, folder):
    """Return a store of the same files in another folder."""
    for path in stored.glob("*.safetensors"):
        (folder / path.name).write_bytes(path.read_bytes())
    return kvloom.PromptStore(folder)


def paths(store, prompt):
    """Return the files of the pages of a prompt, in order."""
    pages = [prompt[i : i + PAGE] for i in range(0, len(prompt) // PAGE * PAGE, PAGE)]
    found = [(store.describe(x.key)["ids"], store.index.path(x.key)) for x in store.entries()]
    return [next(path for ids, path in found if ids == page) for page in pages]


def test_a_page_that_is_damaged_or_another_is_set_aside_and_computed(stored, tmp_path):
    store = copied(stored, tmp_path)
    damaged, (renamed, other) = paths(store, PROMPT)[1], paths(store, OTHER)
    content = bytearray(damaged.read_bytes())
    content[-99] ^= 1
    damaged.write_bytes(content)
    renamed.write_bytes(other.read_bytes())
    found = run(lambda llm: answers(llm, [PROMPT, OTHER]), "kivi", tmp_path)
    assert found == [expected("kivi", PROMPT, PAGE), expected("kivi", OTHER, 0)]
    for path in (damaged, renamed):
        assert path.with_suffix(".damaged").exists()
        assert path.read_bytes() == (stored / path.name).read_bytes() or path == damaged
    assert store.verify() == {}
    assert len(store.entries()) == 6


def test_no_other_tenant_salt_or_dtype_has_a_hit(stored, tmp_path):
    store = copied(stored, tmp_path)

    def salted(llm):
        found = [answers(llm, [OTHER], salt) for salt in ("one", "two", "one", None)]
        assert llm.reset_prefix_cache(reset_connector=True)  # as after new weights
        return [cached for ((_, cached),) in [*found, answers(llm, [OTHER])]]

    assert run(salted, "kivi", tmp_path) == [0, 0, 256, 256, 0]
    count = len(store.entries())
    assert count == 6 + 2 * 2
    for options, changes in (({"tenant": "other"}, {}), ({}, {"dtype": "bfloat16"})):
        found = run(lambda llm: answers(llm, [OTHER]), "kivi", tmp_path, options, **changes)
        assert found[0][1] == 0
        count += 2
        assert len(store.entries()) == count


def test_a_step_that_fails_stores_nothing(tmp_path):
    """vLLM calls the connector after it, with blocks of which some layers are not written."""

    def job(llm):
        from kvloom.paged import PackedPages

        write, calls = PackedPages.write, []

        def failing(*args):
            calls.append(1)
            if len(calls) == 4:
                raise MemoryError("in the fourth layer")
            write(*args)

        PackedPages.write = failing
        with pytest.raises(MemoryError, match="fourth"):
            answers(llm, [OTHER])
        return len(calls)

    assert run(job, "kivi", tmp_path) == 4
    assert kvloom.PromptStore(tmp_path).entries() == []


def test_preempted_requests_load_their_pages_again(tmp_path):
    """Beside vLLM's prefix cache, in a pool that does not hold all requests."""
    prompts, new = engines.prompts([200 + i for i in range(8)]), 120

    def job(llm):
        scheduler, cuts, before = core(llm), {}, free_blocks(llm)
        preempt = scheduler._preempt_request

        def noting(request, *args, **options):
            cuts[int(request.request_id.split("-")[0])] = request.num_output_tokens
            return preempt(request, *args, **options)

        scheduler._preempt_request = noting
        return engines.generate(llm, prompts, new), cuts, before == free_blocks(llm)

    run(lambda llm: engines.generate(llm, prompts, 1), "kivi-4", tmp_path)
    found, cuts, all_freed = run(
        job, "kivi-4", tmp_path, kv_cache_memory_bytes=42 * BLOCK, enable_prefix_caching=True
    )
    assert cuts, "the pool is too large: nothing was preempted"
    assert all_freed
    for i, prompt in enumerate(prompts):
        at = cuts.get(i, 0)
        whole = prompt + found[i][:at]
        assert [found[i][at:]] == engines.in_transformers("kivi-4", [whole], new - at, cuts=[PAGE])


def test_a_checkpoint_that_changed_after_the_engine_began_is_refused(tmp_path):
    from kvloom_vllm.connector import weights_sum

    path, began = tmp_path / "model.safetensors", time.time() + 1
    path.write_bytes(b"weights")
    first = weights_sum(tmp_path, began)
    assert weights_sum(tmp_path, began) == first
    path.write_bytes(b"others!")
    assert weights_sum(tmp_path, began) != first
    with pytest.raises(ValueError, match="was changed after this engine began"):
        weights_sum(tmp_path, began - 2)


def test_prompts_that_are_not_tokens_alone_are_not_noted():
    from kvloom_vllm.connector import KvloomStore

    connector = object.__new__(KvloomStore)
    connector.prompts, connector.page = {}, PAGE
    connector.pages = SimpleNamespace(keys=lambda *_: [])
    plain = {
        "request_id": "0", "prompt_token_ids": [1], "mm_features": [], "prompt_embeds": None,
        "lora_request": None, "resumable": False, "cache_salt": None,
    }  # fmt: skip
    for name, x in (
        ("mm_features", [object()]), ("prompt_embeds", torch.zeros(1, 2)),
        ("lora_request", object()), ("resumable", True), ("prompt_token_ids", None),
    ):  # fmt: skip
        connector.on_new_request(SimpleNamespace(**(plain | {name: x})))
        assert connector.prompts == {}
    connector.on_new_request(SimpleNamespace(**plain))
    assert list(connector.prompts) == ["0"]


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"kv_transfer_config": SimpleNamespace(kv_role="kv_consumer")}, "kv_role"),
        ({"parallel_config": SimpleNamespace(world_size=2)}, "tensor parallelism"),
        ({"lora_config": object()}, "LoRA"),
        ({"weight_transfer_config": object()}, "weights that change"),
        ({"load_config": SimpleNamespace(load_format="dummy")}, "safetensors files"),
        ({"model_config": SimpleNamespace(model="a name")}, "safetensors files"),
    ],
)
def test_engines_that_a_store_does_not_serve(tmp_path, changes, why):
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    config = {
        "kv_transfer_config": SimpleNamespace(kv_role="kv_both"),
        "parallel_config": SimpleNamespace(world_size=1), "lora_config": None,
        "weight_transfer_config": None, "load_config": SimpleNamespace(load_format="auto"),
        "model_config": SimpleNamespace(model=str(tmp_path)),
    }  # fmt: skip
    assert refusal._store_problems(SimpleNamespace(**config)) == []
    (problem,) = refusal._store_problems(SimpleNamespace(**(config | changes)))
    assert why in problem


@pytest.mark.parametrize(
    ("recipe", "options", "why"),
    [(None, {}, "ask for a recipe"), ("kivi", {"size": 1}, "was given .*size")],
)
def test_stores_that_do_not_start(tmp_path, recipe, options, why):
    with pytest.raises(engines.Failed, match=why):
        run(free_blocks, recipe, tmp_path, options)
