"""Pages of `kvloom.continuous` in a prompt store: prompts begin with them, in any later block."""

from __future__ import annotations

import pytest
import torch
import zoo
from test_continuous import (
    KIVI,
    PAGE,
    alone,
    batch,
    generation,
    llama,
    prompts,
    pytestmark,
    settings,
    watch,
)  # fmt: skip

import kvloom
from kvloom.errors import CacheMisuse, InputError, StoreError
from kvloom.hf.prompts import identity
from kvloom.hf.prompts.pages import StoredPages
from kvloom.recipe import resolve
from mutations import flipped

__all__ = ["llama", "pytestmark", "watch"]
(PROMPT,) = prompts([110])
WHOLE = 96  # tokens of the prompt's full pages


@pytest.fixture
def store(tmp_path):
    return kvloom.PromptStore(tmp_path)


def tokens(model, recipe, store, inputs=(PROMPT,), new=12, **changes):
    """Return the new tokens of requests in a block of their own."""
    with kvloom.continuous(model, recipe, store=store):
        return batch(model, list(inputs), new, **changes)


@pytest.mark.parametrize("recipe", ["full", KIVI, "near-lossless:group=16,sinks=2"])
def test_a_prompt_begins_with_stored_pages(llama, recipe, store, watch):
    """It gets the tokens of a prefix hit within a block; exact pages give those of no store."""
    first = tokens(llama, recipe, None)
    assert tokens(llama, recipe, store) == first
    assert watch.hits == [0, 0]
    again = tokens(llama, recipe, kvloom.PromptStore(store.folder))  # as of another process
    assert watch.hits[2:] == [WHOLE]
    assert again == [alone(llama, recipe, PROMPT, cuts=[WHOLE])]
    assert recipe != "full" or again == first
    watch.assert_nothing_left()


def test_prompts_share_pages_of_which_some_are_in_memory(llama, store, watch):
    tokens(llama, KIVI, store)
    longer = [PROMPT + tail for tail in prompts([9, 50], seed=1)]
    found = tokens(llama, KIVI, store, longer)
    assert watch.hits[1:] == [WHOLE, WHOLE]
    assert found == [alone(llama, KIVI, prompt, cuts=[WHOLE]) for prompt in longer]
    answer = PROMPT + tokens(llama, KIVI, store, new=30)[0]  # pages of an answer are stored, too
    watch.hits.clear()
    tokens(llama, KIVI, store, [answer])
    assert watch.hits == [128]
    watch.assert_nothing_left()


@pytest.mark.parametrize("damaged", [0, 1])
def test_a_damaged_page_is_set_aside_and_read_again(llama, store, watch, damaged):
    first = tokens(llama, KIVI, store)
    path = store.index.path(sorted(store.entries(), key=lambda x: x.created)[damaged].key)
    path.write_bytes(flipped(path.read_bytes(), 8 * path.stat().st_size - 99))
    with pytest.warns(UserWarning, match="its checksum is wrong.*set aside"):
        found = tokens(llama, KIVI, store)
    assert watch.hits[1:] == [PAGE * damaged]
    assert found == (first if not damaged else [alone(llama, KIVI, PROMPT, cuts=[PAGE])])
    assert path.with_suffix(".damaged").exists()
    assert path.exists()  # it has been read and stored again
    watch.assert_nothing_left()


def test_no_other_tenant_recipe_page_or_model_has_a_hit(llama, store, watch):
    tokens(llama, KIVI, store)
    tokens(llama, KIVI, kvloom.PromptStore(store.folder, tenant="other"))
    tokens(llama, "kivi:group=16", store)
    tokens(llama, KIVI, store, page_size=48)
    tokens(zoo.build("llama-mha"), KIVI, store)
    assert watch.hits == [0] * 5
    cache, reused = store.longest(llama, KIVI, torch.tensor(PROMPT))
    assert (cache.get_seq_length(), reused) == (0, 0)


def test_requests_complete_where_blocks_are_few(llama, store, watch):
    inputs = prompts([28 + i for i in range(10)])
    few = {"num_blocks": 8, "safety_margin": 0.0}
    want = tokens(llama, "full", store, inputs, 40)
    assert tokens(llama, "full", store, inputs, 40, **few) == want
    assert watch.preempted
    watch.caches = watch.caches[:1]
    watch.assert_nothing_left()


def test_what_is_refused_by_name(llama, store, tmp_path):
    with pytest.raises(InputError, match="allow_block_sharing is False"):
        tokens(llama, KIVI, store, allow_block_sharing=False)
    hook = llama.model.layers[0].register_forward_hook(lambda *x: None)
    with pytest.raises(StoreError, match="forward hook"):
        tokens(llama, KIVI, store)
    hook.remove()
    tokens(llama, KIVI, store)
    with pytest.raises(StoreError, match=r"is a page of .* which no cache reads"):
        store.export(store.entries()[0].key, tmp_path / "x.kv")
    assert store.verify() == {}
    assert {entry.tokens for entry in store.entries()} == {PAGE}


def test_a_store_that_is_full_stops_no_request(llama, tmp_path):
    database = kvloom.PromptStore(tmp_path).index.database_nbytes
    store = kvloom.PromptStore(tmp_path, max_bytes=database + 100)
    with pytest.warns(UserWarning, match="does not fit a prompt store"):
        assert tokens(llama, KIVI, store) == tokens(llama, KIVI, None)


def test_the_model_is_identified_once_for_the_pages_of_a_request(llama, store, watch, monkeypatch):
    identified, fields = [], identity.fields
    monkeypatch.setattr(identity, "fields", lambda *x: identified.append(1) or fields(*x))
    tokens(llama, KIVI, store, new=50)
    assert (
        len(identified) == 3
    )  # at the beginning, at the start of a manager, and at the end of the request
    assert len(store.entries()) == 4
    monkeypatch.setattr("kvloom.hf.prompts.pages._MOST_WAITING", 1)
    tokens(llama, "full", store, new=50)
    assert len(identified) == 3 + 2 + 4
    watch.assert_nothing_left()


def test_a_page_that_waits_is_found(llama, store):
    stored = StoredPages.of_cache(store, kvloom.Cache(llama, KIVI))
    ids, page = PROMPT[:PAGE], torch.arange(99, dtype=torch.uint8)
    (key,) = stored.keys(ids, PAGE)
    assert stored.load(key, ids, 99) is None
    stored.put(key, ids, page)
    assert store.entries() == []
    assert torch.equal(stored.load(key, ids, 99), page)
    assert stored.load(key, PROMPT[1 : PAGE + 1], 99) is None
    stored.flush()
    stored.flush()
    assert [entry.key for entry in store.entries()] == [key]
    assert torch.equal(stored.load(key, ids, 99), page)


def test_pages_of_a_model_that_changes_are_not_stored(store):
    """They would have the key of the model at the beginning of the block."""
    model = zoo.build("llama-gqa")

    def change_while_it_runs():
        manager = model.init_continuous_batching(generation(), settings())
        manager.start()
        with torch.no_grad():
            model.model.layers[0].mlp.up_proj.weight.mul_(1.5)
        manager.add_request(PROMPT)
        assert manager.get_result(timeout=60).error is None
        manager.stop()

    warned = pytest.warns(UserWarning, match="not stored: the model has changed since")
    with kvloom.continuous(model, KIVI, store=store), warned:
        change_while_it_runs()
    assert store.entries() == []


def test_a_model_that_changes_in_a_block_is_refused(store):
    model = zoo.build("llama-gqa")
    with kvloom.continuous(model, "full", store=store):
        batch(model, [PROMPT])
        model.model.layers[0].self_attn.scaling *= 2
        with pytest.raises(CacheMisuse, match="the model has changed since"):
            batch(model, [PROMPT])


def test_what_identifies_a_page_of_another_engine(tmp_path):
    """Each part of it changes the key of a page."""
    given = {
        "engine": "vLLM 1", "recipe": resolve("kivi"), "encodings": [(None, None)],
        "config": {"architectures": ["A"], "rms_norm_eps": 1e-5}, "settings": {"weights": "0"},
    }  # fmt: skip
    others = {
        "engine": "vLLM 2", "recipe": resolve("kivi-4"),
        "config": {"architectures": ["A"], "rms_norm_eps": 1e-6}, "settings": {"weights": "1"},
    }  # fmt: skip

    def key(ids=(1, 2), salt="", tenant="", **changes):
        pages = StoredPages.of_engine(
            kvloom.PromptStore(tmp_path, tenant=tenant), **(given | changes)
        )
        return pages.keys(ids, 2, salt)[0]

    keys = [key(), key((1, 3)), key(salt="x"), key(tenant="x")]
    keys += [key(**{name: x}) for name, x in others.items()]
    assert len(set(keys)) == len(keys) == 8
    assert key() == keys[0]
